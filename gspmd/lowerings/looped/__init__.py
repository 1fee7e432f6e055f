"""Lowering `looped`: collectives that overlap with the einsums before or after them, chunk by chunk."""
