"""Offline compilation: memory and time of a function on TPUs and GPUs that are not attached."""
