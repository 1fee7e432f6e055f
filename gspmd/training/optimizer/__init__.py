"""The optimizer: AdamW, its learning rate schedule, clipping, float32 masters, and 8-bit moments."""

from gspmd.training.optimizer.adam import Norm, adamw, clip, schedule

__all__ = ["Norm", "adamw", "clip", "schedule"]
