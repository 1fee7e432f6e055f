"""Read requests: JSON objects of strings within limits, and sizes written as on the command line."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from gspmd.annotate.errors import Fault, SpecError, listed, report, shown, suggestion
from gspmd.annotate.parser import NAME
from gspmd.page import limits
from gspmd.reading import WHOLE, ReadError, parse_json, whole_number


class BadRequest(ValueError):
    """The error for a request that is malformed or exceeds the limits; the page itself never sends such a request."""


def read_object(body: bytes) -> dict[str, Any]:
    """Read the JSON object of a request.

    Raises:
        BadRequest: the body is not UTF-8, not JSON, or not an object.
    """
    try:
        value = parse_json(body.decode())
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8 text: byte {error.start} is 0x{body[error.start]:02x}.") from None
    except ReadError as error:
        raise BadRequest(f"cannot read the body: {error}.") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body is {shown(value)}, not a JSON object.")
    return value


@dataclass(frozen=True)
class Texts:
    """A request whose fields are strings; each field has a limit, and may be left out."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Read the fields from the object of a request.

        Raises:
            BadRequest: a field is unknown, is not a string, or is too long.
        """
        known = [each.name for each in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise BadRequest(
                    f"there is no field {shown(name)}. {suggestion(name, known)}The fields are {listed(known)}."
                )
            if not isinstance(value, str):
                raise BadRequest(f"field {name} is {shown(value)}, not a string.")
            if len(value) > cls.longest(name):
                raise BadRequest(
                    f"field {name} has {len(value):,} characters; it may have at most {cls.longest(name):,}."
                )
        return cls(**given)

    @classmethod
    def longest(cls, name: str) -> int:
        """Return the largest number of characters that a field may have."""
        return limits.TEXT


@dataclass(frozen=True)
class EquationRequest(Texts):
    """The fields of a request to plan an equation; each has the form that `gspmd explain` accepts."""

    equation: str = ""
    sizes: str = ""
    mesh: str = ""
    chip: str = "tpu-v4"
    dtype: str = "bfloat16"
    lowering: str = "auto"
    via: str = ""


_PAIR = re.compile(r"[^,]+")
_DIMENSION = re.compile("[A-Z]")


def read_dimensions(text: str) -> dict[str, int]:
    """Read the sizes of dimensions: `B=512,L=1`.

    Raises:
        SpecError: a pair is not a capital letter and a positive whole number, or an earlier pair has the same letter.
            The message lists every such pair.
    """
    return _numbers(text, "dimensions", _DIMENSION, "a dimension is one capital letter", "B=512")


def _numbers(text: str, what: str, names: re.Pattern, rule: str, example: str) -> dict[str, int]:
    """Read names and sizes from text that a user typed; the text may end in a comma.

    Args:
        text: the text.
        what: the name, in error messages, of the thing that has these sizes.
        names: the pattern of the allowed names; `rule` describes this pattern in words.
        example: an example of a pair, for the error message.
    """
    found: dict[str, int] = {}
    faults = []
    for pair in _PAIR.finditer(text):
        name, equals, size = pair[0].partition("=")
        number = whole_number(size)
        start = pair.start() + len(pair[0]) - len(pair[0].lstrip())
        end = max(start + 1, pair.end() - len(pair[0]) + len(pair[0].rstrip()))
        if not pair[0].strip():  # The next pair is yet to be typed.
            continue
        remedy = f"Write a name and a size, such as {example}."
        if not (name.strip() and equals):
            fact = f"{shown(pair[0].strip())} is not a name and a size."
            faults.append(Fault(text, start, end, fact, remedy))
        elif not names.fullmatch(name.strip()):
            faults.append(Fault(text, start, end, f"{rule}, not {shown(name.strip())}.", remedy))
        elif not number:
            fact = f"{shown(size.strip())} is not {WHOLE.replace('a whole', 'a positive whole')}."
            faults.append(Fault(text, start, end, fact, remedy))
        elif name.strip() in found:
            faults.append(Fault(text, start, end, f"{name.strip()} has a size already.", "Give each one once."))
        else:
            found[name.strip()] = number
    if faults:
        raise report(SpecError, f"cannot read the sizes of {what}", faults)
    return found


def read_mesh(text: str) -> dict[str, int]:
    """Read a mesh, within the limits of the page.

    Raises:
        SpecError: a pair is not the name of a mesh axis and a positive whole number, or an earlier pair has the same
            name; or the mesh has too many axes or devices.
    """
    rule = "mesh axes are named by a lowercase letter and then letters, digits or _"
    mesh = _numbers(text, "mesh axes", NAME, rule, "x=4")
    devices = 1
    for size in mesh.values():
        devices *= size
    if len(mesh) > limits.AXES:
        raise SpecError(f"the mesh has {len(mesh)} axes.\n  This page plans meshes of up to {limits.AXES}.")
    if devices > limits.DEVICES:
        raise SpecError(f"the mesh has {devices:,} devices.\n  This page plans meshes of up to {limits.DEVICES:,}.")
    return mesh
