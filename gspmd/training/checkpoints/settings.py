"""The settings of a run, kept beside its checkpoints for a resume by folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspmd.training.toml import ConfigError


def save_settings(out: str | Path, settings: Mapping[str, Any]) -> None:
    """Write the run's settings to `<out>/config.json`, for a resume by folder."""
    path = Path(out) / "config.json"
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def load_settings(out: str | Path) -> dict[str, Any]:
    """Return the settings of a run.

    Raises:
        ConfigError: the folder holds no run.
    """
    path = Path(out) / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("cannot resume:", [f"{str(out)!r} holds no run: there is no {str(path)!r}."]) from None
    except (OSError, ValueError) as error:
        fault = f"{str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}."
        raise ConfigError("cannot resume:", [fault, "Give the run's settings again with --config and flags."]) from None
    if not isinstance(settings, dict):
        raise ConfigError("cannot resume:", [f"{str(path)!r} holds no settings."])
    return settings
