"""The functions of gspmd.ops, for type checkers."""

from gspmd.ops._argmax import argmax as argmax
from gspmd.ops._attention import Buckets as Buckets
from gspmd.ops._attention import attention as attention
from gspmd.ops._attention import cached_attention as cached_attention
from gspmd.ops._attention import quantize_heads as quantize_heads
from gspmd.ops._attention import write_cache as write_cache
from gspmd.ops._attention import zigzag_positions as zigzag_positions
from gspmd.ops._bias import add_bias as add_bias
from gspmd.ops._cross_entropy import cross_entropy as cross_entropy
from gspmd.ops._embedding import embed as embed
from gspmd.ops._global_norm import global_norm as global_norm
from gspmd.ops._layer_norm import layer_norm as layer_norm
from gspmd.ops._norm import rms_norm as rms_norm
from gspmd.ops._sample import sample as sample
from gspmd.ops._softmax import logsumexp as logsumexp
from gspmd.ops._softmax import softmax as softmax
