"""Whether a model fits on TPUs or GPUs that are not attached, and what it costs: the answer of the real compiler.

    gspmd compile --config palm-540b --layout weight-stationary-2d \
        --topology tpu-v4:4x4x4 --phase decode --batch 512 --length 2048

Nothing is allocated and nothing runs; all times are simulated. Exit code 1 if the model does not fit.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

import gspmd
import gspmd_models as models
from gspmd import host
from gspmd.audit import Report, Topology, compile_offline, gantt, perfetto, slices, topology
from gspmd.commands import configs, flags, own, runner
from gspmd.commands.file import checked_source, file_of, source_length_of
from gspmd.display import console as printing
from gspmd.display.progress import Progress
from gspmd.layouts import Layout
from gspmd.training import OptimizerConfig, ShardingConfig
from gspmd.training.config import ConfigError, parse_mesh
from gspmd.training.model import Own, finding
from gspmd.training.step import Update, abstract_program
from gspmd.training.toml import positive
from gspmd_models import ModelConfig, step
from gspmd_models.decoding import GenerationError
from gspmd_models.decoding.programs import PROGRAMS, serving_program
from gspmd_models.finetuning.config import LoraConfig
from gspmd_models.remat.prediction import show_remat
from gspmd_models.stages import check_stages, schedule_of

DEFAULT = configs.find("palm-8b")
TRAINED = ("microbatches", "parameter_dtype", "frozen")
"""Fields of [training] that only a training step uses."""


@dataclass(frozen=True)
class CompileSettings:
    """A program to compile, the slice or nodes, and the files for the results."""

    config: str = DEFAULT
    """TOML file with a table [model], and perhaps [training], [lora], [optimizer] and [sharding]."""
    topology: str = "tpu-v4:4x4x4"
    """Chip and torus, such as tpu-v4:4x4x4, tpu-v5p:8x8x16 or tpu-v6e:16x16; or GPUs of a node, and before them nodes,
    such as h100:8, h100:16x8 or gb200:2x72."""
    phase: Literal["forward", "train", "encode", "prefill", "decode"] = "forward"
    """forward: tokens to logits, weights in --dtype. train: a whole update, as in `gspmd train`; your own --model has
    only this phase. encode, prefill, decode: what `gspmd generate` runs, an encoder on --source-length tokens of every
    row, --length tokens of every row into a cache, or one token after a full cache."""
    batch: int = 32
    """Sequences, over all devices."""
    length: int = 256
    """Tokens of a sequence; for a prefill, the tokens that it reads at once."""
    source_length: int = 0
    """Tokens of an encoder's source; if not given, that of [training], and 0 for --length."""
    microbatches: int = 1
    """Parts of a training step's batch, as in `gspmd train`."""
    parameter_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which a training step stores matrices, as in `gspmd train`."""
    frozen: tuple[str, ...] = ()
    """Patterns of parameters that a training step leaves unchanged, as in `gspmd train`."""
    room: int = 0
    """Number of tokens that a row of the cache can hold; 0 for --length."""
    prefill_layout: str = ""
    """Another layout for --phase encode or prefill, which reads weights as --layout shards them: preset or TOML
    file."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype that the model computes in."""
    weights: Literal["dtype", "int8"] = "dtype"
    """Dtype in which serving stores matrices; int8 has a float32 scale for every channel."""
    cache: Literal["dtype", "int8"] = "dtype"
    """Dtype in which serving stores keys and values; int8 has a float32 scale for each token and head."""
    smallest: bool = False
    """Look for the fewest devices of this chip that the model fits on: slices of TPUs that double in size, or parts of
    a node of GPUs and then 1, 2, 4, ... nodes. For each size the layout's own mesh is tried; with another --mesh the
    model may fit on fewer."""
    json: str = ""
    """File for the figures, as JSON."""
    hlo: str = ""
    """File for the scheduled program."""
    trace: str = ""
    """File for the timeline, to open in ui.perfetto.dev."""
    gantt: str = ""
    """PNG file for the timeline."""
    model_class: Annotated[str, tyro.conf.arg(name="model", metavar="MODULE:NAME")] = ""
    """A custom model, as in `gspmd train`; without --config, only the model."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: tyro.conf.OmitArgPrefixes[OptimizerConfig] = field(default_factory=OptimizerConfig)
    sharding: tyro.conf.OmitArgPrefixes[ShardingConfig] = field(default_factory=ShardingConfig)


def run(argv: Sequence[str], script: str = "") -> int:
    """Run `gspmd compile`; return its exit code: 1 if the model does not fit, 2 for bad input, 130 for an interrupt.

    Args:
        argv: the flags.
        script: the file in scripts/ that runs it instead, for the help.
    """
    called = "" if script else "gspmd compile"
    return runner.guarded(
        partial(main, script=script), argv, called, errors=(GenerationError,), interrupted="Interrupted."
    )


def main(argv: Sequence[str], script: str = "") -> int:
    """Compile, and print the report; return 1 if the model does not fit."""
    settings = parse(argv, script)
    host.keep_compiled(False)  # JAX cannot read back programs compiled for devices that are not attached.
    host.start(1, "cpu")  # For JAX itself: the slice's devices exist for the compiler only.
    console = printing.console(140)
    asked = topology(settings.topology)
    report = smallest(settings, asked) if settings.smallest else compiled(settings, asked)
    console.print(report)
    if settings.phase == "train" and not settings.smallest and not own.is_own(settings):
        layout, mesh = layout_of(settings), mesh_of(settings, asked)
        layout = layout.resolved(settings.model.sizes(settings.batch, settings.length), mesh)
        show_remat(console, settings.model, layout, mesh, settings.batch, settings.length, settings.dtype)
    save(settings, report)
    return 0 if report.fits else 1


def parse(argv: Sequence[str], script: str = "") -> CompileSettings:
    """Return the settings: those of the file, replaced by flags."""
    file, name = file_of(argv, DEFAULT)
    said = {name: getattr(file.training, name) for name in ("batch", "length", *TRAINED)}
    said["source_length"] = source_length_of(file)
    said |= {name: getattr(file, name) for name in ("model_class", "model", "lora", "optimizer", "sharding")}
    typed = finding.typed_with(CompileSettings, type(file.model)) if own.is_own(file) else CompileSettings
    default = typed(name, **said, phase="train" if own.is_own(file) else "forward")
    prog, description = configs.called(__doc__, "gspmd compile", script)
    settings = flags.parse_flags(typed, argv, default, description, prog)
    faults: list[str] = []
    if own.is_own(settings):
        own.refuse(settings, "cannot compile a custom model:")
        if settings.phase != "train":
            faults.append(f"a custom model has only a training step; leave --phase {settings.phase} out.")
    positive(faults, batch=settings.batch, length=settings.length, microbatches=settings.microbatches)
    if settings.room < 0 or 0 < settings.room < settings.length:
        faults.append(f"--room has to be 0, or at least --length {settings.length}, not {settings.room}.")
    if not own.is_own(settings) and settings.phase == "train" and not settings.model.stacked:
        faults.append("--model.no-stacked is for serving; leave it out, or compile --phase decode.")
    if not own.is_own(settings) and settings.model.lora:
        faults.append("adapters have their own table: write [lora] in place of [model.lora].")
    if settings.phase != "train" and (given := for_training(settings, default)):
        faults.append(f"--phase {settings.phase} trains nothing; leave {', '.join(given)} out.")
    settings, of_source = checked_source(settings, default)
    faults += of_source
    if settings.phase == "encode" and settings.room:
        faults.append("--phase encode fills the cache of a source; leave --room out, or give --source-length.")
    if settings.phase not in PROGRAMS:
        if settings.room or settings.prefill_layout:
            faults.append(f"--phase {settings.phase} has no cache; leave --room and --prefill-layout out.")
        faults += [
            f"--{name} int8 is for --phase {', '.join(PROGRAMS[:-1])} and {PROGRAMS[-1]}, not {settings.phase}."
            for name in ("weights", "cache") if getattr(settings, name) == "int8"
        ]  # fmt: skip
    if settings.sharding.platform or settings.sharding.devices or settings.sharding.distributed:
        faults.append("--topology says which devices there are; leave --platform, --devices and --distributed out.")
    if settings.smallest and settings.sharding.mesh:
        faults.append("--smallest tries slices of many sizes; leave --mesh out.")
    for flag in ("json", "hlo", "trace", "gantt"):
        path = Path(getattr(settings, flag))
        if not os.path.isdir(path.parent):
            faults.append(f"--{flag} {path}: there is no folder {str(path.parent)!r}.")
        elif getattr(settings, flag) and path.is_dir():
            faults.append(f"--{flag} {path} is a folder; name a file.")
    faults += _written_twice(settings)
    if settings.gantt and Path(settings.gantt).suffix != ".png":
        faults.append(f"--gantt writes a PNG file, whose name ends in .png, not {settings.gantt!r}.")
    if faults:
        raise ConfigError("cannot compile:", faults)
    if own.is_own(settings):
        return settings
    # A model trained with adapters is served with them merged into its weights.
    lora = settings.lora if settings.phase == "train" and settings.lora.rank else None
    return replace(settings, model=replace(settings.model, lora=lora))


def _written_twice(settings: CompileSettings) -> list[str]:
    """Return a fault for each file that two flags would write."""
    files: dict[Path, list[str]] = {}
    for flag in ("json", "hlo", "trace", "gantt"):
        if getattr(settings, flag):
            files.setdefault(Path(getattr(settings, flag)).resolve(), []).append(f"--{flag}")
    return [
        f"{' and '.join(flags)} would write one file, {path.name}." for path, flags in files.items() if len(flags) > 1
    ]


def for_training(settings: CompileSettings, default: CompileSettings) -> list[str]:
    """Return the given flags that only a training step uses. In a file, other phases ignore such settings."""
    changed = lambda of, by, names: [name for name in names if getattr(of, name) != getattr(by, name)]  # noqa: E731
    names = lambda table: [each.name for each in fields(table)]  # noqa: E731
    given = changed(settings, default, TRAINED) + changed(settings.sharding, default.sharding, ["schedule", "rounds"])
    given += changed(settings.optimizer, default.optimizer, names(OptimizerConfig))
    given += [f"lora.{name}" for name in changed(settings.lora, default.lora, names(LoraConfig))]
    return [f"--{name.replace('_', '-')}" for name in given]


def smallest(settings: CompileSettings, asked: Topology) -> Report:
    """Return the report for the smallest slice, or the fewest GPUs, that the model fits on, or for the most."""
    report, reason = None, ""
    layout = phase_layout(settings)  # A fault of the layout itself is the same on every slice.
    if settings.phase == "train":
        check_stages(settings.sharding.rounds, settings.sharding.schedule, layout)
    for target in slices(asked.chip, asked.slices):
        try:
            mesh_of(settings, target)
        except (gspmd.LayoutError, gspmd.PlanError) as error:  # No mesh of this size works.
            reason = reason or f"Of {target.name}: {error}"
            continue
        report = compiled(settings, target)
        if report.fits:
            return report
    if report is None:
        raise ConfigError("cannot compile:", [f"no slice of {asked.chip.name} has a mesh for this model.", reason])
    return report


def layout_of(settings: CompileSettings) -> Layout:
    """Return the layout that the flags name, with their changes."""
    sharding = settings.sharding
    layout = Layout.load(sharding.layout).override(sharding.overrides)
    return layout.lowered(sharding.lowering) if sharding.lowering else layout


def phase_layout(settings: CompileSettings) -> Layout:
    """Return the layout of the phase that is compiled."""
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
    """Return the mesh of a slice that divides the sizes in the layout of the phase that is compiled."""
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
        layout.check(sizes, shape)
    else:
        shape = layout.mesh_for(target.num_devices, sizes)
    if served:  # For prefill too: weights and cache are stored as for decoding.
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
    """Compile and report for one slice.

    Args:
        settings: the program.
        target: the slice, or the nodes.
        called: names the program in progress, by default its model and layout.
        tell: receives the phase in progress; by default it is shown on the terminal.
    """
    config, layout, mesh = settings.model, layout_of(settings), mesh_of(settings, target)
    program, args, options = program_of(settings, layout, mesh)
    if own.is_own(settings):
        of_one, at = Own(settings.model), layout.resolved(config.sizes(settings.batch, settings.length), mesh)
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
    """Return the FLOPs of one row, with those of a backward pass."""
    config, source = settings.model, settings.source_length or settings.length
    if settings.phase == "encode":
        return source * config.flops_per_source_token(source)
    # One token of every row, which attends to the whole cache, or all tokens, which attend to one another.
    read, seen = (1, settings.room or settings.length) if settings.phase == "decode" else (settings.length,) * 2
    return read * config.flops_per_token(seen, source, encoded=settings.phase in PROGRAMS)


def program_of(settings: CompileSettings, layout: Layout, mesh) -> tuple[Callable, tuple, dict[str, Any]]:
    """Return the program to compile, its abstract arguments, and which of them it overwrites or may reorder."""
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
    """Report on stderr which of a layout's alternatives were taken."""
    print(*layout.chosen, sep="\n", end="\n" * bool(layout.chosen), file=sys.stderr)


def save(settings: CompileSettings, report: Report) -> None:
    """Write the files of the flags; a program that its compiler refuses only has figures."""
    if settings.json:
        Path(settings.json).write_text(report.to_json())
    if not report.timeline:
        unwritten = [f"--{name}" for name in ("hlo", "trace", "gantt") if getattr(settings, name)]
        if unwritten:
            print(f"There is no program that fits: {', '.join(unwritten)} left nothing.", file=sys.stderr)
        return
    if settings.hlo:
        Path(settings.hlo).write_text(report.hlo)
    if settings.trace:
        perfetto.write(report.timeline, settings.trace)
    if settings.gantt:
        gantt.draw(report.timeline, settings.gantt)
