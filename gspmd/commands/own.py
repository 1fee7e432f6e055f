"""Custom models in commands: checks of their settings, and tables of their parameters and sizes."""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console

from gspmd.annotate.spec import Spec
from gspmd.commands.file import is_own
from gspmd.display.units import amount_of_flops
from gspmd.layouts import Layout
from gspmd.training.model import Own, Trainable
from gspmd.training.reporting import report
from gspmd.training.syntax import lines_searched, parse_relayout
from gspmd.training.toml import ConfigError
from gspmd_models.step import Language

Placed = dict[str, tuple[Spec, tuple[int, ...]]]


def module_of(settings: Any) -> list[ModuleType]:
    """Return the module of a custom model as a list; the list is empty for a model that comes with gspmd."""
    return [sys.modules[type(settings.model).__module__]] if is_own(settings) else []


def subject(settings: Any, dtype: Any = jnp.float32) -> Own:
    """Return the custom model that settings name, as a model whose loss is computed in the given dtype."""
    return Own(settings.model, dtype)


def refuse(settings: Any, doing: str, tokens: int | None = None) -> None:
    """Raise an error about settings that do not apply to a custom model.

    Args:
        settings: the settings of a command, with fields `lora` and `sharding`. The settings of a run also have
            `checkpoint` and `training`.
        doing: the first words of the error message.
        tokens: number of ids of a run's tokenizer, or None if tokens are bytes.

    Raises:
        ConfigError: settings do not apply to a custom model; the message lists all of them.
    """
    faults, training = [], getattr(settings, "training", None)
    if getattr(settings, "checkpoint", ""):
        faults.append("no public checkpoint has its weights; leave --from out.")
    if settings.lora.rank:
        faults.append("adapters are for the models that come with gspmd; leave [lora] out, or freeze parameters.")
    if lines_searched(settings.sharding.layout) == "":
        faults.append("its lines are in a layout file; search for a layout with --layout auto:FILE.")
    if training is not None:
        if any(lines_searched(parse_relayout(change).layout) is not None for change in training.relayout):
            faults.append("no layout is searched in the middle of a run; use gspmd search --model, then a file.")
        if training.data_prompt:
            faults.append("its loss would predict the prompts of --data-prompt; leave that flag out.")
        if training.objective != "next-token":
            faults.append(f"it takes rows of next-token prediction; leave --objective {training.objective} out.")
        if training.pack:
            faults.append("its loss would treat the documents of a packed row as one text; leave --pack out.")
        if training.sample_bytes:
            faults.append("training does not sample text from it; leave --sample-bytes out.")
        vocabulary, ids = subject(settings).fixed_sizes().get("V"), 256 if tokens is None else tokens
        if vocabulary is not None and vocabulary < ids:
            of = "bytes are" if tokens is None else f"the tokenizer {training.tokenizer!r} has"
            faults.append(f"dimension V has size {vocabulary}, but {of} {ids:,} tokens; make V at least as large.")
    if faults:
        raise ConfigError(doing, faults)


def trainable(settings: Any, dtype: str = "") -> Trainable:
    """Return the model of a command's settings, custom or not, as the builder of training steps expects it.

    Args:
        settings: settings with `model` and `sharding`.
        dtype: the dtype of the computation; by default `dtype` of [training].
    """
    of, sharding = jnp.dtype(dtype or settings.training.dtype), settings.sharding
    return (
        subject(settings, of)
        if is_own(settings)
        else Language(settings.model, of, sharding.schedule, sharding.rounds, **_rows_of(settings))
    )


def _rows_of(settings: Any) -> dict[str, Any]:
    """Return the arguments of `Language` that say which arrays a batch has besides tokens."""
    training = getattr(settings, "training", None)
    if training is None:  # Commands other than train have no data settings.
        pairs = {"packed": True, "source_length": getattr(settings, "source_length", 0) or settings.length}
        return pairs if settings.model.encoder_layers else {}
    return {
        "masked": bool(training.data_prompt),
        "packed": training.pack or training.objective != "next-token",
        "source_length": training.source_length if settings.model.encoder_layers else 0,
    }


def facts(settings: Any, layout: Layout) -> dict[str, str]:
    """Return the lines of a run's header that describe the model and its step."""
    training, model = settings.training, subject(settings)
    flops = training.batch * training.length * model.flops_per_token(layout, training.length)
    return {
        "model": f"{settings.model_class or model.name}, {model.num_parameters(layout):,} parameters",
        "step": f"{training.batch} × {training.length} tokens, {amount_of_flops(flops)} in {training.dtype}",
    }


def show_tensors(console: Console, settings: Any, layout: Layout, mesh: Mesh) -> None:
    """Show the placement of every parameter, and of every other tensor in the layout's user-defined sections."""
    training, model = settings.training, subject(settings)
    rows = model.rows(layout)
    placed: Placed = {path: (row.spec, row.shape) for path, row in rows.items()}
    report.show_tensors(console, "Parameters", placed, mesh, training.parameter_dtype)
    sizes = model.sizes(training.batch, training.length)
    if activations := _activations(layout, {row.line for row in rows.values()}, sizes):
        report.show_tensors(console, "Activations", activations, mesh, training.dtype)


def _activations(layout: Layout, parameters: set[str], sizes: Mapping[str, int]) -> Placed:
    lines = [name for name, dims in layout.own.items() if isinstance(dims, str) and name not in parameters]
    specs = {name: layout.spec(name) for name in lines}
    return {
        name: (spec, tuple(sizes[dim] for dim in spec.dims))
        for name, spec in specs.items()
        if set(spec.dims) <= set(sizes)
    }


def refuse_named(values: Mapping[str, Any], doing: str) -> None:
    """Raise an error if settings name a custom model, for commands that accept only the models of gspmd.

    Raises:
        ConfigError: the settings name a custom model.
    """
    table = values.get("model")
    if name := table.get("class") if isinstance(table, Mapping) else "":
        takers = "'gspmd train', 'gspmd search', 'gspmd compile' and 'gspmd generate'"
        remedy = "Give a model that comes with gspmd."
        fact = f"its model {name!r} is a custom model. Only {takers} accept custom models."
        raise ConfigError(doing, [f"{fact} {remedy}"])
