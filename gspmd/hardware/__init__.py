"""What the machine can do: chips, and the seconds that bytes and products take on them."""
