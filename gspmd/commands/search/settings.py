"""Find the best layout of a model on a TPU slice or on GPUs, by exact search: a file to read, change and train with.

    gspmd search --config llama-2-70b --topology tpu-v5p:4x8x8 --batch 1024 --length 4096 --out found.toml
    gspmd search --model mixer:Mixer --layout mixer.toml --topology tpu-v5e:8x8 --batch 512 --out found.toml

Layouts are priced as gspmd plans them, on every mesh whose axes are whole torus axes; on GPUs, on every mesh of at most
three axes. The answer states by how much any other layout that fits in memory could be faster: usually by 0.05% at
most. For a custom model, every line of --layout is searched. Nothing runs, and nothing is compiled unless --compile
asks for it. Exit code 1 if no layout fits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from gspmd.annotate import LayoutError, Spec, SpecError, parse_via
from gspmd.annotate.errors import listed
from gspmd.commands import configs, files, flags
from gspmd.commands.file import File, checked_source, file_of, group_faults, is_own, source_length_of
from gspmd.commands.search.slice import Slice
from gspmd.commands.search.unpriced import unpriced
from gspmd.display.tables import counted
from gspmd.layouts import Layout
from gspmd.layouts.rules.keys import KEYS, OVERRIDES, unknown_key
from gspmd.training import OptimizerConfig, ShardingConfig
from gspmd.training.config import ConfigError, Update, parse_mesh
from gspmd.training.model.finding import typed_with
from gspmd.training.toml import positive
from gspmd_models.config import REMATS, ModelConfig
from gspmd_models.search.workload import STEPS

if TYPE_CHECKING:
    from gspmd.training.model import Own

DEFAULT = "llama-2-70b"
COMMON = (
    "config", "topology", "phase", "mesh", "batch", "length", "remat", "microbatches", "memory", "fixed", "why",
    "stages", "compile", "out", "json", "frontier",
)  # fmt: skip
"""The settings whose flags --help shows."""


@dataclass(frozen=True)
class SearchSettings:
    """The model and the slice for which to find a layout, and the files for the answer."""

    config: str = DEFAULT
    """TOML file with a table [model], and perhaps [training], [optimizer] and, for a custom model, [sharding]
    layout."""
    topology: str = "tpu-v5p:4x8x8"
    """Chip and torus, such as tpu-v4:4x4x4, tpu-v5p:8x8x16 or tpu-v6e:16x16; or the GPUs of a node, such as h100:8; or
    the number of nodes and the GPUs of each, such as h100:16x8 or gb200:2x72."""
    phase: Literal["train", "encode", "prefill", "decode"] = "train"
    """Program to search for. train: a whole update, as `gspmd train` makes it. The others are what `gspmd generate`
    runs: encode reads --source-length tokens of every row, prefill reads --length tokens of every row into a cache, and
    decode reads one token of every row with a full cache. Each phase is searched separately."""
    mesh: str = ""
    """Mesh axes and their sizes, such as x=4,y=8,z=8; if not given, every mesh whose axes are whole torus axes, and for
    GPUs every mesh of at most three axes."""
    batch: int = 32
    """Sequences, over all devices."""
    length: int = 256
    """Tokens of a sequence."""
    source_length: int = 0
    """Tokens of an encoder's source; 0 for as many as --length. If not given, the number in [training]."""
    microbatches: int | None = None
    """Number of parts of a training step's batch, as in `gspmd train`; if not given, the best of 1, 2, 4, ... that
    divide the batch, regardless of [training]."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype that the model computes in."""
    weights: Literal["dtype", "int8"] = "dtype"
    """Dtype in which serving stores matrices; int8 ones have a float32 scale for every channel."""
    cache: Literal["dtype", "int8"] = "dtype"
    """Dtype in which serving keeps keys and values; int8 has a float32 scale for each token and head."""
    remat: Literal["none", "full", "dots-except-hidden", "dots", "selective"] | None = None
    """The choice of what the backward pass recomputes; if not given, the best one."""
    memory: float = 0.9
    """Fraction of a device's memory that may be used."""
    layout: str = ""
    """TOML file whose lines are searched, for a custom model; only the dimensions of its specs are used."""
    fixed: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A line that is fixed to a spec, such as ffn.w_in=EF_x; repeatable."""
    why: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A line to ask about, such as ffn.w_in=EF_x; its cost is printed, and the lines that would change with it.
    Repeatable."""
    beside: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A layout file to price along with the presets, on the mesh that is best for it; repeatable."""
    stages: bool = False
    """Also search pipelines, on every mesh of the devices of a stage, regardless of --mesh: print a table with the best
    pipeline for each number of stages and of microbatches."""
    compile: int = 0
    """Number of layouts to compile, the best ones that differ from each other; the best preset is compiled too. If the
    preset is fastest, it is also compiled with different lines. 0 for a planned answer only."""
    compiler_options: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """With --compile, an option of the compiler, such as xla_tpu_scoped_vmem_limit_kib=81920; repeatable."""
    out: str = ""
    """TOML file for the layout; printed if not given."""
    json: str = ""
    """File for the figures."""
    frontier: str = ""
    """PNG file for the picture of seconds against bytes."""
    update: Annotated[Update, tyro.conf.Suppress, tyro.conf.Fixed] = field(
        default_factory=lambda: Update(OptimizerConfig(), STEPS)
    )
    """The update of a training step, from [optimizer] and [training] of the file."""
    model_class: Annotated[str, tyro.conf.arg(name="model", metavar="MODULE:NAME")] = ""
    """A custom model, as in `gspmd train`; without --config, only the model."""
    model: ModelConfig = field(default_factory=ModelConfig)

    @property
    def subject(self) -> "Own":
        """The custom model, in the form that the builder of training steps takes."""
        import jax.numpy as jnp  # flags are read without JAX

        from gspmd.commands import own

        return own.subject(self, jnp.dtype(self.dtype))

    @property
    def name(self) -> str:
        """The name of the model, for the first line of the layout's file."""
        return self.subject.name if is_own(self) else Path(self.config).name.removesuffix(".toml")

    @property
    def called(self) -> str:
        """The name of the model as given by flags, without a folder."""
        return (self.model_class or self.name) if is_own(self) else self.name

    @property
    def sources(self) -> int:
        """Number of tokens of an encoder–decoder's source; 0 for decoder-only and for custom models."""
        return 0 if is_own(self) else self.model.tokens_of_source(self.source_length, self.length)

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the model."""
        if not is_own(self):
            return self.model.num_parameters
        from gspmd.layouts import Layout

        return self.subject.num_parameters(Layout.load(self.layout))

    @property
    def given(self) -> dict[str, str]:
        """The fixed lines, with their specs."""
        return {key.strip(): spec.strip() for key, _, spec in (each.partition("=") for each in self.fixed)}

    @property
    def remats(self) -> tuple[Any, ...]:
        """The choices of remat to be searched.

        There is a single choice if `remat` gives one, if nothing is trained, or if blocks are not recomputed.
        """
        if self.remat or self.phase != "train" or self.model.repeats == 1:
            return (self.remat or self.model.remat,)
        return REMATS

    @property
    def searches_microbatches(self) -> bool:
        """Whether the number of microbatches is searched, and has more than one possible value."""
        from gspmd.search.answers.microbatches import several  # which imports JAX; flags are read without it

        return self.phase == "train" and self.microbatches is None and bool(several(self.batch))


def parse(argv: Sequence[str], script: str = "") -> SearchSettings:
    """Return the settings of a settings file, overridden by flags.

    Raises:
        ConfigError: settings are faulty; the message lists every fault.
    """
    file, name = file_of(argv, DEFAULT)
    training, own = file.training, is_own(file)
    said: dict[str, Any] = {each: getattr(training, each) for each in ("batch", "length")}
    said["update"] = Update(
        file.optimizer, STEPS, frozen=tuple(training.frozen), parameter_dtype=training.parameter_dtype
    )
    if own:
        layout = file.sharding.layout  # Its default is a preset, which has no lines of such a model.
        said |= {"layout": "" if layout == ShardingConfig().layout else layout, "model": file.model}
        cls = typed_with(SearchSettings, type(file.model))
    else:
        cls, lora = SearchSettings, file.lora if file.lora.rank else file.model.lora
        said["model"] = replace(file.model, lora=lora)
        said["source_length"] = source_length_of(file)
    prog, description = configs.called(__doc__, "gspmd search", script)
    default = cls(name, **said, model_class=file.model_class)
    settings = flags.parse_flags(cls, argv, default, description, prog, COMMON)
    settings, of_source = checked_source(settings, default)
    if own:
        faults = [*_faults_of_own(file, settings)]
    else:
        asked, remedy = replace(file, model=settings.model), "; leave it out to search for that."
        faults = [*unpriced(asked, settings.phase == "train", remedy)]
    if faults := [*faults, *of_source, *_faults(settings)]:
        raise ConfigError("cannot search a custom model:" if own else "cannot search:", faults)
    if own:
        return settings
    return replace(settings, model=replace(settings.model, remat=settings.remat or settings.model.remat))


def _faults_of_own(file: File, settings: SearchSettings) -> Iterator[str]:
    """Yield a fault for everything that a custom model lacks, and for each setting that does not apply to it."""
    if not settings.layout:
        yield "its lines come from a layout file; give --layout FILE, of which only dimensions are used."
    if file.lora.rank:
        yield "adapters are for the models that come with gspmd; leave [lora] out, or freeze parameters."
    if ours := [*_for_ours(settings)]:
        yield f"{', '.join(ours)}: only for the models that come with gspmd; leave them out."


def _for_ours(settings: SearchSettings) -> Iterator[str]:
    """Yield the given flags that do not apply to a custom model."""
    if settings.stages:
        yield "--stages"
    if settings.beside:
        yield "--beside"
    if settings.remat is not None:
        yield "--remat"
    for name in ("weights", "cache"):
        if getattr(settings, name) != "dtype":
            yield f"--{name} {getattr(settings, name)}"
    if settings.phase != "train":
        yield f"--phase {settings.phase}"


def _faults(settings: SearchSettings):
    numbers: list[str] = []
    given = {} if settings.microbatches is None else {"microbatches": settings.microbatches}
    positive(numbers, batch=settings.batch, length=settings.length, **given)
    yield from (f"--{fault}" for fault in numbers)
    yield from _faults_of_slice(settings)
    yield from _faults_of_lines(settings)
    if is_own(settings):
        if not numbers and settings.batch % (settings.microbatches or 1):
            yield f"{settings.microbatches} microbatches do not divide a batch of {settings.batch}; choose a divisor."
    elif settings.phase == "train" and not numbers:
        yield from group_faults(settings.model, settings.batch, settings.length, settings.sources)
    if settings.stages and settings.sources:
        yield "--stages searches pipelines of a decoder-only model, and this one has an encoder; leave out --stages."
    if settings.compile < 0:
        yield f"--compile is a number of layouts, 0 or more, not {settings.compile}."
    if settings.phase == "train" and not is_own(settings):
        for flag, given in (("weights", settings.weights), ("cache", settings.cache)):
            if given == "int8":
                yield f"--{flag} int8 is for --phase encode, prefill and decode, not train."
    if settings.phase != "train" and not is_own(settings):
        for flag, given in (
            ("stages", settings.stages),
            ("microbatches", settings.microbatches is not None),
            ("remat", settings.remat is not None),
        ):
            if given:
                yield f"--phase {settings.phase} trains nothing; leave --{flag} out."
    if settings.compiler_options and not settings.compile:
        yield "--compiler-options are for programs that are compiled: add --compile 3, or leave them out."
    for flag, suffix, kind in (("json", "", ""), ("frontier", ".png", "a PNG file")):
        yield from files.faults_of(flag, getattr(settings, flag), suffix, kind)
    try:
        ShardingConfig(compiler_options=settings.compiler_options)
    except ConfigError as error:
        yield from error.faults


def _divides(mesh: str, target: Slice) -> bool:
    """Return whether the slices divide evenly over the first axes of a mesh."""
    from gspmd.hardware.links import over_slices  # which imports numpy

    return over_slices(tuple(parse_mesh(mesh).values()), target.topology.slices) is not None


def _faults_of_lines(settings: SearchSettings) -> Iterator[str]:
    """Yield the faults of the lines that flags fix or ask about."""
    for flag in ("why", "fixed"):
        for asked in getattr(settings, flag):
            key, equals, spec = asked.partition("=")
            if not (key.strip() and equals and spec.strip()):
                yield f"--{flag} reads KEY=SPEC, such as ffn.w_in=EF_x, not {asked!r}."
            elif not is_own(settings) and not _is_known(key.strip()):
                yield f"--{flag} {asked}: {' '.join(unknown_key(key.strip(), KEYS))}"
            elif flag == "fixed" and (fault := _fault_of_spec(settings, key.strip(), spec.strip())):
                yield f"--fixed {asked}: {fault}"  # A wrong --why loses no answer, and is explained after it.
    if settings.layout and not is_own(settings):
        yield "--layout is for a custom model (--model); the lines of this model are known. Leave it out."
    for name in settings.beside:
        try:
            Layout.load(name)
        except LayoutError as error:
            yield f"--beside {name}: {error}"
    if settings.fixed and settings.stages:
        yield "--fixed gives lines of a layout without stages; leave it, or --stages, out."


def _fault_of_spec(settings: SearchSettings, key: str, text: str) -> str:
    """Return why a line cannot have a spec or via in any layout of this search, or "" if only the search can tell."""
    from gspmd.search.answers.meshes import AXES  # which imports numpy

    try:
        specs = parse_via(text).specs if key.endswith("_via") else (Spec.parse(text),)
    except SpecError as error:
        return str(error)
    dims = KEYS[key].dims if key in KEYS and KEYS[key].kind != "via" else ""
    if dims and specs[0].dims != tuple(dims):
        return f"{key} has the dimensions {dims}, not {''.join(specs[0].dims)}."
    axes = parse_mesh(settings.mesh) if settings.mesh else AXES
    if missing := sorted({axis for spec in specs for axis in spec.used}.difference(axes)):
        return f"no mesh of this search has an axis {missing[0]}; write {listed(axes, 'or')}."
    return ""


def _is_known(key: str) -> bool:
    """Return whether layouts of the models that come with gspmd may have this line, or override it in a section."""
    section, _, rest = key.partition(".")
    return key in KEYS or (section in OVERRIDES and rest in KEYS)


def _faults_of_slice(settings: SearchSettings) -> Iterator[str]:
    """Yield the faults of the slice, its mesh, its memory, and the name of the layout's file."""
    if not 0 < settings.memory <= 1:
        yield f"--memory is the fraction of memory that may be used, above 0 and at most 1, not {settings.memory}."
    yield from files.faults_of("out", settings.out, ".toml", "a TOML file")
    target = Slice.named(settings.topology)
    if settings.mesh and (count := prod(parse_mesh(settings.mesh).values())) != target.devices:
        has = f"--mesh {settings.mesh} has {counted(count, 'device')}, and {target.name} has {target.devices}"
        yield f"{has}; --topology names another slice."
    elif settings.mesh and not _divides(settings.mesh, target):
        count = target.topology.slices
        yield (
            f"the first axes of --mesh {settings.mesh} lie over the {count} slices of {target.name}, and do not divide "
            f"them; give the first axis {count}, or a divisor or multiple of it."
        )
    if settings.stages and target.topology.slices > 1:
        slices = f"{target.name} has {target.topology.slices} slices"
        yield f"--stages prices stages within one slice, and {slices}; leave out --stages."
