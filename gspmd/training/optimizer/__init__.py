"""The optimizer: AdamW and its schedule, float32 masters of narrower parameters, 8-bit moments, clipping."""

from gspmd.training.optimizer.adam import Norm, adamw, clip, schedule

__all__ = ["Norm", "adamw", "clip", "schedule"]
