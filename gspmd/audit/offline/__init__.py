"""Offline compilation: the cost of a function on TPU slices that are not attached."""
