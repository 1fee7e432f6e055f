"""Train a language model on text, with every tensor sharded by a layout.

    gspmd train                                        # five minutes on two cores
    gspmd train --layout zero-3 --set ffn.w_in=E_xF_y  # the same losses
    gspmd train --resume --out runs/001                # --resume 300: from there
    gspmd train --explain                              # what its step will send
    gspmd train --from DIR --data 'text/*.jsonl'       # from a public checkpoint
    gspmd train --model mixer:Mixer --layout own.toml  # a model of yours

Figures, events, checkpoints and pictures go to --out.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

import gspmd
import gspmd_models as models
from gspmd.commands import configs, flags, hub
from gspmd.commands.flags import EarlyFlags
from gspmd.training import ConfigError, OptimizerConfig, ShardingConfig, TrainingConfig, processes
from gspmd.training.checkpoints import load_settings
from gspmd.training.model import finding
from gspmd.training.run.folder import newest_run
from gspmd.training.syntax import lines_searched, parse_relayout
from gspmd.training.toml import to_mapping
from gspmd_models.config import ModelConfig
from gspmd_models.finetuning.config import LoraConfig

COMMON = (
    "config", "explain", "checkpoint", "model_class", "steps", "batch", "length", "data", "out", "resume",
    "learning_rate", "layout", "devices",
)  # fmt: skip
"""The settings whose flags --help shows."""


@dataclass(frozen=True)
class RunSettings:
    """All settings of a run, from its file and its flags."""

    config: str = ""
    """TOML file with tables [model], [training], [optimizer] and [sharding]; configs/default.toml if not given, or
    configs/finetune.toml with --from."""
    explain: bool = False
    """Compile the training step, print the bytes that it sends next to the planned bytes, and stop."""
    details: bool = False
    """With --explain, give every step that sends, and every step that the compiler changed, its own row; by default,
    equal steps of one equation share a row, and so do steps that the compiler combined."""
    compile_cache: bool = True
    """Whether to keep compiled programs on disk for the next start."""
    checkpoint: Annotated[str, tyro.conf.arg(name="from")] = ""
    """Folder of a public checkpoint, or the name of one that huggingface_hub has downloaded (ORG/NAME). The run begins
    with the checkpoint's model, weights and tokenizer; of [model], only remat and offload are used."""
    model_class: Annotated[str, tyro.conf.arg(name="model", metavar="MODULE:NAME")] = ""
    """A custom model, such as mixer:Mixer for the class Mixer of mixer.py. Its fields become the flags of [model]; a
    TOML file names it as class in [model]. See https://github.com/gspmd/gspmd/tree/main/docs/your-model.md."""
    model: ModelConfig = field(default_factory=ModelConfig)
    training: tyro.conf.OmitArgPrefixes[TrainingConfig] = field(default_factory=TrainingConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: tyro.conf.OmitArgPrefixes[OptimizerConfig] = field(default_factory=OptimizerConfig)
    sharding: tyro.conf.OmitArgPrefixes[ShardingConfig] = field(default_factory=ShardingConfig)

    def beside(self, folder: Path) -> "RunSettings":
        """Return these settings with relative paths resolved from `folder`, which contains the settings file."""
        return replace(
            self, checkpoint=hub.beside(self.checkpoint, folder), model_class=finding.beside(self.model_class, folder)
        )


def parse(argv: Sequence[str], script: str = "") -> RunSettings:
    """Return the settings from flags, and from the settings file or run that the flags name.

    Args:
        argv: the flags.
        script: the name of the file in scripts/ that runs the command, for the help.
    """
    prog, description = configs.called(__doc__, "gspmd train", script)
    # A checkpoint needs a smaller learning rate than random weights.
    default = "default" if EarlyFlags.of(argv).checkpoint is None else "finetune"
    # This comes before the flags are read, because the other processes wait for this one, and are told of its faults.
    processes.expect(flags.distributed(argv))
    return flags.parse(
        RunSettings, argv, default=default, find=configs.find, prog=prog, description=description, common=COMMON
    )


def of_checkpoint(settings: RunSettings, argv: Sequence[str]) -> RunSettings:
    """Return the settings with the model and tokenizer of the public checkpoint with which the run begins.

    The run may have begun earlier. If it is resumed from its folder, its settings already have the model and the
    tokenizer. If it is resumed with the flags that began it, `--from` must name the same checkpoint.

    Raises:
        ConfigError: flags describe the model, although the checkpoint determines it; or the resumed run did not begin
            with this checkpoint, but with another one or with random weights.
        CheckpointError: the checkpoint cannot be read.
    """
    resumed = settings.training.resume
    if not settings.checkpoint:
        return settings
    settings = replace(settings, checkpoint=hub.found(settings.checkpoint))
    if resumed and (fault := _another_beginning(settings)):
        raise ConfigError("cannot resume:", [fault])
    if resumed and EarlyFlags.of(argv).config is None:
        return settings
    named = {flag.split("=")[0].replace("_", "-") for flag in argv}
    free = ("--model.remat", "--model.offload", "--model.no-offload")
    fixed = sorted(flag for flag in named if flag.startswith("--model.") and flag not in free)
    if fixed:
        fault = f"the checkpoint {settings.checkpoint!r} already gives the model; leave out {', '.join(fixed)}."
        raise ConfigError("cannot begin with this checkpoint:", [fault])
    from gspmd_models import checkpoints  # This imports JAX, without which flags are read.

    given = settings.model
    model = replace(checkpoints.model_config(settings.checkpoint), remat=given.remat, offload=given.offload)
    if model.context_length is not None:  # A model trained on longer sequences can write longer ones.
        model = replace(model, context_length=max(model.context_length, settings.training.length))
    training = replace(settings.training, tokenizer=settings.training.tokenizer or settings.checkpoint)
    return replace(settings, model=model, training=training)


def _another_beginning(settings: RunSettings) -> str:
    """Return a fault if the resumed run surely did not begin with the checkpoint of `--from`, and otherwise ""."""
    out = Path(settings.training.out) if settings.training.out else newest_run()
    try:
        begun = str(load_settings(out).get("checkpoint") or "")
    except ConfigError:  # The remedy for a lost config.json is to give all settings again, as here.
        return ""
    if begun and os.path.realpath(begun) == os.path.realpath(settings.checkpoint):
        return ""
    kept = f"with the checkpoint {begun!r}" if begun else "with random weights"
    remedy = "Leave --from out, or begin a new run in a different --out."
    return f"the run in {str(out)!r} began {kept}, not with {settings.checkpoint!r}. {remedy}"


def adapted(settings: RunSettings) -> RunSettings:
    """Return the settings with the adapters of [lora] as part of the model; a resumed model may already have them."""
    lora = settings.lora if settings.lora.rank else None
    if settings.model.lora not in (None, lora) and not settings.training.resume:
        fault = "adapters have their own table: write [lora] in place of [model.lora]."
        raise ConfigError("cannot train this model:", [fault])
    return replace(settings, model=replace(settings.model, lora=lora))


def facts_of(settings: RunSettings) -> dict[str, Any]:
    """Return the settings on which the processes of a run must agree before they start their devices, by name."""
    from gspmd.commands.own import module_of  # This imports JAX, without which flags are read.

    facts = to_mapping(settings)
    del facts["config"], facts["sharding"]["distributed"]  # A path and a process number, which may differ.
    named = {"layout": settings.sharding.layout}
    named |= {
        f"layout after {change.after}": change.layout for change in map(parse_relayout, settings.training.relayout)
    }
    # A file of the same name may have other lines on another machine.
    files = {at: name if (lines := lines_searched(name)) is None else lines for at, name in named.items()}
    layouts = {at: gspmd.Layout.load(file) for at, file in files.items() if file}
    tables = {at: {each.name: getattr(layout, each.name) for each in fields(layout)} for at, layout in layouts.items()}
    lines = {at: parts.pop("table") | parts for at, parts in tables.items()}
    return facts | lines | processes.environment(models, *module_of(settings))
