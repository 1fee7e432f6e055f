"""Trains a Mixture-of-Experts language model on text, every tensor placed by a layout.

    gspmd train                                        # five minutes on two cores, 8 fake devices
    gspmd train --layout zero-3 --set ffn.w_in=E_xF_y  # the same losses, other collectives
    gspmd train --resume --out runs/001                # goes on where it stopped; --resume 300, from step 300
    gspmd train --explain                              # what its step will send, and no training

Figures, events, checkpoints and pictures go to --out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
import tyro
from jax.sharding import Mesh
from rich.console import Console

import gspmd
import gspmd_models as models
from gspmd import host
from gspmd.commands import configs
from gspmd.display import console as printing
from gspmd.display.units import amount_of_flops
from gspmd.layouts import Layout
from gspmd.training import OptimizerConfig, Program, ShardingConfig, TrainingConfig, command, data, fit
from gspmd.training.reporting import report
from gspmd.training.run.folder import choose_out
from gspmd.training.state import shardings
from gspmd.training.step import jit_step
from gspmd_models import ModelConfig, step


@dataclass(frozen=True)
class Settings:
    """Everything a run is told, by file and by flag."""

    config: str = ""
    """TOML file with tables [model], [training], [optimizer] and [sharding]; configs/default.toml if not given."""
    explain: bool = False
    """Compile the training step, print what it sends beside what was planned, and stop."""
    model: ModelConfig = field(default_factory=ModelConfig)
    training: tyro.conf.OmitArgPrefixes[TrainingConfig] = field(default_factory=TrainingConfig)
    optimizer: tyro.conf.OmitArgPrefixes[OptimizerConfig] = field(default_factory=OptimizerConfig)
    sharding: tyro.conf.OmitArgPrefixes[ShardingConfig] = field(default_factory=ShardingConfig)


def run(argv: Sequence[str], script: str = "") -> int:
    """Run `gspmd train`; return its exit code: 1 for a failed run, 2 for bad input, 130 for an interrupt.

    Args:
        argv: the flags.
        script: the file in scripts/ that runs it instead, for the help and for what resumes a run.
    """
    return command.guarded(partial(main, script=script), argv, called="" if script else "gspmd train")


def main(argv: Sequence[str], script: str = "") -> None:
    """Read the settings, check everything that can be checked without compiling, and train."""
    prog, description = configs.called(__doc__, "gspmd train", script)
    settings = command.parse(Settings, argv, default="default", find=configs.find, prog=prog, description=description)
    training, sharding = settings.training, settings.sharding
    command.check_model(training, settings.model)
    layout = Layout.load(sharding.layout).override(sharding.overrides)
    if sharding.lowering:
        layout = layout.lowered(sharding.lowering)
    sizes = settings.model.sizes(training.batch, training.length)
    layout.check(sizes)
    mesh = command.make_mesh(sharding, layout, sizes)
    layout = layout.resolved(sizes, mesh)
    console = printing.console(120)
    show_run(console, settings, layout, mesh)
    if settings.explain:
        explain(console, settings, layout, mesh)
        return
    check_memory(settings, layout, mesh)
    with console.status("Reading the text …"):
        corpus = data.load(training.data, fraction=training.validation_fraction)
        data.check_size(corpus, training.batch, training.length)
    out = choose_out(training.out, resume=training.resume, step=training.resume_step)
    console.print(f"Text: {corpus.describe()}.\nOut: {out}", soft_wrap=True, markup=False)
    show_tensors(console, settings, layout, mesh)
    with command.interrupts(out), jax.set_mesh(mesh), gspmd.lowering(layout.lowering or "auto"):
        with console.status("Building the model and planning its step …"):
            model = models.build(settings.model, layout, mesh, jax.random.key(training.seed), training.dtype)
            program = make_program(settings, model, mesh)
            tokens = program.place(np.zeros((training.batch, training.length + 1)))
            plan = gspmd.trace(program.step, program.state, tokens, program.key)
        console.print(plan.table())
        state = fit(training, program, corpus, out, console, command.kept_settings(settings))
        text = partial(sample, training, models.with_arrays(model, state.params)) if training.sample_bytes else None
        name = f"{out.resolve().name} · {in_short(settings, layout, mesh)}"
        report.finish(console, out, name, training.prompt, text)


def check_memory(settings: Settings, layout: Layout, mesh: Mesh) -> None:
    """Refuses a model that is too large for this machine, where it is the one that the devices share."""
    if mesh.devices.flat[0].platform == "cpu":
        with jax.set_mesh(mesh):
            model = models.abstract(settings.model, layout, mesh, settings.training.dtype)
            state = step.abstract_state(model, settings.optimizer, settings.training.steps, mesh)
        command.check_memory(state, mesh.size)


def make_program(settings: Settings, model: models.Transformer, mesh: Mesh) -> Program:
    """The model's programs, and where they begin."""
    training, optimizer = settings.training, settings.optimizer
    state = step.initial_state(model, optimizer, training.steps, mesh)
    update = jit_step(step.training_step(model, optimizer, training.steps), state)
    batch = shardings(models.batch_spec(model.layout), mesh)
    place = lambda tokens: jax.device_put(np.asarray(tokens, np.int32), batch)  # noqa: E731
    return Program(state, update, jax.jit(step.evaluation_step(model)), place, jax.random.key(training.seed + 1))


