"""A model in pipeline stages: the schedule, the layout within a stage, and checks that come before tracing."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import jax
from jax.sharding import AxisType

from gspmd.annotate import Spec
from gspmd.annotate.errors import LayoutError, PlanError, report
from gspmd.layouts import Layout
from gspmd.layouts.rules.faults import Line, one_for_each_cause
from gspmd.layouts.rules.keys import ENCODER
from gspmd.layouts.variants import data_axes
from gspmd.pipeline import Schedule

from .config import ModelConfig
from .parameters import parameters, stages_axes

_SHOWN = 6
"""The largest number of parameters that one error names."""


def schedule_of(
    config: ModelConfig,
    layout: Layout,
    mesh: Mapping[str, int],
    schedule: str = "1f1b",
    microbatches: int = 1,
    rounds: int = 1,
) -> Schedule | None:
    """Return the schedule of the stages into which a layout splits a model's layers, or None if there are no stages.

    Args:
        config: the model configuration.
        layout: a `gspmd.Layout`.
        mesh: sizes of the mesh axes.
        schedule, microbatches, rounds: see `loss`.

    Raises:
        PlanError: the schedule is impossible, as `Schedule.of` describes; or stages times rounds does not divide the
            number of layers; or groups of tokens span several microbatches; or `offload` is set.
    """
    if not (axes := stages_axes(layout)):
        return None
    if config.offload:  # The inputs of chunks, which live for many slots, are in a buffer of the schedule.
        raise PlanError(
            "cannot keep the activations of stages in host memory: offload is set, and schedules of stages do not move "
            "what they keep.\n  Leave offload out, or train in a layout without stages."
        )
    table = Schedule.of(schedule, mesh[axes[0]], microbatches, rounds)
    check_splits(config, table.stages, rounds)
    if microbatches > 1 and config.moe and config.moe.groups:
        raise PlanError(
            f"cannot cut a batch with {config.moe.groups} groups of tokens into {microbatches} microbatches.\n"
            "  Leave moe.groups out, so that each sequence is a group, or train with one microbatch."
        )
    return table


def check_splits(config: ModelConfig, stages: int, rounds: int = 1) -> None:
    """Raise an error if the layers of some stack of the model cannot be split into equal chunks.

    Args:
        config: the model configuration.
        stages: the number of stages.
        rounds: the number of chunks of layers per stage, in each stack.

    Raises:
        PlanError: a stack cannot be split, or a layer with experts comes before the repeating layers.
    """
    if ahead := [number for number in range(config.lead) if config.is_sparse(number)]:
        raise PlanError(
            f"cannot split {config.layers} layers into stages: layers {config.lead} to {config.layers - 1} repeat, and "
            f"those before them, which the first stage runs, have experts (layer {ahead[0]}).\n"
            "  Choose moe.every, moe.dense_layers and layer_kinds so that all layers with experts repeat."
        )
    layers, inner = config.repeats, config.encoder_layers // config.pattern
    if layers % (stages * rounds) or inner % (stages * rounds):
        stacked = f"{layers} stacked layers" + f" after the first {config.lead}" * (config.lead > 0)
        if inner:
            stacked = f"{inner} stacked layers of the encoder and {layers} of the decoder"
        what = "their numbers must be multiples" if inner else "their number must be a multiple"
        raise PlanError(
            f"{stacked} do not make {rounds} round{'s' * (rounds > 1)} of {stages} stages.\n"
            f"  {what.capitalize()} of {stages * rounds}: change layers, rounds or mesh."
        )


def check_rounds(rounds: int, *layouts: Any) -> None:
    """Check that at least one layout has stages if there are several rounds.

    Raises:
        PlanError: no layout has stages.
    """
    if rounds > 1 and not any(map(stages_axes, layouts)):
        raise PlanError(f"rounds is {rounds}, but no layout here has stages; set rounds to 1.")


def check_stages(rounds: int, schedule: str, *layouts: Any) -> None:
    """Check that at least one layout has stages if there are several rounds, or if the schedule is not the default.

    Raises:
        PlanError: no layout has stages.
    """
    check_rounds(rounds, *layouts)
    if schedule != "1f1b" and not any(map(stages_axes, layouts)):
        raise PlanError(f"schedule is {schedule}, but no layout here has stages; leave it out.")


def check_lowering_of_stages(config: ModelConfig, layout: Layout, mesh: jax.sharding.Mesh, schedule: str) -> None:
    """Check, before anything is traced, that stages do not use the lowering `xla` where it cannot train them.

    The lowering `xla` needs a region of Auto axes within the shard_map of the stages. This is impossible in two cases.
    First, a mesh of Auto axes does not allow such a region, unless gradients are partial sums, which are computed under
    Explicit axes. Second, a backward pass in two parts cannot split such a region. Embedding lookups in stages are
    always planned, whatever the lowering.

    Raises:
        LayoutError: some lines of the layout's [lowering] ask for `xla`. The message names all of these lines.
    """
    stages, data = stages_axes(layout), side_axes(config, layout)
    if not stages or not {*mesh.axis_names} - {*stages, *data}:  # arrays are unsharded within a stage
        return
    if AxisType.Auto in mesh.axis_types and not data:
        fact, remedy = "stages under Auto mesh axes cannot leave collectives to the compiler.", "or Explicit axes"
    elif schedule == "zero-bubble":
        fact, remedy = "a backward pass in two parts cannot leave collectives to the compiler.", "or another schedule"
    else:
        return
    dense = config.expert_layers < config.layers + config.encoder_layers
    feed_forward = ("ffn", "moe") if config.moe and dense else ("moe",) if config.moe else ("ffn",)
    parts = ("default", "attention", *["cross"] * bool(config.encoder_layers), *feed_forward, "output")
    wrong = [part for part in parts if layout.lowerings.get(part) == "xla"]
    faults = [Line(part, "xla", "lowering").at_text(fact, f"Use 'blocking', {remedy}.") for part in wrong]
    if faults:
        doing = f"cannot train with schedule {schedule} in the stages of layout '{layout.name}'"
        raise report(LayoutError, doing, one_for_each_cause(faults))


def side_axes(config: ModelConfig, layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes along which pipelines run side by side: the axes that are `data_axes` of all stacks.

    A model with experts has no such axis, because the experts or their random draws depend on all tokens.
    """
    if config.moe:
        return ()
    data = data_axes(layout)
    if not config.encoder_layers:
        return data
    both = zip(data, data_axes(layout.stack(ENCODER)))
    return tuple(axis for axis, _ in takewhile(lambda pair: pair[0] == pair[1], both))  # these axes come first in B


