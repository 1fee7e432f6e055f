"""Tracing: the planned steps of a whole function, less those that its compiler merges."""
