"""The common parts of operations: reading specs, arrays and options, and building blocks for plans."""
