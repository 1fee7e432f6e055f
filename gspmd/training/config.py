"""The configuration of a training run: steps, data, optimizer, mesh and layout."""

import dataclasses
import glob
import os
import typing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import tyro

from gspmd.lowerings.names import LOWERINGS
from gspmd.pipeline.schedule import SCHEDULES
from gspmd.training.syntax import layout_beside, parse_mesh, parse_processes, parse_profile, parse_relayout
from gspmd.training.toml import ConfigError, Dataclass, load_toml, not_a_choice, not_negative, positive

if TYPE_CHECKING:  # type checkers cannot evaluate Literal[LOWERINGS]
    Lowering: TypeAlias = str
    Schedule: TypeAlias = str
else:
    Lowering, Schedule = Literal[LOWERINGS], Literal[SCHEDULES]

__all__ = ["ConfigError", "OptimizerConfig", "ShardingConfig", "TrainingConfig", "Update", "load_toml", "parse_mesh"]


_SHORT = 50
"""Number of steps below which a run counts as a trial.

By default, a trial ends with a short validation and without a sample of text, so that its end does not take longer than
its steps.
"""


@dataclass(frozen=True)
class TrainingConfig:
    """The length of a run, its data, and its folder."""

    steps: int = 400
    """Number of updates."""
    batch: int = 32
    """Sequences per update, over all devices."""
    length: int = 256
    """Number of predicted tokens of a sequence; tokens are bytes if there is no tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype that the model computes in."""
    parameter_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which matrices are stored and sent; with bfloat16 the optimizer keeps float32 master copies."""
    data: tuple[str, ...] = ()
    """Files of text, JSON lines (.jsonl) or Parquet, or glob patterns ('path/*.txt', quoted; in a settings file,
    relative to its folder); if not given, the source of Python's standard library."""
    objective: Literal["next-token", "span-corruption", "prefix", "pairs"] = "next-token"
    """Task that the text is turned into: next-token for a decoder-only model; span-corruption (T5, Switch), prefix or
    pairs for an encoder–decoder."""
    source_length: int = 256
    """Number of tokens of the encoder's input; --length is for the decoder."""
    noise_density: float = 0.15
    """Fraction of the tokens that span-corruption replaces by sentinels."""
    mean_span: float = 3.0
    """Mean number of tokens that a sentinel of span-corruption stands for."""
    pack: bool = False
    """Whether several documents (next-token), or pairs, share a row; attention stays within each document or pair."""
    data_prompt: str = ""
    """Field of a record with its prompt, which the model reads before the text, but does not predict."""
    data_field: str = "text"
    """Field of a JSON line, or column of a Parquet file, with its text."""
    data_source: str = ""
    """Field of a record with the source of a pair, whose target is in --data-field."""
    data_cache: str = ""
    """Folder where tokens are kept from run to run; $GSPMD_CACHE, or ~/.cache/gspmd, if not given."""
    tokenizer: str = ""
    """A tokenizer.json, or the folder of one, whose ids are the tokens; if not given, tokens are bytes."""
    validation_fraction: float = 0.05
    """Fraction of the bytes that is held out, in whole files where there are enough."""
    validation_every: int = 100
    """Updates between two validations; 0 for one at the end only."""
    validation_batches: int = 8
    """Batches of a validation during training, spread over the held-out text."""
    final_validation_batches: int | None = None
    """Batches of the validation at the end, spread in the same way; 0 for all of the held-out text. If not given, 500,
    or 16 for a run of fewer than 50 steps."""
    log_every: int = 10
    """Updates between two lines with the loss; 0 for a line every few seconds."""
    save_every: int = 100
    """Updates between two checkpoints; 0 for one at the end only."""
    out: str = ""
    """Folder for metrics, events, checkpoints and plots; a new one under runs/ if not given."""
    keep: int = 2
    """Number of the newest checkpoints to keep."""
    resume: bool = False
    """Continue from the newest intact checkpoint under --out (by default, of the newest run under runs/); --resume STEP
    continues from the checkpoint of that step."""
    resume_step: int | None = None
    """Step of the checkpoint to resume from; the newest intact one if not given."""
    microbatches: int = 1
    """Parts of a batch that are computed one after the other and whose gradients are added: less memory, same
    update."""
    non_finite: int = 0
    """Largest number of updates to skip because their loss or gradient is not finite; one more ends the run."""
    frozen: tuple[str, ...] = ()
    """Patterns of parameters that are not trained, such as 'embedding.*', quoted; they have no gradient and no
    optimizer state."""
    seed: int = 0
    """Seed of the parameters, the order of the data, and the router's noise."""
    relayout: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A change of layout after a step, such as 200=zero-3, or 200=zero-3:x=4,y=2 with its mesh; repeatable."""
    log: Literal["wandb"] | None = None
    """Service that also receives figures, pictures and texts, like metrics.jsonl and TensorBoard: wandb for Weights &
    Biases."""
    profile: str = ""
    """Steps to profile, FROM:TO, such as 20:24; the XProf trace goes to profile/ in the run's folder."""
    prompt: str = "def "
    """Beginning of the text that is generated at the end."""
    sample_bytes: int | None = None
    """Length of the text that is generated at the end, in tokens, which are bytes if there is no tokenizer; 0 for none.
    If not given, 256, or 0 for a run of fewer than 50 steps. If the model's context has room for fewer tokens, the text
    has as many as fit."""

    def __post_init__(self):
        faults: list[str] = []
        positive(faults, steps=self.steps, batch=self.batch, length=self.length, microbatches=self.microbatches)
        if self.microbatches > 1 and self.batch % self.microbatches:
            faults.append(f"microbatches must divide the batch, {self.batch}, but is {self.microbatches}.")
        not_negative(faults, validation_every=self.validation_every, save_every=self.save_every)
        not_negative(faults, sample_bytes=self.sample_bytes, non_finite=self.non_finite, log_every=self.log_every)
        positive(faults, keep=self.keep)
        if self.resume_step is not None and not self.resume:
            faults.append(f"resume_step needs resume; write --resume {self.resume_step}.")
        not_negative(faults, final_validation_batches=self.final_validation_batches)
        positive(faults, validation_batches=self.validation_batches)
        if not self.prompt:
            faults.append("prompt must not be empty: generated text needs something to begin with.")
        if self.seed < 0:
            faults.append(f"seed must not be negative, but is {self.seed}.")
        elif self.seed >= 2**32 - 1:  # a key takes 32 bits, and the router's noise uses seed + 1
            faults.append(f"seed must be less than 2**32 - 1, but is {self.seed}.")
        if not 0 < self.validation_fraction < 1:
            faults.append(f"validation_fraction must be between 0 and 1, but is {self.validation_fraction}.")
        _check_objective(self, faults)
        _check_relayouts(self.relayout, self.steps, faults)
        _check_profile(self.profile, self.steps, faults)
        _literals(self, faults)
        _refuse("training", faults)

    @property
    def sampled(self) -> int:
        """Number of tokens of the text that is generated at the end; 0 for no text.

        >>> TrainingConfig(steps=3).sampled, TrainingConfig(steps=50).sampled, TrainingConfig(sample_bytes=8).sampled
        (0, 256, 8)
        """
        return self.sample_bytes if self.sample_bytes is not None else 0 if self.steps < _SHORT else 256

    @property
    def last_validation(self) -> int:
        """Number of batches of the validation at the end; 0 for all of the held-out text."""
        given = self.final_validation_batches
        return given if given is not None else 16 if self.steps < _SHORT else 500

    def beside(self, folder: Path) -> "TrainingConfig":
        """Return these settings with relative paths resolved from `folder`, the folder of the settings file.

        >>> TrainingConfig(data=("text/*.txt", "/all.txt")).beside(Path("mine")).data
        ('mine/text/*.txt', '/all.txt')
        """
        cache, tokenizer = (path and os.path.join(folder, path) for path in (self.data_cache, self.tokenizer))
        data = tuple(_pattern_beside(pattern, folder) for pattern in self.data)
        relayout = tuple(parse_relayout(change).beside(folder) for change in self.relayout)
        return replace(self, data=data, data_cache=cache, tokenizer=tokenizer, relayout=tuple(map(str, relayout)))


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a linear warm-up, a cosine decay and clipping by the global norm."""

    learning_rate: float = 3e-3
    """Highest learning rate, reached at the end of the warm-up."""
    warmup: float = 0.1
    """Fraction of the steps over which the learning rate rises from zero."""
    final_fraction: float = 0.05
    """Last learning rate, as a fraction of the highest."""
    weight_decay: float = 0.1
    """Decoupled decay of the weight matrices; norms are left alone."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.98
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Number that is added to the root of the second moment."""
    clip: float = 1.0
    """Largest global norm of a gradient; 0 for no clipping."""
    moments: Literal["float32", "int8"] = "float32"
    """Dtype in which Adam's moments are kept; int8 has a scale for each block of values, and rounds stochastically."""
    moments_block: int = 64
    """Values along the last dimension of a parameter that share a scale in int8; each device must hold whole blocks."""

    def __post_init__(self):
        faults: list[str] = []
        positive(faults, learning_rate=self.learning_rate, epsilon=self.epsilon, moments_block=self.moments_block)
        not_negative(faults, weight_decay=self.weight_decay, clip=self.clip)
        for name in ("warmup", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                faults.append(f"{name} must be between 0 and 1, but is {getattr(self, name)}.")
        for name in ("beta1", "beta2"):
            # Adam divides its moments by 1 - beta^step, which is 0 if beta is 1.
            if not 0 <= getattr(self, name) < 1:
                faults.append(f"{name} must be at least 0 and less than 1, but is {getattr(self, name)}.")
        if self.moments != "int8" and self.moments_block != type(self).moments_block:
            fault = f"moments_block is {self.moments_block}, and moments are {self.moments}, which have no blocks"
            faults.append(f"{fault}; set moments to int8, or leave moments_block out.")
        _literals(self, faults)
        _refuse("optimizer", faults)


@dataclass(frozen=True)
class Update:
    """The settings on which an update of the parameters depends; they do not depend on the layout or the mesh.

    Attributes:
        optimizer: the settings of AdamW.
        steps: total number of updates.
        microbatches: number of parts of a batch, computed one after another, or sent through pipeline stages.
        frozen: patterns of the names of parameters that are not trained.
        parameter_dtype: the dtype in which matrices are stored; if it is not float32, the optimizer keeps float32
            masters.
    """

    optimizer: OptimizerConfig
    steps: int
    microbatches: int = 1
    frozen: tuple[str, ...] = ()
    parameter_dtype: Any = "float32"


@dataclass(frozen=True)
class ShardingConfig:
    """The devices, the mesh over them, and the layout on it."""

    layout: str = "gshard"
    """A preset's name, the path of a layout file (in a settings file, relative to its folder), or auto (only in
    `gspmd train` and `gspmd generate`): gspmd then searches for a layout for the available devices, or for --mesh."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """One change to the layout, such as ffn.w_in=E_xF_y; repeatable."""
    lowering: Lowering | None = None
    """Lowering by which a plan becomes a program; the layout's own choice if not given."""
    schedule: Schedule = "1f1b"
    """Order of a pipeline's forward and backward passes, where the layout splits the layers into stages."""
    rounds: int = 1
    """Chunks of layers of each stage: a microbatch passes through all stages once for each chunk. More than one
    is the interleaved schedule (Narayanan et al. 2021)."""
    mesh: str = ""
    """Mesh axes and their sizes, such as x=4,y=2; if not given, they follow from the factor in the layout's [mesh]."""
    axis_types: Literal["explicit", "auto"] = "explicit"
    """Type of the mesh axes: explicit, where a spec is part of an array's type; or auto, where it is not."""
    compiler_options: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """An option of the compiler for the step, such as xla_tpu_scoped_vmem_limit_kib=81920; repeatable."""
    platform: Literal["cpu", "gpu", "tpu"] | None = None
    """Platform to run on; if not given, the best one that JAX finds."""
    devices: int | None = None
    """Number of devices, of all processes together; if not given, all accelerators, or 8 fake devices on a CPU."""
    distributed: str = ""
    """auto for the processes that SLURM, Open MPI or Kubernetes has started, or HOST:PORT,processes=N,process=I."""

    def __post_init__(self):
        faults: list[str] = []
        positive(faults, devices=self.devices, rounds=self.rounds)
        if self.mesh:
            try:
                parse_mesh(self.mesh)
            except ConfigError as error:
                faults.extend(error.faults)
        if self.distributed not in ("", "auto"):
            try:
                parse_processes(self.distributed)
            except ConfigError as error:
                faults.extend(error.faults)
        for change in self.set:
            key, equals, spec = change.partition("=")
            if not (key and equals and spec):
                faults.append(f"set must read KEY=SPEC, such as ffn.w_in=E_xF_y, but is {change!r}.")
        for option in self.compiler_options:
            name, _, value = option.partition("=")
            if not (name and value):
                example = "xla_tpu_scoped_vmem_limit_kib=81920"
                faults.append(f"compiler_options must read NAME=VALUE, such as {example}, but is {option!r}.")
        _literals(self, faults)
        _refuse("sharding", faults)

    def beside(self, folder: Path) -> "ShardingConfig":
        """Return these settings with a relative layout path resolved from `folder`, the folder of the settings file.

        >>> ShardingConfig(layout="own.toml").beside(Path("mine")).layout
        'mine/own.toml'
        """
        return replace(self, layout=layout_beside(self.layout, folder))

    @property
    def overrides(self) -> dict[str, str]:
        """The changes to the layout, as a mapping from key to spec; the last change of a key wins."""
        return dict(change.split("=", 1) for change in self.set)

    @property
    def compiled_with(self) -> dict[str, str]:
        """The compiler's options for the step, as a mapping from name to value; the last value of a name wins."""
        return dict(option.split("=", 1) for option in self.compiler_options)


def _pattern_beside(pattern: str, folder: Path) -> str:
    """Put a folder in front of a relative glob pattern; special characters in the folder's name are escaped."""
    path = os.path.join(folder, pattern)
    return path if os.path.isabs(pattern) or os.path.isfile(path) else os.path.join(glob.escape(str(folder)), pattern)


def _check_objective(config: TrainingConfig, faults: list[str]) -> None:
    """Add a fault for every setting of the objective that is out of range, or that the objective does not use."""
    positive(faults, source_length=config.source_length, mean_span=config.mean_span)
    if not 0 < config.noise_density < 1:
        faults.append(f"noise_density must be between 0 and 1, but is {config.noise_density}.")
    if 0 < config.mean_span < 1:
        faults.append(f"mean_span must be at least 1, but is {config.mean_span}.")
    used = {
        "source_length": ("span-corruption", "prefix", "pairs"),
        "noise_density": ("span-corruption",),
        "mean_span": ("span-corruption",),
        "pack": ("next-token", "pairs"),
        "data_prompt": ("next-token",),
        "data_source": ("pairs",),
    }
    for name, objectives in used.items():
        value = getattr(config, name)
        if value != getattr(TrainingConfig, name) and config.objective not in objectives:
            fault = f"{name} is {value!r}, but the objective is {config.objective}, which does not use it"
            faults.append(f"{fault}; leave it out, or set objective to {' or '.join(objectives)}.")


def _check_relayouts(changes: tuple[str, ...], steps: int, faults: list[str]) -> None:
    """Add a fault for every change of layout that cannot be parsed, or that is not after the previous change."""
    last = 0
    for text in changes:
        try:
            change = parse_relayout(text)
        except ConfigError as error:
            faults.extend(error.faults)
            continue
        begins = f"relayout {text!r} is after step {change.after}, but "
        if change.after >= steps:
            faults.append(f"{begins}the run has {steps} steps; name an earlier one.")
        elif change.after <= last:
            before = f"the change before it is after step {last}" if last else "1 is the first step"
            faults.append(f"{begins}{before}; name a later one.")
        last = max(last, change.after)


def _check_profile(text: str, steps: int, faults: list[str]) -> None:
    """Add a fault if the steps to profile cannot be parsed, or are not steps of the run."""
    if not text:
        return
    try:
        _, last = parse_profile(text)
    except ConfigError as error:
        faults.extend(error.faults)
        return
    if last > steps:
        faults.append(f"profile is {text!r}, but the run has {steps} steps; name earlier ones.")


def _literals(config: Dataclass, faults: list[str]) -> None:
    """Add a fault for every Literal field whose value is not one of its literals."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        arms = (hints[field.name], *typing.get_args(hints[field.name]))
        choices = [choice for arm in arms if typing.get_origin(arm) is Literal for choice in typing.get_args(arm)]
        value = getattr(config, field.name)
        if choices and value is not None and value not in choices:
            faults.append(not_a_choice(field.name, value, choices))


def _refuse(section: str, faults: list[str]) -> None:
    if faults:
        raise ConfigError(f"cannot use the {section} settings:", faults)
