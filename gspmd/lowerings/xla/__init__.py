"""Lowering `xla`: plain einsums with annotations, from which the compiler chooses the collectives."""
