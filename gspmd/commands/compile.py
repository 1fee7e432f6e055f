"""`gspmd compile`: compile a program for devices that are not attached, and report its memory and its time."""

import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

import gspmd
import gspmd_models as models
from gspmd import host
from gspmd.audit import Report, Topology, compile_offline, gantt, perfetto, slices, topology
from gspmd.commands import own, runner
from gspmd.commands.compile_settings import CompileSettings, parse
from gspmd.commands.files import unwritten, write_text
from gspmd.display import console as printing
from gspmd.display.progress import Progress
from gspmd.layouts import Layout
from gspmd.training.config import ConfigError, parse_mesh
from gspmd.training.step import Update, abstract_program
from gspmd_models import step
from gspmd_models.decoding import GenerationError
from gspmd_models.decoding.programs import PROGRAMS, serving_program
from gspmd_models.remat.prediction import show_remat
from gspmd_models.stages import check_stages, schedule_of


def run(argv: Sequence[str], script: str = "", settings: CompileSettings | None = None) -> int:
    """Run `gspmd compile`; return its exit code.

    The code is 1 if the model does not fit, 2 for bad input or a file that cannot be written, 130 for an interrupt.

    Args:
        argv: the flags.
        script: if a file in scripts/ was started instead of `gspmd`, its name, for the help text and the files written.
        settings: the settings, if the flags have been parsed already.
    """
    begin, called = partial(main, script=script, settings=settings), "" if script else "gspmd compile"
    return runner.guarded(begin, argv, called, errors=(GenerationError,), interrupted="Interrupted.")


def main(argv: Sequence[str], script: str = "", settings: CompileSettings | None = None) -> int:
    """Compile the program, print the report and write the files; return the exit code, as `run` does."""
    settings = settings or parse(argv, script)
    host.keep_compiled(False)  # JAX cannot read back programs compiled for devices that are not attached.
    host.start(1, "cpu")  # This device is for JAX itself: the slice's devices exist for the compiler only.
    console = printing.console(140)
    asked = topology(settings.topology)
    report = smallest(settings, asked) if settings.smallest else compiled(settings, asked)
    console.print(report.tables(settings.details))
    if settings.phase == "train" and not settings.smallest and not own.is_own(settings):
        layout, mesh = layout_of(settings), mesh_of(settings, asked)
        layout = layout.resolved(settings.model.sizes(settings.batch, settings.length), mesh)
        step = settings.batch, settings.length, settings.dtype, settings.microbatches
        show_remat(console, settings.model, layout, mesh, *step)
    command = shlex.join([*(("python", f"scripts/{script}") if script else ("gspmd", "compile")), *argv])
    faults = save(settings, report, command)
    print(*faults, sep="\n", end="\n" * bool(faults), file=sys.stderr)
    if not report.fits:
        return 1
    return 2 if faults else 0


def smallest(settings: CompileSettings, asked: Topology) -> Report:
    """Return the report for the smallest TPU slice, or the fewest GPUs, on which the model fits.

    If the model fits on no slice, the report is for the largest slice that was compiled.
    """
    report, reason = None, ""
    layout = phase_layout(settings)  # A fault of the layout itself is the same on every slice.
    if settings.phase == "train":
        check_stages(settings.sharding.rounds, settings.sharding.schedule, layout)
    for target in slices(asked.chip, asked.slices):
        try:
            mesh_of(settings, target)
        except (gspmd.LayoutError, gspmd.PlanError) as error:  # No mesh of this size works.
            reason = reason or f"On {target.name}: {error}"
            continue
        report = compiled(settings, target)
        if report.fits:
            return report
    if report is None:
        raise ConfigError("cannot compile:", [f"this model has no mesh on any slice of {asked.chip.name}.", reason])
    return report


def layout_of(settings: CompileSettings) -> Layout:
    """Return the layout that the flags name, with the changes that the flags make."""
    sharding = settings.sharding
    layout = Layout.load(sharding.layout).override(sharding.overrides)
    return layout.lowered(sharding.lowering) if sharding.lowering else layout


