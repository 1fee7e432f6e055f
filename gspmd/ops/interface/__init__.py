"""The common parts of operations: reading specs, arrays and options; and what an operation is made of."""
