"""The problem of a phase by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from gspmd.hardware.chips import Chip

from ...config import ModelConfig
from ..problem import PhaseProblem
from ..serving import ServingProblem
from ..training import TrainingProblem


def problem_of(
    phase: Literal["train", "prefill", "decode"],
    config: ModelConfig,
    mesh: Mapping[str, int],
    chip: Chip,
    batch: int,
    length: int,
    dtype: str = "bfloat16",
    microbatches: int = 1,
) -> PhaseProblem:
    """The problem of a phase on one mesh; its arguments are those of `TrainingProblem` and `ServingProblem`.

    Raises:
        PlanError: the model has what is not searched.
    """
    if phase == "train":
        return TrainingProblem(config, mesh, chip, batch, length, dtype, microbatches)
    return ServingProblem(config, mesh, chip, phase, batch, length, dtype=dtype)
