"""Lowerings: from a plan to a program."""
