"""The experts as one planned program: equations, chunks, all-to-alls, activation and dropout."""
