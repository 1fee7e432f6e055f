"""What a compiled program sends, beside what was planned, and beside another program."""
