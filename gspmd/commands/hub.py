"""Checkpoints already downloaded by huggingface_hub, found by their names on huggingface.co; nothing is downloaded.

Source: *Understand caching* of huggingface_hub's documentation: `models--ORG--NAME` has `refs/`, whose files name a
revision, and `snapshots/`, with a folder for each revision.
"""

import os
import re
from pathlib import Path

from gspmd.training.toml import ConfigError

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def cache() -> Path:
    """Return the folder of huggingface_hub's downloads, as its environment variables say."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home, "hub").expanduser()


def found(checkpoint: str) -> str:
    """Return the folder of a checkpoint: an existing folder, or the downloaded copy of a model named ORG/NAME.

    Raises:
        ConfigError: the text has the form ORG/NAME, but no copy has been downloaded; the message has the command that
            downloads one.
    """
    if not _NAME.fullmatch(checkpoint) or os.path.exists(checkpoint):
        return checkpoint
    kept = cache() / f"models--{checkpoint.replace('/', '--')}"
    try:
        revision = (kept / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        revision = ""
    if revision and (folder := kept / "snapshots" / revision).is_dir():
        return str(folder)
    fault = f"there is no folder {checkpoint!r}, and no model of that name in {str(cache())!r}."
    remedy = f"Name another folder; or download the model: hf download {checkpoint}"
    raise ConfigError(f"cannot read the checkpoint {checkpoint!r}:", [fault, remedy])


def beside(checkpoint: str, folder: Path) -> str:
    """Return the checkpoint that a file names; a relative path is resolved from `folder`, the file's folder.

    >>> beside("org/model", Path("mine")), beside("../there", Path("mine"))
    ('org/model', 'mine/../there')
    """
    path = os.path.join(folder, checkpoint)
    return checkpoint if not checkpoint or (_NAME.fullmatch(checkpoint) and not os.path.exists(path)) else path
