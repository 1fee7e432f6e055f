"""Lowerings: the ways from a plan to a JAX program."""
