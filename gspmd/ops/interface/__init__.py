"""The common parts of operations: reading specs, arrays and options, and the building blocks of an operation."""
