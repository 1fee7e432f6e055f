"""Workloads for which layouts are searched: a model, the sizes of its step, and the chip that runs it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from gspmd.annotate.errors import PlanError
from gspmd.hardware.chips import Chip
from gspmd.training import OptimizerConfig
from gspmd.training.step import Update

from ..config import ModelConfig

Phase = Literal["train", "encode", "prefill", "decode"]
Stored = Literal["dtype", "int8"]


BASE = "replicated"
"""A preset with every line of every model. A search only uses the dimensions of its specs, and only writes the lines
that the model's program uses."""

STEPS = 1000
"""Length of the learning rate schedule of a step that is priced; it does not affect the cost."""


@dataclass(frozen=True)
class Workload:
    """A step of a model: everything that a search problem needs, apart from the mesh.

    Attributes:
        config: the configuration of the whole model. In serving, the model's experts drop no token.
        chip: the chip for which seconds are predicted.
        batch: number of sequences per step, over all devices; in serving, the number of rows of the cache.
        length: number of tokens per sequence.
        dtype: the compute dtype; in serving, also that of weights and cache unless they are int8.
        phase: `"train"`, a whole update; `"encode"`, which reads the source of every row; `"prefill"`, which reads
            `length` tokens of every row into an empty cache; or `"decode"`, which reads one token of every row with a
            full cache.
        microbatches: the number of parts of a training batch that run one after another.
        weights: in serving, `"int8"` for int8 matrices with a scale for each channel; otherwise `"dtype"`.
        cache: in serving, `"int8"` for int8 keys and values with a scale for each token and head; otherwise `"dtype"`.
        room: number of tokens of a text that the cache can hold; 0 for `length`.
        fixed: lines that are not searched, with their specs.
        update: the settings of a training step's update, whose number of microbatches is ignored.
        source_length: number of tokens per source of an encoder–decoder; 0 for `length`.
        beams: in decoding, the number of successive rows that are the beams of one prompt; 0 for no beam search. The
            caches of these rows are on one device.
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
    source_length: int = 0
    beams: int = 0


class Unsearched(PlanError):
    """The error for a model with a part that the search cannot price.

    Commands replace the last line of its message by one that names flags.

    Attributes:
        fact: the question, and the reasons why it cannot be answered.
    """

    def __init__(self, asked: str, faults: Iterable[str]):
        self.fact = f"cannot search {asked}: {'; '.join(faults)}."
        super().__init__(f"{self.fact}\n  Give it a layout of your own.")
