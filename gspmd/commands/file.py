"""Settings files of commands that plan or compile a step: their tables, and the custom model that they name."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gspmd.commands import configs
from gspmd.commands.flags import EarlyFlags
from gspmd.training import OptimizerConfig, ShardingConfig, TrainingConfig
from gspmd.training.config import load_toml
from gspmd.training.model import finding
from gspmd.training.toml import from_mapping
from gspmd_models.config import ModelConfig
from gspmd_models.finetuning.config import LoraConfig

S = TypeVar("S")


@dataclass(frozen=True)
class File:
    """The tables of a settings file; a command reads only those fields of [training] for which it has flags."""

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    model_class: str = ""

    def beside(self, folder: Path) -> "File":
        """Return these settings, with the relative path of a custom model resolved from `folder`."""
        return replace(self, model_class=finding.beside(self.model_class, folder))


def is_own(settings: Any) -> bool:
    """Return whether settings are for a custom model."""
    return not isinstance(settings.model, ModelConfig)


def file_of(argv: Sequence[str], default: str) -> tuple[File, str]:
    """Return the tables and the name of the settings file named by flags.

    The name is empty for a custom model without a settings file.

    Args:
        argv: the flags. Only --config and --model are read here, because the file has the defaults of the other flags.
        default: the configuration to read if the flags name none.
    """
    early = EarlyFlags.of(argv)
    if early.model and not early.config:
        cls, values = finding.with_model(File, {}, early.model)
        return from_mapping(cls, values), ""
    path = configs.find(early.config or default)
    read = partial(finding.with_model, given=early.model or "", folder=Path(path).parent)
    return load_toml(File, path, read), early.config or default


def source_length_of(file: File) -> int:
    """Return `source_length` of [training], or 0 if the model has no encoder or the objective has no source."""
    has_encoder = getattr(file.model, "encoder_layers", 0) > 0
    return file.training.source_length if has_encoder and file.training.objective != "next-token" else 0


def checked_source(settings: S, default: Any) -> tuple[S, list[str]]:
    """Check `--source-length` and `--phase`, which may need an encoder; return the command's settings and the faults.

    Args:
        settings: the settings after the flags. If the model has no encoder, for example because flags removed it, the
            settings are returned with a `source_length` of 0.
        default: the settings in the file, before the flags.
    """
    given: Any = settings
    if given.source_length < 0:
        return settings, [f"source_length must not be negative, but is {given.source_length}."]
    if not is_own(given) and given.model.encoder_layers:
        return settings, []
    faults = []
    if given.source_length != default.source_length:
        faults.append("--source-length is for an encoder–decoder, and this model has no encoder.")
    if given.phase == "encode" and not is_own(given):  # A custom model with a phase is refused elsewhere.
        faults.append("--phase encode is for an encoder–decoder, and this model has no encoder.")
    return replace(given, source_length=0), faults


def group_faults(model: ModelConfig, batch: int, length: int, source_length: int) -> list[str]:
    """Return a fault if the tokens of a batch do not divide evenly into the token groups of the experts.

    The source tokens of a batch are checked in the same way, if the model has an encoder.
    """
    groups = model.moe and model.moe.groups
    lengths = {"tokens": length} | (
        {"tokens of the sources": source_length} if getattr(model, "encoder_layers", 0) else {}
    )
    return [
        f"model.moe.groups must divide the {name} of a batch, {batch} × {each} = {batch * each}, but is {groups}."
        for name, each in lengths.items()
        if groups and batch * each % groups
    ]
