"""The names of activation functions, which settings can read without importing JAX."""

GATED = ("swiglu", "swiglu_clamped", "geglu")
"""Activation functions of two arrays, a gate and a product."""

PLAIN = (*GATED, "gelu", "gelu_exact", "relu", "silu")
"""Activation functions of dense layers, and of experts."""
