"""Training steps of small models on host devices, planned and compiled; nothing is allocated and nothing runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
from jax.sharding import AxisType

import gspmd
import gspmd_models as models
from gspmd.audit import Ledger
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd.tracing.trace import ProgramPlan
from gspmd.training import OptimizerConfig
from gspmd.training.step import jit_step
from gspmd_models import step
from gspmd_models.parameters import stages_axes
from tests.references.models import TINY

# Two repeats of a dense block and one of experts, so that the backward pass recomputes.
SMALL = replace(TINY, layers=4, moe=MoEConfig(experts=8, every=2))
BATCH, LENGTH, UPDATES = 8, 16, 100
AXIS_TYPES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}


@dataclass(frozen=True)
class Built:
    """A step's plan, and the ledger of its compiled program."""

    plan: ProgramPlan
    ledger: Ledger


def training(
    name: str,
    config: models.ModelConfig = SMALL,
    *,
    mesh: Mapping[str, int] | None = None,
    axis_type: str = "explicit",
    lowering: str = "blocking",
) -> Built:
    """Plan and compile a preset's training step in float32, as the training loop does.

    Args:
        name: the name of the preset.
        config: the model.
        mesh: sizes of the axes of eight host devices; the preset's own mesh if not given.
        axis_type: "explicit" or "auto".
        lowering: the lowering of every part of the model.

    Raises:
        LayoutError: the preset does not fit the model on this mesh.
    """
    layout, optimizer = Layout.load(name).lowered(lowering), OptimizerConfig()
    sizes = mesh or layout.mesh_for(8, config.sizes(BATCH, LENGTH))
    layout.check(config.sizes(BATCH, LENGTH), sizes)
    devices = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AXIS_TYPES[axis_type],) * len(sizes))
    with jax.set_mesh(devices), gspmd.lowering(lowering):
        model = models.abstract(config, layout, devices)
        state = step.abstract_state(model, optimizer, UPDATES, devices)
        arguments = state, models.abstract_batch(layout, devices, BATCH, LENGTH), models.abstract_key(devices)
        # A pipeline of one microbatch has no loop, and the compiler merges computations of stages that nothing uses.
        update = jit_step(step.training_step(model, optimizer, UPDATES, 2 if stages_axes(layout) else 1), state)
        plan = gspmd.trace(update, *arguments)  # the compiled function itself, which is traced once for both
        return Built(plan, gspmd.ledger(update.lower(*arguments).compile()))
