"""Tracing: the planned steps of a whole function, without the steps that the compiler merges with others."""
