"""Parsers of flags that have a syntax of their own: a mesh, a change of layout, processes, and steps to profile."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from gspmd.annotate.errors import shown
from gspmd.annotate.parser import NAME
from gspmd.layouts.read import is_path
from gspmd.reading import WHOLE, whole_number
from gspmd.training.toml import ConfigError


@dataclass(frozen=True)
class Relayout:
    """A change of layout and mesh between two steps of a run.

    Attributes:
        after: the last step in the old layout.
        layout: the name of a preset, or the path of a layout file.
        mesh: the mesh axes and their sizes as text; if empty, the layout's own rule factors the devices.
    """

    after: int
    layout: str
    mesh: str = ""

    def beside(self, folder: Path) -> "Relayout":
        """Return the change with a relative path of a layout file resolved from `folder`."""
        return replace(self, layout=layout_beside(self.layout, folder))

    def __str__(self) -> str:
        return f"{self.after}={self.layout}" + (f":{self.mesh}" if self.mesh else "")


@dataclass(frozen=True)
class Processes:
    """The processes of a run, and the number of this process.

    Attributes:
        address: host and port of the first process.
        processes: the number of processes.
        process: the number of this process.
    """

    address: str
    processes: int
    process: int


def parse_processes(text: str) -> Processes:
    """Parse `HOST:PORT,processes=N,process=I`.

    Example:
        >>> parse_processes("node1:8476,processes=4,process=0")
        Processes(address='node1:8476', processes=4, process=0)

    Raises:
        ConfigError: the text does not have this form, the port is out of range, or the number of this process is too
            large.
    """
    address, *parts = (part.strip() for part in text.split(","))
    name, _, port = address.rpartition(":")
    given = dict(part.split("=", 1) for part in parts if "=" in part)
    numbers = all(whole_number(value) is not None for value in (port, *given.values()))
    fault = ""
    if not (name and len(parts) == 2 and {*given} == {"processes", "process"} and numbers):
        fault = f"distributed must be auto or HOST:PORT,processes=N,process=I, but is {text!r}."
    elif not 0 < int(port) < 2**16:
        fault = f"distributed has port {int(port)}; give one from 1 to 65535, in {text!r}."
    elif int(given["process"]) >= int(given["processes"]):
        most = int(given["processes"]) - 1
        fault = f"distributed has processes 0 to {most}, but this one would be process {int(given['process'])}."
    if fault:
        raise ConfigError(f"cannot read the processes {text!r}:", [fault])
    return Processes(address, int(given["processes"]), int(given["process"]))


def parse_relayout(text: str) -> Relayout:
    """Parse `STEP=LAYOUT` or `STEP=LAYOUT:MESH`.

    Example:
        >>> parse_relayout("200=zero-3:x=4,y=2")
        Relayout(after=200, layout='zero-3', mesh='x=4,y=2')
        >>> parse_relayout("200=own/table.toml").mesh
        ''

    Raises:
        ConfigError: the text does not have this form, or its mesh cannot be read.
    """
    step, equals, rest = text.partition("=")
    layout, colon, mesh = rest.rpartition(":")
    if not (colon and "=" in mesh):  # A colon may be part of a path.
        layout, mesh = rest, ""
    if not (equals and (after := whole_number(step)) is not None and layout.strip()):
        fault = f"relayout must read STEP=LAYOUT, such as 200=zero-3 or 200=zero-3:x=8, but is {text!r}."
        raise ConfigError(f"cannot read the change of layout {text!r}:", [fault])
    if mesh:
        parse_mesh(mesh)
    return Relayout(after, layout.strip(), mesh.strip())


AUTO = "auto"
"""The value of `--layout` that asks for a search for a layout.

`auto:FILE` asks for a search that fills in the lines of a file.
"""


def lines_searched(layout: str) -> str | None:
    """Return the file in the text `auto:FILE`, "" for the text `auto`, and None for the name of a layout.

    Example:
        >>> lines_searched("auto"), lines_searched("auto:mixer.toml"), lines_searched("zero-3")
        ('', 'mixer.toml', None)
    """
    name, _, file = layout.partition(":")
    return file if name == AUTO else None


def layout_beside(layout: str, folder: Path) -> str:
    """Put a folder in front of a layout file's relative path; return the name of a preset unchanged."""
    if searched := lines_searched(layout):
        return f"{AUTO}:{os.path.join(folder, searched)}"
    return os.path.join(folder, layout) if is_path(layout) else layout


def parse_mesh(text: str) -> dict[str, int]:
    """Parse mesh axes and their sizes.

    Example:
        >>> parse_mesh("x=4,y=2")
        {'x': 4, 'y': 2}

    Raises:
        ConfigError: the text is not a list of axis=size, an axis appears twice, or a size is not positive.
    """
    mesh: dict[str, int] = {}
    faults = []
    for part in text.split(","):
        axis, equals, size = (piece.strip() for piece in part.partition("="))
        number = whole_number(size.removeprefix("-"))
        if axis.isidentifier() and equals and number is None:
            faults.append(f"mesh axis {axis} has size {shown(size)}, which is not {WHOLE}.")
        elif not (axis.isidentifier() and equals):
            faults.append(f"{part.strip()!r} is not AXIS=SIZE; write x=4,y=2.")
        elif not NAME.fullmatch(axis):
            faults.append(f"mesh axes are named by a lowercase letter and then letters, digits or _, not {axis!r}.")
        elif axis in mesh:
            faults.append(f"mesh axis {axis} appears twice.")
        elif size.startswith("-") or not number:
            faults.append(f"mesh axis {axis} must have a positive size, but has {size}.")
        else:
            mesh[axis] = number
    if faults:
        raise ConfigError(f"cannot read mesh {shown(text)}:", [f"mesh {shown(text)}: {fault}" for fault in faults])
    return mesh


def parse_profile(text: str) -> tuple[int, int]:
    """Parse the first and the last step to profile.

    Example:
        >>> parse_profile("20:24")
        (20, 24)

    Raises:
        ConfigError: the text is not FROM:TO with 1 ≤ FROM ≤ TO.
    """
    first, colon, last = text.partition(":")
    begin, end = whole_number(first), whole_number(last)
    if not colon or begin is None or end is None:
        raise ConfigError("cannot profile:", [f"profile must read FROM:TO, such as 20:24, but is {text!r}."])
    if begin < 1:
        raise ConfigError("cannot profile:", [f"profile is {text!r}, but 1 is the first step."])
    if end < begin:
        raise ConfigError("cannot profile:", [f"profile is {text!r}, but step {end} comes before step {begin}."])
    return begin, end
