"""What model code calls between its einsums: planned operations on placed arrays.

`gspmd.einsum` and `gspmd.reshard` stand in this room too, and are names of the package itself.
"""

from importlib import import_module
from typing import Any

# Each is imported when it is asked for: an einsum needs none of them. Type checkers read __init__.pyi instead.
_HOMES = {
    "add_bias": "_bias", "argmax": "_argmax", "attention": "_attention", "cached_attention": "_attention",
    "cross_entropy": "_cross_entropy", "embed": "_embedding", "global_norm": "_global_norm",
    "layer_norm": "_layer_norm", "logsumexp": "_softmax", "quantize_heads": "_attention", "rms_norm": "_norm",
    "sample": "_sample", "softmax": "_softmax", "write_cache": "_attention",
}  # fmt: skip

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gspmd.ops' has no attribute {name!r}", name=name)
    globals()[name] = found = getattr(import_module(f"gspmd.ops.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return __all__
