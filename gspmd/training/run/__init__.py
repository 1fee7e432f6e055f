"""A training run: its loop, its handling of signals and of non-finite updates, and its folder."""
