"""JAX's plugin for CUDA, which compiles for GPUs that are not attached; tests that need it are skipped without it."""

from importlib import util

import pytest

HAS_CUDA_PLUGIN = any(util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))

needs_cuda_plugin = pytest.mark.skipif(
    not HAS_CUDA_PLUGIN, reason="JAX's plugin for CUDA, the compiler for GPUs, is not installed: gspmd[gpu-offline]"
)