def explain(console: Console, settings: Settings, layout: Layout, mesh: Mesh) -> None:
    """What one training step really sends, and what was planned; nothing is allocated and nothing runs."""
    training, optimizer = settings.training, settings.optimizer
    with jax.set_mesh(mesh), gspmd.lowering(layout.lowering or "auto"):
        model = models.abstract(settings.model, layout, mesh, training.dtype)
        state = step.abstract_state(model, optimizer, training.steps, mesh)
        update: Any = jit_step(step.training_step(model, optimizer, training.steps), state)
        args = state, models.abstract_batch(layout, mesh, training.batch, training.length), models.abstract_key(mesh)
        show_tensors(console, settings, layout, mesh)
        with console.status("Compiling the training step …"):
            plan, ledger = gspmd.trace(update, *args), gspmd.ledger(update.lower(*args).compile())
    comparison = ledger.compare(plan)
    console.print(ledger.table(), "", comparison.table(), sep="\n")
    if comparison.differing:
        console.print(comparison.steps_table())


def show_run(console: Console, settings: Settings, layout: Layout, mesh: Mesh) -> None:
    """The header: what is run, and on what."""
    training, model, sharding = settings.training, settings.model, settings.sharding
    flops = training.batch * training.length * model.flops_per_token(training.length)
    lines = {
        "devices": host.describe(list(mesh.devices.flat)),
        "mesh": f"{', '.join(f'{axis}={size}' for axis, size in mesh.shape.items())} ({sharding.axis_types} axes)",
        "layout": f"{layout.name}, lowering {layout.lowering or 'auto'}",
        "model": f"{model.num_parameters:,} parameters, {model.num_active_parameters:,} of them active per token",
        "step": f"{training.batch} × {training.length} tokens, {amount_of_flops(flops)} in {training.dtype}",
    }
    if layout.chosen:
        lines["alternatives"] = "; ".join(layout.chosen)
    if layout.padding:
        sizes = model.sizes(training.batch, training.length)
        wide = {dim: size for dim, size in layout.padded(sizes).items() if size != sizes[dim]}
        lines["padding"] = ", ".join(f"{dim} from {sizes[dim]} to {size}" for dim, size in wide.items()) or "none"
    if moe := model.moe:
        lines["experts"] = f"{moe.experts}, router {moe.router}, dispatch {moe.dispatch}"
    report.header(console, lines)


def show_tensors(console: Console, settings: Settings, layout: Layout, mesh: Mesh) -> None:
    """Where every tensor stands."""
    training, model = settings.training, settings.model
    report.show_tensors(console, "Parameters", models.parameter_specs(model, layout), mesh)
    activations = models.activation_specs(model, layout, training.batch, training.length)
    report.show_tensors(console, "Activations", activations, mesh, training.dtype)


def in_short(settings: Settings, layout: Layout, mesh: Mesh) -> str:
    """The run in a few words, for its pictures."""
    experts = f", {settings.model.moe.experts} experts" if settings.model.moe else ""
    return f"{layout.name} on {mesh.size} device{'s' * (mesh.size > 1)}{experts}"


def sample(training: TrainingConfig, model: models.Transformer) -> str:
    """Text that the model continues the prompt with."""
    prompt, drawn = training.prompt.encode(), models.Sampling(temperature=0.8)
    texts = models.Generator(model)([list(prompt)], training.sample_bytes, sampling=drawn, seed=training.seed).texts
    return (prompt + bytes(texts[0])).decode(errors="replace")
