"""The model of a training step: the protocol of a custom model, and the interface that steps are built from."""

from typing import TYPE_CHECKING

from gspmd.deferred import deferred

if TYPE_CHECKING:
    from gspmd.layouts.distributions import Constant, Initialiser, Normal
    from gspmd.training.model.own import Own
    from gspmd.training.model.protocol import Decoder, Kept, Model, Parameter, mean, next_tokens
    from gspmd.training.model.trainable import Row, Trainable

__all__ = [
    "Constant",
    "Decoder",
    "Initialiser",
    "Kept",
    "Model",
    "Normal",
    "Own",
    "Parameter",
    "Row",
    "Trainable",
    "mean",
    "next_tokens",
]

_HOMES = {
    "gspmd.layouts.distributions": "Constant Initialiser Normal",
    ".own": "Own",
    ".protocol": "Decoder Kept Model Parameter mean next_tokens",
    ".trainable": "Row Trainable",
}
__getattr__, __dir__ = deferred(__name__, _HOMES)
