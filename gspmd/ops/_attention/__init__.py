"""Attention to all keys of a sequence, and attention to a key/value cache, for any specs."""

from gspmd.ops._attention.buckets import Buckets
from gspmd.ops._attention.cache import quantize_heads, write_cache
from gspmd.ops._attention.cached import cached_attention
from gspmd.ops._attention.whole import attention
from gspmd.ops._attention.zigzag import zigzag_positions

__all__ = ["Buckets", "attention", "cached_attention", "quantize_heads", "write_cache", "zigzag_positions"]
