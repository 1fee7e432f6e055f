"""Lowering `looped`: collectives that overlap with the einsums beside them, chunk by chunk."""
