"""The settings file of a command that plans or compiles a step: its tables, and the user's own model that it names."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from gspmd.commands import configs
from gspmd.commands.flags import EarlyFlags
from gspmd.training import OptimizerConfig, ShardingConfig, TrainingConfig
from gspmd.training.config import load_toml
from gspmd.training.model import finding
from gspmd.training.toml import from_mapping
from gspmd_models import ModelConfig
from gspmd_models.finetuning.config import LoraConfig


@dataclass(frozen=True)
class File:
    """The tables that a settings file may have; from [training], a command reads the fields for which it has flags."""

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    model_class: str = ""

    def beside(self, folder: Path) -> "File":
        """Return these settings, with a relative path of a user's own model taken from `folder`."""
        return replace(self, model_class=finding.beside(self.model_class, folder))


def file_of(argv: Sequence[str], default: str) -> tuple[File, str]:
    """Return the tables of the settings file that flags name, and its name: none for a user's own model without one.

    Args:
        argv: the flags; --config and --model are read here, since the other defaults come from the file.
        default: the config of a command without flags.
    """
    early = EarlyFlags.of(argv)
    if early.model and not early.config:
        cls, values = finding.with_model(File, {}, early.model)
        return from_mapping(cls, values), ""
    path = configs.find(early.config or default)
    read = partial(finding.with_model, given=early.model or "", folder=Path(path).parent)
    return load_toml(File, path, read), early.config or default


def group_faults(model: ModelConfig, batch: int, length: int) -> list[str]:
    """Return the faults of the groups of a model's experts for batches of these sizes."""
    groups, tokens = model.moe and model.moe.groups, batch * length
    if not groups or tokens % groups == 0:
        return []
    product = f"{batch} × {length} = {tokens}"
    return [f"model.moe.groups must divide the tokens of a batch, {product}, but is {groups}."]
