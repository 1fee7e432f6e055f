"""Planned operations on sharded arrays, which model code calls between its einsums.

`gspmd.einsum` and `gspmd.reshard` are in this package too, under their top-level names.
"""

from importlib import import_module
from typing import Any

__all__ = [
    "Buckets", "add_bias", "argmax", "attention", "cached_attention", "cross_entropy", "embed", "global_norm",
    "layer_norm", "logsumexp", "quantize_heads", "rms_norm", "sample", "softmax", "write_cache", "zigzag_positions",
]  # fmt: skip

# Each operation is imported at its first use: an einsum needs none of them. Type checkers read __init__.pyi instead.
_HOMES = {
    "Buckets": "_attention", "add_bias": "_bias", "cached_attention": "_attention", "embed": "_embedding",
    "logsumexp": "_softmax", "quantize_heads": "_attention", "rms_norm": "_norm", "write_cache": "_attention",
    "zigzag_positions": "_attention",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gspmd.ops' has no attribute {name!r}", name=name)
    globals()[name] = found = getattr(import_module(f"gspmd.ops.{_HOMES.get(name, '_' + name)}"), name)
    return found


def __dir__() -> list[str]:
    return __all__
