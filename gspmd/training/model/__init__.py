"""The model of a training step: the protocol of a custom model, and the interface that steps are built from."""

from gspmd.layouts.initial import Constant, Initialiser, Normal
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
