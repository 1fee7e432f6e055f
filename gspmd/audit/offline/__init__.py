"""Offline compilation: the memory and the time of a function on TPUs and GPUs that are not attached."""
