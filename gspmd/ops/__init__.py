"""What model code calls between its einsums: planned operations on placed arrays.

`gspmd.einsum` and `gspmd.reshard` stand in this room too, and are names of the package itself.
"""

from gspmd.ops._argmax import argmax
from gspmd.ops._attention import attention
from gspmd.ops._cross_entropy import cross_entropy
from gspmd.ops._embedding import embed
from gspmd.ops._global_norm import global_norm
from gspmd.ops._norm import rms_norm
from gspmd.ops._softmax import logsumexp, softmax

__all__ = ["argmax", "attention", "cross_entropy", "embed", "global_norm", "logsumexp", "rms_norm", "softmax"]
