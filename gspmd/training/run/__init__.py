"""A run: its loop, what stops it, and its folder."""
