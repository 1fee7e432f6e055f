"""The shipped configurations, and the description of a command in its help."""

import os
import re
import textwrap
from pathlib import Path

from gspmd.annotate.errors import suggestion
from gspmd.training.toml import ConfigError, similar_config

_PACKAGE = Path(__file__).resolve().parents[1]

#: gspmd/configs in an installed wheel, configs/ in a checkout.
FOLDER = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"


def find(name: str) -> str:
    """Return the path of a configuration's file, given either this path or the name of a shipped configuration.

    If `name` is the path of a file and also the name of a shipped configuration, the file takes precedence.

    Raises:
        ConfigError: `name` is not a path, and no shipped configuration has this name; or `name` is a path (it has a
            slash or ends in `.toml`) where no file exists, and it resembles the name of a shipped configuration.

    Example:
        >>> Path(find("tiny")).name, find("mine/steps.toml")
        ('tiny.toml', 'mine/steps.toml')
    """
    if os.path.exists(name):
        return name
    doing, shipped = f"cannot read config {name!r}:", sorted(path.stem for path in FOLDER.glob("*.toml"))
    near = suggestion(os.path.basename(name).removesuffix(".toml"), shipped)
    if "/" in name or name.endswith(".toml"):
        if near and _is_missing(name):
            remedy = similar_config(Path(name)) or near.replace("? ", ", which comes with gspmd?")
            raise ConfigError(doing, [f"there is no such file. {remedy}"])
        return name  # Its reader says why it cannot be read.
    if name not in shipped:
        known = f"{near}Give one of {', '.join(shipped)}, or the path of a TOML file."
        raise ConfigError(doing, ["there is no such file, and no config of this name comes with gspmd.", known])
    return str(FOLDER / f"{name}.toml")


def _is_missing(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):  # Such as a name that is too long.
        return False
    return False


def called(documentation: str, command: str, script: str) -> tuple[str | None, str]:
    """Return the program name and the description that `--help` shows, for a command or for the script that runs it.

    Args:
        documentation: the description, with example command lines that begin with `command`.
        command: the command, such as "gspmd train".
        script: the name of the file in scripts/ that was started; empty if the command itself was.

    Returns:
        The program name (None means the script's own name), and the description, in which the example command lines
        call the script.
    """
    if not script:
        return command, documentation
    description = documentation.replace(command, f"python scripts/{script}")
    return None, re.sub(r"--config (\S+)", r"--config configs/\1.toml", description)


def fitted(description: str, width: int) -> str:
    """Wrap the description of a command, with its example command lines and their comments, to a width.

    >>> print(fitted("Train.\\n\\n    gspmd train --steps 9  # for a while\\n\\nFigures go to --out.", 30))
    Train.
    <BLANKLINE>
        # for a while
        gspmd train --steps 9
    <BLANKLINE>
    Figures go to --out.
    """
    parts = []
    for paragraph in description.split("\n\n"):
        if not paragraph.startswith("    "):
            parts.append(textwrap.fill(" ".join(paragraph.split()), width))
            continue
        lines = paragraph.splitlines()
        if max(map(len, lines)) > width:  # Comments above their commands.
            pairs = [line.partition("  # ") for line in lines]
            comments = [
                textwrap.fill(text, width, initial_indent="    # ", subsequent_indent="    # ") for *_, text in pairs
            ]
            commands = [_continued(line.rstrip(), width) for line, *_ in pairs]
            lines = [line for both in zip(comments, commands) for line in both if line]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _continued(command: str, width: int) -> str:
    """Break a command line into lines of at most `width` characters, joined by backslashes."""
    words = re.split(r" (?=--)", command)  # A flag stays with its value.
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"        {word}")
    return " \\\n".join(lines)
