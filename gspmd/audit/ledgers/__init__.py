"""Ledgers: the collectives of a compiled program and their bytes, compared with a plan or with another program."""
