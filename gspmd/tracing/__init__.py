"""Tracing: the planned steps of a whole function, without the steps that its compiler merges with others."""
