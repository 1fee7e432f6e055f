"""A model of one's own in a command: what is refused for it, and what is shown of it."""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console

from gspmd.annotate.spec import Spec
from gspmd.display.units import amount_of_flops
from gspmd.layouts import Layout
from gspmd.training.model import Own, Trainable
from gspmd.training.reporting import report
from gspmd.training.syntax import lines_searched, parse_relayout
from gspmd.training.toml import ConfigError
from gspmd_models import ModelConfig
from gspmd_models.step import Language

Placed = dict[str, tuple[Spec, tuple[int, ...]]]


def is_own(settings: Any) -> bool:
    """Whether settings have a model of one's own."""
    return not isinstance(settings.model, ModelConfig)


def module_of(settings: Any) -> list[ModuleType]:
    """Return the module of a model of one's own; none of ours."""
    return [sys.modules[type(settings.model).__module__]] if is_own(settings) else []


def refuse(settings: Any, doing: str, tokens: int | None = None) -> None:
    """Refuse what is only for the models that come with gspmd.

    Args:
        settings: of a command, with `lora` and `sharding`; of a run, with `checkpoint` and `training` too.
        doing: the beginning of the message.
        tokens: number of ids of a run's tokenizer; None for bytes.

    Raises:
        ConfigError: with every fault.
    """
    faults, training = [], getattr(settings, "training", None)
    if getattr(settings, "checkpoint", ""):
        faults.append("no public checkpoint has its weights; leave --from out.")
    if settings.lora.rank:
        faults.append("adapters are for the matrices of our own models; leave [lora] out, or freeze parameters.")
    if lines_searched(settings.sharding.layout) == "":
        faults.append("its lines are those of a file; search them with --layout auto:FILE.")
    if training is not None:
        if any(lines_searched(parse_relayout(change).layout) is not None for change in training.relayout):
            faults.append("no layout is searched in the middle of a run; use gspmd search --model, then a file.")
        if training.data_prompt:
            faults.append("its loss has the prompts of --data-prompt for tokens to predict; leave that out.")
        if training.sample_bytes:
            faults.append("no text is sampled from it; leave --sample-bytes out.")
        vocabulary, ids = Own(settings.model).fixed_sizes().get("V"), 256 if tokens is None else tokens
        if vocabulary is not None and vocabulary < ids:
            of = "bytes are" if tokens is None else f"the tokenizer {training.tokenizer!r} has"
            faults.append(f"dimension V has size {vocabulary}, and {of} {ids:,} tokens; it must be at least as large.")
    if faults:
        raise ConfigError(doing, faults)


def trainable(settings: Any, dtype: str = "") -> Trainable:
    """Return the model of a command's settings as the builder of training steps takes it, ours or one's own.

    Args:
        settings: with `model` and `sharding`.
        dtype: what the model computes in, by default as [training] says.
    """
    of, sharding = jnp.dtype(dtype or settings.training.dtype), settings.sharding
    return (
        Own(settings.model, of)
        if is_own(settings)
        else Language(settings.model, of, sharding.schedule, sharding.rounds, _is_masked(settings))
    )


def _is_masked(settings: Any) -> bool:
    """Whether some tokens of a run's data are read and not predicted; other commands have no data."""
    training = getattr(settings, "training", None)
    return bool(training and training.data_prompt)


def facts(settings: Any, layout: Layout) -> dict[str, str]:
    """Return the lines of a run's header that tell of the model and of its step."""
    training, model = settings.training, Own(settings.model)
    flops = training.batch * training.length * model.flops_per_token(layout, training.length)
    return {
        "model": f"{settings.model_class or model.name}, {model.num_parameters(layout):,} parameters",
        "step": f"{training.batch} × {training.length} tokens, {amount_of_flops(flops)} in {training.dtype}",
    }


def show_tensors(console: Console, settings: Any, layout: Layout, mesh: Mesh) -> None:
    """Show where every parameter stands, and every other tensor of the sections of one's own."""
    training, model = settings.training, Own(settings.model)
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
    """Refuse settings that name a model of one's own, for a command that takes the models that come with gspmd alone.

    Raises:
        ConfigError: so.
    """
    table = values.get("model")
    if name := table.get("class") if isinstance(table, Mapping) else "":
        takes = "which 'gspmd train', 'gspmd search', 'gspmd compile' and 'gspmd generate' alone take"
        raise ConfigError(doing, [f"its model is {name!r}, a model of one's own, {takes}."])
