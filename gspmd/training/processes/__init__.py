"""A run of several processes: joined before JAX starts, watched, and ended together.

Reading order: joining, watch, native, rows.
"""

from gspmd.training.processes.joining import agreed, count, fail, first, flag, index, join, leave, told, watching
from gspmd.training.processes.rows import part_of, placer

__all__ = [
    "agreed",
    "count",
    "fail",
    "first",
    "flag",
    "index",
    "join",
    "leave",
    "part_of",
    "placer",
    "told",
    "watching",
]
