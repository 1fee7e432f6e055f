"""What an equation does: costs, plans, and the programs they become.

The planned forms of what stands between einsums are here; `einsum`, `reshard`, `plan`, `trace` and `lowering` are names
of the package itself.
"""

from gspmd.collectives.argmax import argmax
from gspmd.collectives.attention import attention
from gspmd.collectives.cross_entropy import cross_entropy
from gspmd.collectives.embedding import embed
from gspmd.collectives.global_norm import global_norm
from gspmd.collectives.norm import rms_norm
from gspmd.collectives.softmax import logsumexp, softmax

__all__ = ["argmax", "attention", "cross_entropy", "embed", "global_norm", "logsumexp", "rms_norm", "softmax"]
