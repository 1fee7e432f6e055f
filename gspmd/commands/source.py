"""Where a model that is served comes from: a public checkpoint, or a run."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from jax.sharding import Mesh

import gspmd_models as models
from gspmd.commands import automatic, train
from gspmd.layouts import Layout
from gspmd.training import ShardingConfig
from gspmd.training.checkpoints import load_parameters, load_settings, newest, newest_intact
from gspmd.training.toml import from_mapping
from gspmd_models import checkpoints
from gspmd_models.finetuning.merging import merge


@dataclass(frozen=True)
class Source:
    """Where the model comes from: a public checkpoint, or a run of ours (then with its settings)."""

    folder: Path
    config: models.ModelConfig
    tokenizer: checkpoints.Tokenizer
    run: train.Settings | None = None

    @classmethod
    def at(cls, folder: Path) -> "Source":
        """The checkpoint or run in a folder. Raises CheckpointError or ConfigError if it holds neither."""
        if newest(folder) is None:
            return cls(folder, checkpoints.model_config(folder), checkpoints.tokenizer(folder))
        run = from_mapping(train.Settings, load_settings(folder), source=str(folder / "config.json"))
        kept = folder / "tokenizer"
        return cls(
            folder,
            replace(run.model, lora=None),
            checkpoints.tokenizer(kept) if kept.is_dir() else checkpoints.byte_tokenizer(),
            run,
        )

    def layout(self, name: str | Layout, sharding: ShardingConfig) -> Layout:
        """A layout with the changes of `--set` and `--lowering`; without a name the run's own, or megatron-1d."""
        own = Layout.load("megatron-1d")
        if self.run is not None:
            found = self.run.sharding.layout == automatic.NAME
            own = Layout.load(self.folder / automatic.FILE if found else self.run.sharding.layout)
            own = own.override(self.run.sharding.overrides)
        layout = (Layout.load(name) if name else own).override(sharding.overrides)
        return layout.lowered(sharding.lowering) if sharding.lowering else layout

    def load(self, layout: Layout, mesh: Mesh, dtype: str, *, int8: bool = False) -> tuple[models.Transformer, str]:
        """The model, placed by a layout, and what loading it took."""
        if self.run is None:
            model, taken = checkpoints.load(self.folder, layout, mesh, dtype, int8=int8)
            return model, str(taken)
        like = models.abstract(self.run.model, layout, mesh, dtype, stored="float32" if int8 else dtype)
        step = newest_intact(self.folder, partial(print, file=sys.stderr), "cannot load the parameters:")
        model = merge(models.with_arrays(like, load_parameters(self.folder, step, models.arrays(like))))
        return models.quantize(model) if int8 else model, f"step {step} of the run"
