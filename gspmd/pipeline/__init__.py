"""Pipelines: layers split into stages over a mesh axis, through which microbatches follow one another."""

from gspmd.pipeline.interleaving import in_rounds
from gspmd.pipeline.loss import pipelined
from gspmd.pipeline.schedule import SCHEDULES, Schedule, Work
from gspmd.pipeline.stage import Stages

__all__ = ["SCHEDULES", "Schedule", "Stages", "Work", "in_rounds", "pipelined"]
