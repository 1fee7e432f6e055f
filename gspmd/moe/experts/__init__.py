"""The experts as one planned program: its work, equations, chunks, exchange and dropout."""
