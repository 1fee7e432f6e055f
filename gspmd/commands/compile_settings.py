"""Ask the real compiler whether a model fits on TPUs or GPUs that are not attached, and what it costs there.

    gspmd compile --config palm-540b --layout weight-stationary-2d \
        --topology tpu-v4:4x4x4 --phase decode --batch 512 --length 2048

Nothing is allocated and nothing runs; all times are simulated. Exit code 1 if the model does not fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gspmd.audit.offline.names import read_name
from gspmd.commands import configs, files, flags
from gspmd.commands.file import checked_source, file_of, is_own, source_length_of
from gspmd.layouts.rules.keys import PHASES
from gspmd.training import OptimizerConfig, ShardingConfig
from gspmd.training.config import ConfigError
from gspmd.training.model import finding
from gspmd.training.toml import positive
from gspmd_models.config import ModelConfig
from gspmd_models.finetuning.config import LoraConfig

DEFAULT = "palm-8b"
SERVED = ("encode", *PHASES)
"""Phases of serving; each is a program of `gspmd_models.decoding.programs`."""
COMMON = (
    "config", "topology", "phase", "batch", "length", "layout", "set", "mesh", "dtype", "weights", "cache",
    "microbatches", "smallest", "details", "json", "trace", "gantt",
)  # fmt: skip
"""The settings whose flags --help shows."""
TRAINED = ("microbatches", "parameter_dtype", "frozen")
"""Fields of [training] that are used only by a training step."""


@dataclass(frozen=True)
class CompileSettings:
    """A program to compile, the slice or nodes, and the files for the results."""

    config: str = DEFAULT
    """TOML file with a table [model], and perhaps [training], [lora], [optimizer] and [sharding]."""
    topology: str = "tpu-v4:4x4x4"
    """Chip and torus, such as tpu-v4:4x4x4, tpu-v5p:8x8x16 or tpu-v6e:16x16; or the GPUs of a node, such as h100:8; or
    the number of nodes and the GPUs of each, such as h100:16x8 or gb200:2x72."""
    phase: Literal["forward", "train", "encode", "prefill", "decode"] = "forward"
    """Program to compile. forward: tokens to logits, weights in --dtype. train: a whole update, as in `gspmd train`; a
    custom model has only this phase. The others are the programs of `gspmd generate`. encode: an encoder reads
    --source-length tokens of every row. prefill: --length tokens of every row are read into a cache. decode: every row
    gets one token after a full cache."""
    batch: int = 32
    """Sequences, over all devices."""
    length: int = 256
    """Tokens of a sequence; for a prefill, the tokens that it reads at once."""
    source_length: int = 0
    """Tokens of an encoder's source, by default as in [training]; 0 for --length."""
    microbatches: int = 1
    """Parts of a training step's batch, as in `gspmd train`."""
    parameter_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which a training step stores matrices, as in `gspmd train`."""
    frozen: tuple[str, ...] = ()
    """Patterns of parameters that a training step leaves unchanged, as in `gspmd train`."""
    room: int = 0
    """Number of tokens that a row of the cache can hold; 0 for --length."""
    prefill_layout: str = ""
    """Layout for --phase encode or prefill, a preset or TOML file, if it differs from --layout; weights stay as
    --layout shards them."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype that the model computes in."""
    weights: Literal["dtype", "int8"] = "dtype"
    """Dtype in which serving stores matrices; int8 has a float32 scale for every channel."""
    cache: Literal["dtype", "int8"] = "dtype"
    """Dtype in which serving stores keys and values; int8 has a float32 scale for each token and head."""
    smallest: bool = False
    """Look for the fewest devices of this chip on which the model fits: TPU slices that double in size, or parts of a
    node of GPUs and then 1, 2, 4, ... nodes. At each size only the layout's own mesh is tried; with a different --mesh
    the model may fit on fewer devices."""
    details: bool = False
    """Give each step that the compiler changed a row of its own; by default, steps that the compiler combined share a
    row."""
    json: str = ""
    """File for the figures, as JSON."""
    hlo: str = ""
    """File for the scheduled program."""
    trace: str = ""
    """File for the timeline, to open in ui.perfetto.dev."""
    gantt: str = ""
    """PNG file for the timeline."""
    model_class: Annotated[str, tyro.conf.arg(name="model", metavar="MODULE:NAME")] = ""
    """A custom model, as in `gspmd train`; without --config, all other settings have their defaults."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: tyro.conf.OmitArgPrefixes[OptimizerConfig] = field(default_factory=OptimizerConfig)
    sharding: tyro.conf.OmitArgPrefixes[ShardingConfig] = field(default_factory=ShardingConfig)


def parse(argv: Sequence[str], script: str = "") -> CompileSettings:
    """Return the settings of a settings file, overridden by flags."""
    file, name = file_of(argv, DEFAULT)
    said = {name: getattr(file.training, name) for name in ("batch", "length", *TRAINED)}
    said["source_length"] = source_length_of(file)
    said |= {name: getattr(file, name) for name in ("model_class", "model", "lora", "optimizer", "sharding")}
    typed = finding.typed_with(CompileSettings, type(file.model)) if is_own(file) else CompileSettings
    default = typed(name, **said, phase="train" if is_own(file) else "forward")
    prog, description = configs.called(__doc__, "gspmd compile", script)
    settings = flags.parse_flags(typed, argv, default, description, prog, COMMON)
    faults: list[str] = []
    if is_own(settings):
        from gspmd.commands import own  # This imports JAX, as the model has done already.

        own.refuse(settings, "cannot compile a custom model:")
        if settings.phase != "train":
            faults.append(f"a custom model has only a training step; leave --phase {settings.phase} out.")
    numbers: list[str] = []
    positive(numbers, batch=settings.batch, length=settings.length, microbatches=settings.microbatches)
    faults += [f"--{fault}" for fault in numbers]
    if settings.room < 0 or 0 < settings.room < settings.length:
        faults.append(f"--room has to be 0, or at least --length {settings.length}, not {settings.room}.")
    if not is_own(settings) and settings.phase == "train" and not settings.model.stacked:
        faults.append("--model.no-stacked is for serving; leave it out, or compile --phase decode.")
    if not is_own(settings) and settings.model.lora:
        faults.append("adapters have their own table: write [lora] in place of [model.lora].")
    if settings.phase != "train" and (given := for_training(settings, default)):
        faults.append(f"--phase {settings.phase} trains nothing; leave {', '.join(given)} out.")
    settings, of_source = checked_source(settings, default)
    faults += of_source
    if settings.phase == "encode" and settings.room:
        faults.append("--phase encode fills the cache of a source; leave --room out, or give --source-length.")
    if settings.phase not in SERVED:
        if settings.room or settings.prefill_layout:
            faults.append(f"--phase {settings.phase} has no cache; leave --room and --prefill-layout out.")
        faults += [
            f"--{name} int8 is for --phase {', '.join(SERVED[:-1])} and {SERVED[-1]}, not {settings.phase}."
            for name in ("weights", "cache") if getattr(settings, name) == "int8"
        ]  # fmt: skip
    if settings.sharding.platform or settings.sharding.devices or settings.sharding.distributed:
        faults.append("--topology already names the devices; leave --platform, --devices and --distributed out.")
    read_name(settings.topology)
    if settings.smallest and settings.sharding.mesh:
        faults.append("--smallest tries slices of many sizes; leave --mesh out.")
    for flag in ("json", "hlo", "trace"):
        faults += files.faults_of(flag, getattr(settings, flag))
    faults += files.faults_of("gantt", settings.gantt, ".png", "a PNG file")
    faults += _written_twice(settings)
    if faults:
        raise ConfigError("cannot compile:", faults)
    if is_own(settings):
        return settings
    # A model trained with adapters is served with them merged into its weights.
    lora = settings.lora if settings.phase == "train" and settings.lora.rank else None
    return replace(settings, model=replace(settings.model, lora=lora))


def _written_twice(settings: CompileSettings) -> list[str]:
    """Return a fault for each file that more than one flag would write."""
    named: dict[Path, list[str]] = {}
    for flag in ("json", "hlo", "trace", "gantt"):
        if getattr(settings, flag):
            named.setdefault(Path(getattr(settings, flag)).resolve(), []).append(f"--{flag}")
    return [
        f"{' and '.join(flags)} would write one file, {path.name}." for path, flags in named.items() if len(flags) > 1
    ]


def for_training(settings: CompileSettings, default: CompileSettings) -> list[str]:
    """Return the given flags that only a training step uses.

    Such settings in a file are not an error, because the other phases ignore them.
    """
    changed = lambda of, by, names: [name for name in names if getattr(of, name) != getattr(by, name)]  # noqa: E731
    names = lambda table: [each.name for each in fields(table)]  # noqa: E731
    given = changed(settings, default, TRAINED) + changed(settings.sharding, default.sharding, ["schedule", "rounds"])
    given += changed(settings.optimizer, default.optimizer, names(OptimizerConfig))
    given += [f"lora.{name}" for name in changed(settings.lora, default.lora, names(LoraConfig))]
    return [f"--{name.replace('_', '-')}" for name in given]
