"""The planned operations under the name that this room had: `gspmd.ops`."""

from gspmd.ops import argmax, attention, cross_entropy, embed, global_norm, logsumexp, rms_norm, softmax

__all__ = ["argmax", "attention", "cross_entropy", "embed", "global_norm", "logsumexp", "rms_norm", "softmax"]
