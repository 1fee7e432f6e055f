"""Ledgers: the collectives of a compiled program in bytes, compared with its plan or with another program."""
