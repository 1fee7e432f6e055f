"""Logging of a run's metrics to Weights & Biases, for `--log wandb`; needs the package wandb."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from gspmd.training.toml import ConfigError


def check_installed() -> None:
    """Raise ConfigError if there is no package wandb."""
    if find_spec("wandb") is None:
        raise ConfigError(
            "cannot log to Weights & Biases:", ["wandb is not installed. pip install wandb, or leave --log out."]
        )


class WeightsAndBiases:
    """A log at Weights & Biases of the metrics, texts and pictures that `Events` records.

    Each start of a run is a run at Weights & Biases, in a group named after `out`.

    Args:
        out: the run's folder.
        settings: the settings of the run.
    """

    def __init__(self, out: str | Path, settings: Mapping[str, Any]):
        self._wandb = import_module("wandb")
        name = Path(out).resolve().name
        self._run = self._wandb.init(project="gspmd", name=name, group=name, dir=str(out), config=dict(settings))

    def add(self, step: int, name: str, value: np.ndarray) -> None:
        """Log a metric of a step: a scalar, [layers], or [layers, X], a histogram with bucket i for expert i."""
        if value.ndim == 0:
            figures: dict[str, Any] = {name: value.item()}
        elif value.ndim == 1:
            figures = {f"{name}/layer_{layer}": each.item() for layer, each in enumerate(value, 1)}
        else:
            edges = np.arange(value.shape[1] + 1) - 0.5
            histograms = [self._wandb.Histogram(np_histogram=(each, edges)) for each in value]
            figures = {f"{name}/layer_{layer}": each for layer, each in enumerate(histograms, 1)}
        self._run.log(figures, step=step)

    def text(self, step: int, name: str, markdown: str) -> None:
        """Log a text."""
        table = self._wandb.Table(columns=["step", "text"], data=[[step, markdown]])
        self._run.log({name: table}, step=step)

    def picture(self, step: int, name: str, png: Path) -> None:
        """Log a picture."""
        self._run.log({name: self._wandb.Image(str(png))}, step=step)

    def close(self) -> None:
        """Wait until everything has been sent."""
        self._run.finish()
