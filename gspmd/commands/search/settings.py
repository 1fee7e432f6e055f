"""The flags of `gspmd search`."""

import argparse
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from gspmd.commands import configs
from gspmd.commands.compile import File
from gspmd.commands.search.slice import Slice
from gspmd.commands.search.unpriced import unpriced
from gspmd.display.tables import counted
from gspmd.training import ShardingConfig, command
from gspmd.training.config import ConfigError, load_toml, parse_mesh
from gspmd.training.toml import positive
from gspmd_models import ModelConfig
from gspmd_models.config import REMATS
from gspmd_models.search.answers.microbatches import several

DEFAULT = configs.find("llama-2-70b")


@dataclass(frozen=True)
class Settings:
    """What to find a layout for, and where to put it."""

    config: str = DEFAULT
    """TOML file with a table [model], and perhaps [training]."""
    topology: str = "tpu-v5p:4x8x8"
    """Chip and torus, such as tpu-v4:4x4x4, tpu-v5p:8x8x16 or tpu-v6e:16x16."""
    phase: Literal["train", "prefill", "decode"] = "train"
    """train: a whole update, as `gspmd train` makes it. prefill, decode: what `gspmd generate` runs, --length tokens of
    every row into a cache, or one behind a full one; each phase is searched for itself."""
    mesh: str = ""
    """Mesh axes and their sizes, such as x=4,y=8,z=8; every mesh whose axes are whole torus axes if not given."""
    batch: int = 32
    """Sequences, over all devices."""
    length: int = 256
    """Tokens of a sequence."""
    microbatches: int | None = None
    """Parts of a training step's batch, as of `gspmd train`; of 1, 2, 4, ... that divide it what is best, if not given,
    whatever [training] says."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What the model computes in."""
    remat: Literal["none", "full", "dots-except-hidden", "dots", "selective"] | None = None
    """What the backward pass computes again; what is best, if not given."""
    memory: float = 0.9
    """Share of a device's memory that may be used."""
    why: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A line to ask about, such as ffn.w_in=EF_x: what that would cost, and what would change with it; repeatable."""
    stages: bool = False
    """Also search pipelines: a table of stages and microbatches, each with the best layout of a stage, on
    every mesh that the rest of the torus makes, whatever --mesh says."""
    compile: int = 0
    """How many of the best different layouts are compiled, beside the best preset; where that is the fastest, with how
    many other lines, too. 0 for a planned answer only."""
    compiler_options: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """With --compile, an option of the compiler, such as xla_tpu_scoped_vmem_limit_kib=81920; repeatable."""
    out: str = ""
    """TOML file for the layout; printed if not given."""
    json: str = ""
    """File for the figures."""
    frontier: str = ""
    """PNG file for the picture of seconds against bytes."""
    model: ModelConfig = field(default_factory=ModelConfig)

    @property
    def remats(self) -> tuple[Any, ...]:
        """The choices of remat that are searched; one where nothing is trained, or blocks are never computed again."""
        if self.remat or self.phase != "train" or self.model.layers == self.model.period:
            return (self.remat or self.model.remat,)
        return REMATS

    @property
    def searches_microbatches(self) -> bool:
        """Whether their number is searched, and there is more than one."""
        return self.phase == "train" and self.microbatches is None and bool(several(self.batch))


def parse(argv: Sequence[str], script: str, documentation: str) -> Settings:
    """The settings: those of the file, replaced by flags.

    Raises:
        ConfigError: with every fault.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--config", default=DEFAULT)
    name = early.parse_known_args(list(argv))[0].config
    file = load_toml(File, configs.find(name))
    said = {each: getattr(file.training, each) for each in ("batch", "length")}
    default = Settings(name, **said, model=file.model)
    prog, description = configs.called(documentation, "gspmd search", script)
    settings = command.parse_flags(Settings, argv, default, description, prog)
    asked, remedy = replace(file, model=settings.model), "; leave it out to search for that."
    if faults := [*unpriced(asked, settings.phase == "train", remedy), *_faults(settings)]:
        raise ConfigError("cannot search:", faults)
    return replace(settings, model=replace(settings.model, remat=settings.remat or settings.model.remat))


def _no_file(flag: str, path: Path):
    """Why a file cannot be written there, as far as that is known before it is."""
    try:
        if "\0" in str(path):
            yield f"--{flag} {path!s:.40}: a name has no null characters."
        elif not path.parent.is_dir():
            yield f"--{flag} {path}: there is no folder {str(path.parent)!r}."
        elif stat.S_ISDIR(os.stat(path).st_mode):
            yield f"--{flag} {path}: it is a folder; give a file."
        elif not os.access(path, os.W_OK):
            yield f"--{flag} {path}: the file is read-only."
    except FileNotFoundError:
        if not os.access(path.parent, os.W_OK):
            yield f"--{flag} {path}: the folder is read-only."
    except OSError as error:  # a name that is too long
        yield f"--{flag} {path!s:.40}...: {error.strerror}."


def _faults(settings: Settings):
    numbers: list[str] = []
    given = {} if settings.microbatches is None else {"microbatches": settings.microbatches}
    positive(numbers, batch=settings.batch, length=settings.length, **given)
    yield from numbers
    if not 0 < settings.memory <= 1:
        yield f"--memory is the share of memory that may be used, above 0 and at most 1, not {settings.memory}."
    if settings.phase == "train" and not numbers:
        yield from command.group_faults(settings.model, settings.batch, settings.length)
    if settings.compile < 0:
        yield f"--compile is a number of layouts, 0 or more, not {settings.compile}."
    if settings.phase != "train":
        for flag, given in (
            ("stages", settings.stages),
            ("microbatches", settings.microbatches is not None),
            ("remat", settings.remat is not None),
        ):
            if given:
                yield f"--phase {settings.phase} trains nothing; leave --{flag} out."
    if settings.compiler_options and not settings.compile:
        yield "--compiler-options are for programs that are compiled: add --compile 3, or leave them out."
    for asked in settings.why:
        key, equals, spec = asked.partition("=")
        if not (key.strip() and equals and spec.strip()):
            yield f"--why reads KEY=SPEC, such as ffn.w_in=EF_x, not {asked!r}."
    for flag in ("out", "json", "frontier"):
        if given := getattr(settings, flag):
            yield from _no_file(flag, Path(given))
    for flag, suffix, kind in (("out", ".toml", "a TOML file"), ("frontier", ".png", "a PNG file")):
        given = getattr(settings, flag)
        if given and Path(given).suffix != suffix:
            yield f"--{flag} writes {kind}, whose name ends in {suffix}, not {given!r}."
    try:
        ShardingConfig(compiler_options=settings.compiler_options)
    except ConfigError as error:
        yield from error.faults
    target = Slice.named(settings.topology)
    if settings.mesh and (count := prod(parse_mesh(settings.mesh).values())) != target.devices:
        has = f"--mesh {settings.mesh} has {counted(count, 'device')}, and {target.name} has {target.devices}"
        yield f"{has}; --topology names another slice."
