"""`gspmd export`: read the newest checkpoint of a run, and write it as a public checkpoint."""

import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gspmd.commands import runner
from gspmd.commands.export_settings import ExportSettings, parse
from gspmd.commands.source import Source
from gspmd.display import console as printing
from gspmd.display.progress import Progress
from gspmd.training import ShardingConfig
from gspmd.training.arrangement import make_mesh
from gspmd_models import checkpoints
from gspmd_models.checkpoints.config import described, expressing


def run(argv: Sequence[str], script: str = "", settings: ExportSettings | None = None) -> int:
    """Run `gspmd export`; return its exit code, which is 2 for bad input.

    Args:
        argv: the flags.
        script: if a file in scripts/ was started instead of `gspmd`, its name, for the help text.
        settings: the settings, if the flags have been parsed already.
    """
    begin = partial(main, script=script, settings=settings)
    return runner.guarded(begin, argv, called="" if script else "gspmd export")


def main(argv: Sequence[str], script: str = "", settings: ExportSettings | None = None) -> int:
    """Load the run's newest checkpoint onto one device of this machine, and write it as a public checkpoint."""
    settings = settings or parse(argv, script)
    folder = Path(settings.folder)
    source, console = Source.at(folder), printing.console(120)
    try:
        family = expressing(source.config)  # It raises its errors before anything large is read.
        here = ShardingConfig(layout="", platform="cpu", devices=1)
        layout = source.layout("", here)
        sizes = {dim: size for dim, size in source.config.sizes(batch=1, length=1).items() if dim not in "BLTG"}
        with Progress(console, "Loading the run") as progress:
            mesh = make_mesh(here, layout, sizes)
            model, taken = source.load(layout.resolved(sizes, mesh), mesh, "float32")
            progress.begin("Writing the tensors")
            length = max(longest(source), promised(folder / "tokenizer"))
            checkpoints.save(model, settings.out, tokenizer=source.tokenizer, dtype=settings.dtype, length=length)
            if (kept := folder / "tokenizer" / "generation_config.json").exists():
                shutil.copyfile(kept, Path(settings.out) / kept.name)
    except checkpoints.CheckpointError as error:
        print(f"CheckpointError: {error}", file=sys.stderr)
        return 2
    console.print(f"Wrote {taken} as {family.architecture} to {settings.out}.", soft_wrap=True, markup=False)
    return 0


def longest(source: Source) -> int:
    """Return the length, in tokens, of the longest sequences on which the run was trained.

    For a model with an encoder, this is the length of the targets or of the sources, whichever is longer.
    """
    if source.run is None:
        return 2048
    training = source.run.training
    return max(training.length, training.source_length if source.config.encoder_layers else 0)


def promised(kept: Path) -> int:
    """Return the context length, in tokens, of the checkpoint from which a run began; 0 if there was no checkpoint."""
    return described(kept).config.context_length or 0 if (kept / "config.json").exists() else 0
