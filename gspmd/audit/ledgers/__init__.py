"""Ledgers: the bytes that a compiled program sends, compared with its plan or with another program."""
