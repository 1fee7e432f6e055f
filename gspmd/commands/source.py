"""The origin of a model that generates text: a public checkpoint, or a trained run."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

import gspmd_models as models
from gspmd.commands import automatic, own
from gspmd.commands.settings import RunSettings
from gspmd.layouts import Layout
from gspmd.training import ShardingConfig
from gspmd.training.checkpoints import checksums, has_settings, load_parameters, load_settings, newest, newest_intact
from gspmd.training.model.finding import with_model
from gspmd.training.syntax import lines_searched
from gspmd.training.toml import ConfigError, from_mapping
from gspmd_models import checkpoints
from gspmd_models.finetuning.merging import merge


@dataclass(frozen=True)
class Source:
    """A folder with a model: a public checkpoint, or a trained run with its settings."""

    folder: Path
    config: models.ModelConfig
    tokenizer: checkpoints.Tokenizer
    run: RunSettings | None = None

    @classmethod
    def at(cls, folder: Path) -> "Source":
        """Read the checkpoint or run in a folder; raise CheckpointError or ConfigError if it contains neither."""
        if newest(folder) is None:
            if has_settings(folder):
                remedy = "Name another run, or begin it again: it saves one every --save-every steps, and at its end."
                raise ConfigError(f"cannot use the run in {str(folder)!r}:", ["it has no checkpoint.", remedy])
            return cls(folder, checkpoints.model_config(folder), checkpoints.tokenizer(folder))
        doing = f"cannot use the run in {str(folder)!r}:"
        kept_settings = load_settings(folder, doing)
        own.refuse_named(kept_settings, doing)
        run = from_mapping(RunSettings, kept_settings, source=str(folder / "config.json"))
        return cls(folder, replace(run.model, lora=None), tokenizer_of(folder, run.model), run)

    def layout(self, name: str | Layout, sharding: ShardingConfig) -> Layout:
        """Return a layout with the changes of `--set` and `--lowering`.

        If `name` is empty, this is the run's own layout, or megatron-1d for a public checkpoint.
        """
        return layout_of(self.folder, self.run, name, sharding)

    def load(self, layout: Layout, mesh: Mesh, dtype: str, *, int8: bool = False) -> tuple[models.Transformer, str]:
        """Return the model, sharded by a layout, and a description of what was loaded."""
        if self.run is None:
            model, taken = checkpoints.load(self.folder, layout, mesh, dtype, int8=int8)
            return model, str(taken)
        like = models.abstract(self.run.model, layout, mesh, dtype, stored="float32" if int8 else dtype)
        step = newest_intact(self.folder, partial(print, file=sys.stderr), "cannot load the parameters:")
        model = merge(models.with_arrays(like, load_parameters(self.folder, step, models.arrays(like))))
        return models.quantize(model) if int8 else model, f"step {step} of the run"


def bytes_of(model: Any) -> checkpoints.Tokenizer:
    """Return the tokenizer of a model of bytes; for an encoder–decoder, it also has an end token and sentinels."""
    has_encoder = getattr(model, "encoder_layers", 0) > 0  # a custom model has other settings
    return checkpoints.byte_tokenizer(model.vocabulary if has_encoder else 256)


def tokenizer_of(folder: Path, model: Any = None) -> checkpoints.Tokenizer:
    """Return the tokenizer stored with a run, or else the tokenizer of bytes (`bytes_of`).

    Raises:
        ConfigError: the stored tokenizer is damaged.
    """
    kept = folder / "tokenizer"
    if (kept / checksums.FILE).exists() and (fault := checksums.fault_of(kept)):  # Earlier versions wrote none.
        remedy = "Resume the run, which writes it again."
        raise ConfigError("cannot read the tokenizer of the run:", [f"{str(kept)!r} is damaged: {fault}.", remedy])
    return checkpoints.tokenizer(kept) if kept.is_dir() else bytes_of(model)


def layout_of(folder: Path, run: RunSettings | None, name: str | Layout, sharding: ShardingConfig) -> Layout:
    """Return a layout with the changes of `--set` and `--lowering`.

    If `name` is empty, this is the run's own layout, or megatron-1d if `run` is None.
    """
    own = Layout.load("megatron-1d")
    if run is not None and not name:
        found = lines_searched(run.sharding.layout) is not None
        own = Layout.load(folder / automatic.FILE if found else run.sharding.layout).override(run.sharding.overrides)
    layout = (Layout.load(name) if name else own).override(sharding.overrides)
    return layout.lowered(sharding.lowering) if sharding.lowering else layout


def own_run(folder: Path) -> RunSettings | None:
    """Return the settings of a run with a custom model, or None for any other folder.

    Raises:
        ConfigError: the class of the model is no longer found, or has changed.
    """
    if newest(folder) is None:
        return None
    kept_settings = load_settings(folder, f"cannot use the run in {str(folder)!r}:")
    typed, values = with_model(RunSettings, kept_settings, folder=folder)
    return None if typed is RunSettings else from_mapping(typed, values, source=str(folder / "config.json"))
