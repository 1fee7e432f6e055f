"""Verification: compares a function under each lowering with the same function on one device."""
