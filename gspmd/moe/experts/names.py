"""The names of activation functions, which settings can read without importing JAX."""

GATED = ("swiglu", "swiglu_clamped", "geglu")
"""Names of the activation functions of two arrays, a gate and the array that is multiplied by the gate."""

PLAIN = (*GATED, "gelu", "gelu_exact", "relu", "silu")
"""Names of the activation functions of dense layers and of experts."""
