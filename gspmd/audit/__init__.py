"""What the compiler made of it."""
