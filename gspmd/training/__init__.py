"""Training: configuration, data, optimizer, state, step, checkpoints, metrics, and the training loop."""

from typing import TYPE_CHECKING

from gspmd.deferred import deferred

if TYPE_CHECKING:
    from gspmd.training.checkpoints import Checkpoints
    from gspmd.training.config import ConfigError, OptimizerConfig, ShardingConfig, TrainingConfig, load_toml
    from gspmd.training.data import Corpus
    from gspmd.training.run.folder import Unwritable
    from gspmd.training.run.guard import Diverged
    from gspmd.training.run.loop import Program, fit
    from gspmd.training.run.signals import Interrupted
    from gspmd.training.state import TrainState
    from gspmd.training.step import Microbatches, Moves, jit_step, make_step, plan_moves

__all__ = [
    "Checkpoints",
    "ConfigError",
    "Corpus",
    "Diverged",
    "Interrupted",
    "Microbatches",
    "Moves",
    "OptimizerConfig",
    "Program",
    "ShardingConfig",
    "TrainState",
    "TrainingConfig",
    "Unwritable",
    "fit",
    "jit_step",
    "load_toml",
    "make_step",
    "plan_moves",
]

_HOMES = {
    ".checkpoints": "Checkpoints",
    ".config": "ConfigError OptimizerConfig ShardingConfig TrainingConfig load_toml",
    ".data": "Corpus",
    ".run.folder": "Unwritable",
    ".run.guard": "Diverged",
    ".run.loop": "Program fit",
    ".run.signals": "Interrupted",
    ".state": "TrainState",
    ".step": "Microbatches Moves jit_step make_step plan_moves",
}
__getattr__, __dir__ = deferred(__name__, _HOMES)
