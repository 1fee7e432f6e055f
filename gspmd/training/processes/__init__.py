"""Runs of several processes, which meet before JAX starts, compare settings, watch each other, and end together.

Reading order: joining, arrival, watch, native, comparison, rows.
"""

from typing import TYPE_CHECKING

from gspmd.deferred import deferred

if TYPE_CHECKING:
    from gspmd.training.processes.comparison import compare, environment
    from gspmd.training.processes.joining import (
        agreed,
        count,
        expect,
        fail,
        first,
        flag,
        gathered,
        index,
        join,
        leave,
        meet,
        several,
        told,
        watching,
    )
    from gspmd.training.processes.rows import part_of, placer

__all__ = [
    "agreed",
    "compare",
    "count",
    "environment",
    "expect",
    "fail",
    "first",
    "flag",
    "gathered",
    "index",
    "join",
    "leave",
    "meet",
    "part_of",
    "placer",
    "several",
    "told",
    "watching",
]

_HOMES = {
    ".comparison": "compare environment",
    ".joining": "agreed count expect fail first flag gathered index join leave meet several told watching",
    ".rows": "part_of placer",
}
__getattr__, __dir__ = deferred(__name__, _HOMES)
