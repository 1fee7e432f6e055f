"""What layouts are searched for: a model, how much of it a step runs, and the chip that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gspmd.hardware.chips import Chip

from ..config import ModelConfig

Phase = Literal["train", "prefill", "decode"]


@dataclass(frozen=True)
class Workload:
    """A step of a model: all that a search problem is made of but the mesh.

    Attributes:
        config: the model, all of its layers; experts drop nothing where they are served.
        chip: whose seconds.
        batch: sequences of a step, over all devices; rows where it is served.
        length: tokens per sequence.
        dtype: compute dtype; where it is served, of weights and cache, too.
        phase: `"train"`, a whole update; `"prefill"`, `length` tokens of every row into an empty cache; `"decode"`, one
            behind a full one.
        microbatches: parts of a training step's batch, one after the other.
        room: tokens that a row of the cache has room for; 0 for `length`.
    """

    config: ModelConfig
    chip: Chip
    batch: int
    length: int
    dtype: str = "bfloat16"
    phase: Phase = "train"
    microbatches: int = 1
    room: int = 0
