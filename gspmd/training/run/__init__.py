"""A run: its loop, its signals and guards, and its folder."""
