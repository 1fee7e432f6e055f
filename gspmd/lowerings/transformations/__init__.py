"""What JAX's transformations have to be told of planned programs: gradients, `vmap`, partial sums in loops."""
