"""Pipelines: layers are split into stages over a mesh axis, and microbatches go through the stages one by one."""

from typing import TYPE_CHECKING

from gspmd.deferred import deferred

if TYPE_CHECKING:
    from gspmd.pipeline.interleaving import in_rounds
    from gspmd.pipeline.loss import pipelined
    from gspmd.pipeline.schedule import SCHEDULES, Schedule, Work
    from gspmd.pipeline.stage import Stages

__all__ = ["SCHEDULES", "Schedule", "Stages", "Work", "in_rounds", "pipelined"]

_HOMES = {
    ".interleaving": "in_rounds",
    ".loss": "pipelined",
    ".schedule": "SCHEDULES Schedule Work",
    ".stage": "Stages",
}
__getattr__, __dir__ = deferred(__name__, _HOMES)
