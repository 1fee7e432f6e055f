"""An overview of a generation before anything is loaded: devices, and bytes that it would send and hold."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console

import gspmd
import gspmd_models as models
from gspmd import host
from gspmd.commands.source import Source
from gspmd.display.units import amount_of_bytes, amount_of_seconds
from gspmd.layouts import Layout
from gspmd.training.model import Own
from gspmd.training.reporting import memory
from gspmd_models import decoding


def facts(source: Source, sizes: decoding.Sizes, mesh: Mesh, dtype: str) -> dict[str, str]:
    """Return a few lines about the model and the devices."""
    config, prefill, decode = source.config, sizes.prefill, sizes.decode
    chosen = {"chosen": "; ".join(dict.fromkeys((*prefill.chosen, *decode.chosen)))}
    layouts = prefill.name if prefill.name == decode.name else f"{prefill.name} to read, {decode.name} to decode"
    active = f", {config.num_active_parameters:,} of them active per token" if config.moe else ""
    return {
        "devices": host.describe(list(mesh.devices.flat)),
        "mesh": ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
        "layout": f"{layouts}, lowering {decode.lowering or 'auto'}",
        "model": f"{config.num_parameters:,} parameters{active}, in {dtype}",
        **{name: lines for name, lines in chosen.items() if lines},
    }


def facts_of_own(name: str, model: Own, layout: Layout, mesh: Mesh) -> dict[str, str]:
    """Return a few lines about the custom model and the devices."""
    chosen = {"chosen": "; ".join(layout.chosen)} if layout.chosen else {}
    return {
        "devices": host.describe(list(mesh.devices.flat)),
        "mesh": ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
        "layout": f"{layout.name}, lowering {layout.lowering or 'auto'}",
        "model": f"{name or model.name}, {model.num_parameters(layout):,} parameters, in {jnp.dtype(model.dtype)}",
        **chosen,
    }


def explain_own(console: Console, writer: decoding.Stepwise, params: Mapping[str, Any]) -> None:
    """Print the plan of one step of a custom model."""
    whole = jax.NamedSharding(jax.sharding.get_mesh(), jax.P())
    tokens, position = (jax.ShapeDtypeStruct(shape, "int32", sharding=whole) for shape in ((writer.rows, 1), ()))
    plan = gspmd.trace(writer.step, params, writer.abstract_kept, tokens, position)
    work = f"{amount_of_bytes(plan.wire_bytes)} sent, {amount_of_seconds(plan.seconds)} planned"
    console.print(f"[bold]step[/]: {writer.rows} × 1 token, {work}")
    console.print(plan.table())


def explain(console: Console, generator: models.Generator, sizes: decoding.Sizes) -> None:
    """Print the plans of all programs, and the bytes of the arrays that a device holds all the time."""
    for line in dict.fromkeys((*sizes.prefill.chosen, *sizes.decode.chosen)):
        console.print(line, markup=False)
    reads = {"encode": f"{sizes.prefill_rows} × {sizes.source} tokens"}
    reads |= {"prefill": f"{sizes.prefill_rows} × {sizes.chunk} tokens", "decode": f"{sizes.rows} × 1 token"}
    for name, (program, given) in generator.programs(sizes).items():
        plan = gspmd.trace(program, *given)
        work = f"{amount_of_bytes(plan.wire_bytes)} sent, {amount_of_seconds(plan.seconds)} planned"
        console.print(f"[bold]{name}[/]: {reads[name]}, {work}")
        console.print(plan.table())
    for name, tree in held(generator, sizes).items():
        console.print(f"{name}: {amount_of_bytes(memory.device_bytes(tree))} on each device", highlight=False)


def held(generator: models.Generator, sizes: decoding.Sizes) -> dict[str, Any]:
    """Return the arrays that devices hold from the first token to the last."""
    return {"weights": models.arrays(generator.model), "cache": generator.abstract_cache(sizes, sizes.rows)}


def check_memory(generator: models.Generator, sizes: decoding.Sizes, mesh: Mesh) -> None:
    """Raise an error, before anything is loaded, if the devices have no room for the arrays that `held` returns."""
    remedy = "Use more devices, a layout that shards more, --weights int8, --cache int8, or fewer texts."
    memory.check("cannot generate text:", held(generator, sizes), mesh.local_devices, remedy)
