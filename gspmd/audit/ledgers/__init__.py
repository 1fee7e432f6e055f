"""Ledgers: the bytes that a compiled program sends, beside its plan, and beside another program."""
