"""Verification: a function under each lowering, compared with the same function on one device."""
