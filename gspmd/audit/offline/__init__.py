"""Offline compilation: the cost of a function on TPUs and GPUs that are not attached."""