def for_stages(config: ModelConfig, layout: Layout) -> Any:
    """Return a layout with the specs that parameters have in the loss of a pipeline, such as `EF_yz reduced-x`.

    The gradients of the parameters stay partial sums until the end of the step. They are partial over the mesh axes
    along which pipelines run side by side (`side_axes`).

    Raises:
        PlanError: the layout's [gradients] has partial sums over mesh axes that are not `side_axes`.
    """
    data = side_axes(config, layout)
    given, faults = {}, []
    for path, row in parameters(config, layout).items():
        # Without a section [encoder], the encoder's lines are the decoder's.
        in_encoder = path.startswith("encoder.") and ENCODER in layout.overrides
        at = layout.stack(ENCODER) if in_encoder else layout
        key = f"{ENCODER}.{row.key}" if in_encoder else row.key
        gradient, spec = Spec.parse(at.gradient(row.key)), at.spec(row.key)
        if (inside := {*gradient.partial} - {*data}) and key not in given:
            faults.append(
                f"the gradient of {key} over {', '.join(sorted(inside))}: write '{spec.with_partial(data)}' in "
                f"[gradients], not '{gradient}'."
            )
        given[key] = spec.with_partial(data).cotangent
    if faults:
        fact = (
            "stages settle gradients for each microbatch, except over an axis that splits the batch and nothing else:"
        )
        more = [f"... and {len(faults) - _SHOWN} more."] if len(faults) > _SHOWN else []
        if config.moe:
            more.append("A model with experts has no such axis: experts, or their random draws, depend on all tokens.")
        raise PlanError("\n  ".join([fact, *faults[:_SHOWN], *more]))
    return layout.override(given)
