"""The optimizer: AdamW and its schedule, masters of narrow parameters, moments of eight bits, clipping."""

from gspmd.training.optimizer.adam import Norm, adamw, clip, schedule

__all__ = ["Norm", "adamw", "clip", "schedule"]
