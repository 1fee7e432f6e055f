"""Compile for TPU slices that are not attached."""