def phase_layout(settings: CompileSettings) -> Layout:
    """Return the layout of the phase to be compiled."""
    layout = layout_of(settings)
    if settings.phase in ("encode", "prefill") and settings.prefill_layout:
        layout = Layout.load(settings.prefill_layout)
    if settings.phase in PROGRAMS:
        layout = layout.phase("decode" if settings.phase == "decode" else "prefill")
    if settings.phase != "decode":
        return layout
    layout.check()
    return layout.one_position()  # Decoding has one position, which cannot be divided, whatever L is for prompts.


def mesh_of(settings: CompileSettings, target: Topology) -> jax.sharding.Mesh:
    """Return the mesh of a slice, after checking that its axes divide the dimensions that the layout shards over them.

    The layout is the one for the phase to be compiled.
    """
    sharding, layout, config = settings.sharding, phase_layout(settings), settings.model
    source = settings.source_length or settings.length
    tokens = {"encode": source, "decode": 1}.get(settings.phase, settings.length)
    room = source if settings.phase == "encode" else settings.room or settings.length
    served = {"T": room} if settings.phase in PROGRAMS else {}
    sizes = config.sizes(settings.batch, tokens) | served
    if not served and settings.source_length:
        sizes["T"] = settings.source_length
    if sharding.mesh:
        shape = layout.complete_mesh(parse_mesh(sharding.mesh))
        # Sizes are judged last: a mesh that does not fill the slice needs no other batch.
        target.mesh(shape, sharding.axis_types)
        layout.check(sizes, shape)
    else:
        shape = layout.mesh_for(target.num_devices, sizes)
    if served:  # This includes prefill: its weights and cache are stored as for decoding.
        one = config.sizes(settings.batch, 1) | served
        layout_of(settings).phase("decode").resolved(one, shape).one_position().check(one, shape)
    if settings.phase == "train":
        check_stages(sharding.rounds, sharding.schedule, layout)
        at = layout.resolved(sizes, shape), shape
        own.trainable(settings, settings.dtype).check(*at, settings.batch, settings.length, settings.microbatches)
    if settings.phase == "train" and not own.is_own(settings):
        schedule_of(config, *at, sharding.schedule, settings.microbatches, sharding.rounds)
    if settings.phase == "forward":
        at = layout.resolved(sizes, shape), shape
        step.check_slots(config, *at, settings.batch, settings.length, train=False)
    return target.mesh(shape, sharding.axis_types)


def compiled(
    settings: CompileSettings, target: Topology, called: str = "", tell: Callable[[str], None] | None = None
) -> Report:
    """Compile the program for one slice, and return the report.

    Args:
        settings: the program to be compiled.
        target: the slice, or the nodes of GPUs.
        called: the name of the program in progress messages; by default the names of its model and its layout.
        tell: a function that is called with the name of each phase of the compilation when the phase begins; by
            default, the terminal shows the name.
    """
    config, layout, mesh = settings.model, layout_of(settings), mesh_of(settings, target)
    program, args, options = program_of(settings, layout, mesh)
    if own.is_own(settings):
        of_one, at = own.subject(settings), layout.resolved(config.sizes(settings.batch, settings.length), mesh)
        of_row = settings.length * of_one.flops_per_token(at, settings.length)
        parameters = of_one.num_parameters(at)
    else:
        of_row, parameters = flops_of_row(settings), config.num_parameters
    flops = settings.batch * of_row
    flops /= 1 if settings.phase == "train" else 3  # A backward pass is two forward passes.
    named = called or f"{parameters:,} parameters, {layout.name}, {target.name}"
    console = printing.console(stderr=True)
    given = settings.sharding.compiled_with

    def run(tell: Callable[[str], None]) -> Report:
        with gspmd.lowering(layout.lowering or "auto"):
            return compile_offline(
                program,
                *args,
                topology=target,
                mesh=mesh,
                compiler_options=given,
                flops=flops,
                progress=tell,
                **options,
            )

    if tell is not None:
        return run(tell)
    with Progress(console, named) as progress:

        def show(doing: str) -> None:
            if not console.is_terminal:
                progress.note(f"{named}: {doing}")
            progress.begin(f"{named}: {doing}")

        return run(show)


