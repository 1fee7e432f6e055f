"""Planned programs under JAX's transformations: gradients, `vmap`, partial sums in loops."""
