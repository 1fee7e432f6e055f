"""The settings of a run, saved in its folder with a checksum, so that naming the folder is enough to resume it."""

import hashlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspmd.reading import MissingError, ReadError, read_json
from gspmd.training.checkpoints.saved import newest
from gspmd.training.disk import write_whole
from gspmd.training.toml import ConfigError, Dataclass, beside, to_mapping

_CHECKSUM = "checksum"


def kept_settings(settings: Dataclass) -> dict[str, Any]:
    """Return the settings that a resumed run needs, with absolute paths.

    Settings that apply only to one start of the run, such as `resume`, are left out.
    """
    kept = to_mapping(beside(settings, Path.cwd()))
    kept.pop("config", None)
    if name := kept.pop("model_class", ""):
        kept["model"] = {"class": name, **kept["model"]}
    for name in ("resume", "resume_step", "profile"):
        kept.get("training", {}).pop(name, None)
    return kept


def save_settings(out: str | Path, settings: Mapping[str, Any]) -> None:
    """Write the run's settings to `<out>/config.json`, so that the run can be resumed by naming its folder."""
    kept = {_CHECKSUM: _checksum(settings), **settings}
    write_whole(Path(out) / "config.json", json.dumps(kept, indent=2) + "\n")


def load_settings(out: str | Path, doing: str = "cannot resume:") -> dict[str, Any]:
    """Return the settings of a run.

    Args:
        out: the run's folder.
        doing: the first words of the error message, which say what needs the settings.

    Raises:
        ConfigError: the folder holds no run, or its settings were changed after the run wrote them.
    """
    again = f"gspmd train --resume --out {shlex.quote(str(out))} --config ..."
    remedy = f"To write the file again, resume the run with the config and flags that it was started with: {again}"
    if newest(out) is None:  # Nothing can be resumed.
        remedy = "Name another folder."
    path = Path(out) / "config.json"
    try:
        settings = read_json(path)
    except MissingError:
        fault = f"{str(out)!r} holds no run: there is no {str(path)!r}."
        raise ConfigError(doing, [fault, remedy]) from None
    except ReadError as error:
        raise ConfigError(doing, [f"{str(path)!r} cannot be read: {error}.", remedy]) from None
    if not isinstance(settings, dict):
        raise ConfigError(doing, [f"{str(path)!r} holds no settings.", remedy])
    checksum = settings.pop(_CHECKSUM, None)  # runs of earlier versions have none
    if checksum is not None and checksum != _checksum(settings):
        fault = f"{str(path)!r} is damaged: it does not have the settings that the run wrote."
        raise ConfigError(doing, [fault, remedy])
    return settings


def has_settings(folder: str | Path) -> bool:
    """Return whether a folder's config.json belongs to a run, and not to a public checkpoint or another program."""
    try:
        settings = read_json(Path(folder) / "config.json")
    except ReadError:
        return False
    return isinstance(settings, dict) and isinstance(settings.get("training"), dict)


def _checksum(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
