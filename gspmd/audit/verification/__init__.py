"""Verification: comparison of a function under each lowering with the same function on one device."""
