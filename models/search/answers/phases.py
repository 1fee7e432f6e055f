"""The problem of a phase by its name."""

from __future__ import annotations

from collections.abc import Mapping

from ..problem import PhaseProblem
from ..serving import ServingProblem
from ..training import TrainingProblem
from ..workload import Workload


def problem_of(workload: Workload, mesh: Mapping[str, int]) -> PhaseProblem:
    """The problem of a workload on a mesh, whose axes have these sizes.

    Raises:
        PlanError: the model has what is not searched; or the microbatches do not divide the batch.
    """
    return (TrainingProblem if workload.phase == "train" else ServingProblem)(workload, mesh)