def flops_of_row(settings: CompileSettings) -> float:
    """Return the FLOPs of one row of the batch, including the backward pass if there is one."""
    config, source = settings.model, settings.source_length or settings.length
    if settings.phase == "encode":
        return source * config.flops_per_source_token(source)
    # One token of every row, which attends to the whole cache, or all tokens, which attend to one another.
    read, seen = (1, settings.room or settings.length) if settings.phase == "decode" else (settings.length,) * 2
    return read * config.flops_per_token(seen, source, encoded=settings.phase in PROGRAMS)


def program_of(settings: CompileSettings, layout: Layout, mesh) -> tuple[Callable, tuple, dict[str, Any]]:
    """Return the program to compile, its abstract arguments, and options for `jax.jit`.

    The options say which arguments the program may overwrite, and for which arguments the compiler may choose the
    memory layout (the order of dimensions in memory).
    """
    train, config = settings.phase == "train", settings.model
    if settings.phase in PROGRAMS:
        room, prefill = settings.room or settings.length, settings.prefill_layout
        served = serving_program(
            config, layout, mesh, settings.phase, batch=settings.batch, length=settings.length, room=room,
            prefill=Layout.load(prefill) if prefill else None, dtype=settings.dtype,
            source_length=(settings.source_length or settings.length) if config.encoder_layers else 0,
            **{name: "int8" for name in ("weights", "cache") if getattr(settings, name) == "int8"},
        )  # fmt: skip
        say_chosen(served.layout)
        donated = () if served.donated is None else (served.donated,)
        options: dict[str, Any] = {"donate_argnums": donated, "auto_layout_argnums": (served.stored,)}
        return served.step, served.arguments, options
    layout = layout.resolved(config.sizes(settings.batch, settings.length), mesh)
    say_chosen(layout)
    if not train:
        model = models.abstract(config, layout, mesh, settings.dtype, stored=settings.dtype)
        tokens = models.abstract_tokens(layout, mesh, settings.batch, settings.length)
        source = []
        if config.encoder_layers:
            length = settings.source_length or settings.length
            source = [models.abstract_source(layout, mesh, settings.batch, length)]
        return step.forward_step(model), (models.arrays(model), tokens, *source), {}
    update = Update(settings.optimizer, 1000, settings.microbatches, settings.frozen, settings.parameter_dtype)
    program = abstract_program(own.trainable(settings, settings.dtype), update, settings.batch, settings.length)
    made, *arguments = program(layout, mesh)
    return made, tuple(arguments), {"donate_argnums": (0,)}


def say_chosen(layout: Layout) -> None:
    """Report on stderr which of a layout's alternatives were chosen."""
    print(*layout.chosen, sep="\n", end="\n" * bool(layout.chosen), file=sys.stderr)


def save(settings: CompileSettings, report: Report, command: str) -> list[str]:
    """Write the files that the flags name.

    If the compiler refused the program, only the figures can be written.

    Returns:
        A message for each file that could not be written.
    """
    writers: dict[str, Callable[[str], object]] = {"json": lambda path: write_text(path, report.to_json())}
    if timeline := report.timeline:
        writers |= {
            "hlo": lambda path: write_text(path, report.hlo),
            "trace": lambda path: perfetto.write(timeline, path),
            "gantt": lambda path: gantt.draw(timeline, path, command),
        }
    else:
        left = [f"--{name}" for name in ("hlo", "trace", "gantt") if getattr(settings, name)]
        if left:
            print(f"The program does not fit, so nothing was written for {' and '.join(left)}.", file=sys.stderr)
    named = {flag: path for flag in writers if (path := getattr(settings, flag))}
    return [fault for flag, path in named.items() for fault in unwritten(flag, path, writers[flag])]
