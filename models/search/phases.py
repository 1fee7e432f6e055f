"""The search problem of a workload's phase, and the range of numbers of microbatches to search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gspmd.search.answers.microbatches import Range, several
from gspmd.search.answers.options import Options
from gspmd.search.phase import PhaseProblem

from ..config import ModelConfig
from .serving import ServingProblem
from .training import MOST_WITH_ADAPTERS, RelaxedTraining, TrainingProblem
from .workload import Workload


def problem_of(workload: Workload, mesh: Mapping[str, int]) -> PhaseProblem:
    """Return the search problem of a workload on a mesh with these axis sizes.

    Raises:
        PlanError: the model has a part that cannot be searched, or the microbatches do not divide the batch.
        LayoutError: a line that is fixed does not exist in a training step.
    """
    if workload.phase != "train":
        return ServingProblem(workload, mesh)
    return TrainingProblem(workload, mesh)


def several_of(workload: Workload, mesh: Mapping[str, int], limit: float) -> Range:
    """Return the range of numbers of microbatches above one to search; the workload's own number is ignored."""

    def make(count: int) -> PhaseProblem:
        return problem_of(replace(workload, microbatches=count), mesh)

    phase = RelaxedTraining(workload, mesh)
    return Range(phase, Options(phase), several(workload.batch), make, limit)


def searched(meshes: Iterable[Mapping[str, int]], config: ModelConfig) -> list[Mapping[str, int]]:
    """Return the meshes to search for a model; with adapters, only those of up to two axes, if there are any."""
    every = [*meshes]
    few = [mesh for mesh in every if sum(size > 1 for size in mesh.values()) <= MOST_WITH_ADAPTERS]
    return few if config.lora and few else every
