"""The header printed before a run's first step, the table of its tensors, and its title in pictures."""

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh
from rich.console import Console

import gspmd_models as models
from gspmd import host
from gspmd.commands import own
from gspmd.display.units import amount_of_flops
from gspmd.layouts import Layout
from gspmd.pipeline.schedule import Schedule
from gspmd.training import processes
from gspmd.training.arrangement import Arrangement
from gspmd.training.reporting import report, speed
from gspmd_models.parameters import stages_axes
from gspmd_models.stages import schedule_of


def show_run(console: Console, settings: Any, arrangements: Sequence[Arrangement], kept: str) -> None:
    """Print the header: the run and its devices, and `kept`, the place where compiled programs are cached."""
    (layout, mesh), changes = (arrangements[0].layout, arrangements[0].mesh), arrangements[1:]
    training, model, sharding = settings.training, settings.model, settings.sharding
    lines = {
        "devices": host.describe(list(mesh.devices.flat)),
        "mesh": f"{', '.join(f'{axis}={size}' for axis, size in mesh.shape.items())} ({sharding.axis_types} axes)",
        "layout": f"{layout.name}, lowering {layout.lowering or 'auto'}",
        **(own.facts(settings, layout) if own.is_own(settings) else _facts(settings)),
        "peak": speed.describe_peak([*mesh.devices.flat], training.dtype),
        "programs": kept,
    }
    if processes.count() > 1:
        lines["devices"] += f", in {processes.count()} processes"
    if changes:
        lines["then"] = "; ".join(f"after step {change.after} {change}" for change in changes)
    if tables := {each.after: table for each in arrangements if (table := pipeline_of(settings, each))}:
        lines["pipeline"] = "; ".join(
            f"{f'after step {after} ' if after else ''}{table.describe()}" for after, table in tables.items()
        )
    subject = own.trainable(settings)
    trained, rows = subject.trained(layout, training.frozen), subject.rows(layout)
    if len(trained) < len(rows):
        lines["trained"] = f"{sum(math.prod(rows[path].shape) for path in trained):,} parameters, the others not"
    if layout.chosen:
        lines["alternatives"] = "; ".join(layout.chosen)
    if layout.padding:
        sizes = model.sizes(training.batch, training.length)
        wide = {dim: size for dim, size in layout.padded(sizes).items() if size != sizes[dim]}
        lines["padding"] = ", ".join(f"{dim} from {sizes[dim]} to {size}" for dim, size in wide.items()) or "none"
    if moe := None if own.is_own(settings) else model.moe:
        lines["experts"] = f"{moe.experts}, router {moe.router}, dispatch {moe.dispatch}"
    report.header(console, lines)


def _facts(settings: Any) -> dict[str, str]:
    training, model = settings.training, settings.model
    flops = training.batch * training.length * model.flops_per_token(training.length, training.source_length)
    source = f"{training.source_length} + " if model.encoder_layers else ""
    return {
        "model": f"{model.num_parameters:,} parameters, {model.num_active_parameters:,} of them active per token",
        "step": f"{training.batch} × {source}{training.length} tokens, {amount_of_flops(flops)} in {training.dtype}, "
        f"remat {model.remat}{', activations in host memory' if model.offload else ''}",
    }


def pipeline_of(settings: Any, arrangement: Arrangement) -> Schedule | None:
    """Return the pipeline schedule of an arrangement, or None if it has no stages."""
    if own.is_own(settings):
        return None
    training, sharding, mesh = settings.training, settings.sharding, arrangement.mesh.shape
    how = sharding.schedule, training.microbatches, rounds_in(settings, arrangement.layout)
    return schedule_of(settings.model, arrangement.layout, mesh, *how)


def rounds_in(settings: Any, layout: Layout) -> int:
    """Return the number of times that a microbatch goes round the pipeline stages; 1 without stages."""
    return settings.sharding.rounds if stages_axes(layout) else 1


def show_tensors(console: Console, settings: Any, layout: Layout, mesh: Mesh) -> None:
    """Print a table of the placement of every tensor."""
    training, model = settings.training, settings.model
    if own.is_own(settings):
        return own.show_tensors(console, settings, layout, mesh)
    report.show_tensors(console, "Parameters", models.parameter_specs(model, layout), mesh, training.parameter_dtype)
    activations = models.activation_specs(model, layout, training.batch, training.length, training.source_length)
    report.show_tensors(console, "Activations", activations, mesh, training.dtype)


def in_short(settings: Any, arrangement: Arrangement) -> str:
    """Describe the run in a few words, for the titles of its pictures."""
    moe = None if own.is_own(settings) else settings.model.moe
    experts = f", {moe.experts} experts" if moe else ""
    devices = arrangement.mesh.size
    return f"{arrangement.layout.name} on {devices} device{'s' * (devices > 1)}{experts}"
