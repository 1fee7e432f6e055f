"""Write a trained run as a public checkpoint, which transformers and `gspmd generate` read.

    gspmd export runs/001 exported
    gspmd export runs/001 exported --dtype bfloat16

OUT is a new folder with config.json, model.safetensors and tokenizer.json.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gspmd.commands import configs, flags
from gspmd.commands.described import AnyText
from gspmd.reading import new_folder_fault
from gspmd.training.checkpoints import newest
from gspmd.training.toml import ConfigError

_DOING = "cannot export:"


@dataclass(frozen=True)
class ExportSettings:
    """The run to export, and the folder and the format of the checkpoint."""

    folder: Annotated[AnyText, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ""
    """Folder of a run of `gspmd train`; its newest checkpoint is exported."""
    out: Annotated[AnyText, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")] = ""
    """New folder."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Dtype of the tensors in the file."""


def parse(argv: Sequence[str], script: str = "") -> ExportSettings:
    """Parse the flags.

    Args:
        argv: the flags.
        script: the name of the file in scripts/ that runs the command, for the help.

    Raises:
        ConfigError: a folder is missing, or has no run, or cannot be written.
    """
    prog, description = configs.called(__doc__, "gspmd export", script)
    settings = flags.parse_flags(ExportSettings, argv, ExportSettings(), description, prog)
    if not (settings.folder and settings.out):
        raise ConfigError(
            _DOING, ["give the folder of a run, and a new folder for the export: gspmd export runs/001 exported."]
        )
    if newest(settings.folder) is None:
        fault = f"there is no checkpoint of a run under {settings.folder!r}; name the folder of a run."
        raise ConfigError(_DOING, [fault])
    out = Path(settings.out)
    fault = new_folder_fault(out)
    if not fault and os.path.lexists(out):
        try:
            fault = "it exists" if any(out.iterdir()) else ""
        except OSError as error:
            fault = error.strerror
    if fault:
        raise ConfigError(f"cannot export to {settings.out!r}:", [f"{fault}; give a new folder."])
    return settings
