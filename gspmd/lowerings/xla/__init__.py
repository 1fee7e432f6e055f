"""Lowering `xla`: annotations on plain einsums; the compiler inserts the collectives."""
