"""Flags with a syntax of their own: a mesh, and a change of layout."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from gspmd.layouts.read import is_path
from gspmd.training.toml import ConfigError


@dataclass(frozen=True)
class Relayout:
    """A change of layout and mesh between two steps.

    Attributes:
        after: the last step in the layout before.
        layout: a preset's name, or the path of a layout file.
        mesh: mesh axes and sizes as text; empty if the layout's rule factors the devices.
    """

    after: int
    layout: str
    mesh: str = ""

    def beside(self, folder: Path) -> "Relayout":
        """Return the same change with a relative path of a layout file taken from `folder`."""
        return replace(self, layout=layout_beside(self.layout, folder))

    def __str__(self) -> str:
        return f"{self.after}={self.layout}" + (f":{self.mesh}" if self.mesh else "")


def parse_relayout(text: str) -> Relayout:
    """Parse `STEP=LAYOUT` or `STEP=LAYOUT:MESH`.

    Example:
        >>> parse_relayout("200=zero-3:x=4,y=2")
        Relayout(after=200, layout='zero-3', mesh='x=4,y=2')
        >>> parse_relayout("200=own/table.toml").mesh
        ''

    Raises:
        ConfigError: the text has another form, or its mesh cannot be read.
    """
    step, equals, rest = text.partition("=")
    layout, colon, mesh = rest.rpartition(":")
    if not (colon and "=" in mesh):  # a colon may be part of a path
        layout, mesh = rest, ""
    if not (equals and step.strip().isdecimal() and layout.strip()):
        fault = f"relayout must read STEP=LAYOUT, such as 200=zero-3 or 200=zero-3:x=8, but is {text!r}."
        raise ConfigError(f"cannot read the change of layout {text!r}:", [fault])
    if mesh:
        parse_mesh(mesh)
    return Relayout(int(step), layout.strip(), mesh.strip())


def layout_beside(layout: str, folder: Path) -> str:
    """Take the relative path of a layout file from a folder; the name of a preset is left as it is."""
    return os.path.join(folder, layout) if is_path(layout) else layout


def parse_mesh(text: str) -> dict[str, int]:
    """Parse mesh axes and sizes.

    Example:
        >>> parse_mesh("x=4,y=2")
        {'x': 4, 'y': 2}

    Raises:
        ConfigError: the text is not a list of axis=size, an axis comes twice, or a size is not positive.
    """
    mesh: dict[str, int] = {}
    faults = []
    for part in text.split(","):
        axis, equals, size = (piece.strip() for piece in part.partition("="))
        if not (axis.isidentifier() and equals and size.removeprefix("-").isdecimal()):
            faults.append(f"{part.strip()!r} is not AXIS=SIZE; write x=4,y=2.")
        elif axis in mesh:
            faults.append(f"mesh axis {axis} comes twice.")
        elif int(size) < 1:
            faults.append(f"mesh axis {axis} must have a positive size, but has {size}.")
        else:
            mesh[axis] = int(size)
    if faults:
        raise ConfigError(f"cannot read mesh {text!r}:", [f"mesh {text!r}: {fault}" for fault in faults])
    return mesh
