"""Pictures that record how they were made: a PNG contains the version, the title, the numbers and the command."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from gspmd.writing import replace_file


def save(figure: Any, path: str | Path, title: str, figures: str, command: str = "") -> None:
    """Write a matplotlib figure to a file, in the format of the file's suffix; a PNG also contains the texts below.

    The texts are PNG text chunks with the keywords of the PNG standard (section 11.3.3): Title for `title`, Description
    for `figures`, Source for `command`, and Software for this version of gspmd.

    Args:
        figure: the picture, a `matplotlib.figure.Figure`.
        path: the file to write.
        title: the heading of the picture.
        figures: the numbers that the picture is about, with their units.
        command: the command line that drew the picture; empty if there is none.

    Raises:
        OSError: the file cannot be written.
        ValueError: no file can have this name, or matplotlib does not write this format.
    """
    texts = {"Software": f"gspmd {version('gspmd')}", "Title": title, "Description": figures, "Source": command}
    carried = {name: text for name, text in texts.items() if text}
    path = Path(path)
    if not path.suffix and not path.exists():  # Matplotlib adds this suffix too.
        path = path.with_name(f"{path.name}.png")
    kind = path.suffix[1:].lower() or "png"
    kept = carried if kind == "png" else None
    # With its format given, matplotlib adds no ending to the name of the temporary file.
    replace_file(path, lambda file: figure.savefig(file, format=kind, metadata=kept))
