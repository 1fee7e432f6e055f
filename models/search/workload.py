"""Workloads that layouts are searched for: a model, how much of it a step runs, and the chip that runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gspmd.hardware.chips import Chip
from gspmd.training import OptimizerConfig
from gspmd.training.step import Update

from ..config import ModelConfig

Phase = Literal["train", "prefill", "decode"]
Stored = Literal["dtype", "int8"]


STEPS = 1000
"""Updates of the schedule of a step that is priced; any number costs the same."""


@dataclass(frozen=True)
class Workload:
    """A step of a model: all that a search problem is made of but the mesh.

    Attributes:
        config: the model, all of its layers; experts drop nothing where they are served.
        chip: whose seconds.
        batch: sequences of a step, over all devices; rows where it is served.
        length: tokens per sequence.
        dtype: compute dtype; where it is served, of weights and cache, too, unless they are int8.
        phase: `"train"`, a whole update; `"prefill"`, `length` tokens of every row into an empty cache; `"decode"`, one
            behind a full one.
        microbatches: parts of a training step's batch, one after the other.
        weights: `"int8"` where they are served with matrices of int8, with a scale for every channel; else `"dtype"`.
        cache: `"int8"` where keys and values are kept as int8, with a scale for each token and head; else `"dtype"`.
        room: tokens that a row of the cache has room for; 0 for `length`.
        fixed: lines that are not searched, with their specs.
        update: how a training step updates parameters; its number of microbatches is not read.
    """

    config: ModelConfig
    chip: Chip
    batch: int
    length: int
    dtype: str = "bfloat16"
    phase: Phase = "train"
    microbatches: int = 1
    room: int = 0
    weights: Stored = "dtype"
    cache: Stored = "dtype"
    fixed: tuple[tuple[str, str], ...] = ()
    update: Update = field(default_factory=lambda: Update(OptimizerConfig(), STEPS))


def base_of(config: ModelConfig) -> str:
    """Return the name of a preset that has every line of a model."""
    return "gshard" if config.moe else "replicated"


def absent_of(config: ModelConfig) -> tuple[str, ...]:
    """Return the lines of tensors that a model does not have, which lie as others do that it has: those of gates."""
    return () if config.gated else ("ffn.w_gate", "moe.w_gate")
