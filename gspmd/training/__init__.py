"""Training: configuration, data, optimizer, state, step, checkpoints, metrics, and the training loop."""

from gspmd.training.checkpoints import Checkpoints
from gspmd.training.config import ConfigError, OptimizerConfig, ShardingConfig, TrainingConfig, load_toml
from gspmd.training.data import Corpus
from gspmd.training.run.guard import Diverged
from gspmd.training.run.loop import Program, Unwritable, fit
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
