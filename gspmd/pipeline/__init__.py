"""Pipelines: layers split into stages over a mesh axis, through which microbatches follow one another."""

from gspmd.pipeline.interleaving import in_rounds
from gspmd.pipeline.loss import Stages, pipelined
from gspmd.pipeline.schedule import SCHEDULES, Schedule, Work

__all__ = ["SCHEDULES", "Schedule", "Stages", "Work", "in_rounds", "pipelined"]
