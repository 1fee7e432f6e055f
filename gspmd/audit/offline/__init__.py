"""Offline compilation: what a function costs on TPU slices that are not attached."""
