"""A parser that makes a `Module` from optimized HLO, which is the text `compiled.as_text()`.

This text is public API on every platform, and can be kept in a file. It contains everything that an audit needs: memory
layouts, trip counts, the TPU compiler's estimates of cycles, and stack frames.
"""

import re
from collections.abc import Iterator
from math import prod

from gspmd.annotate.errors import PlanError, article
from gspmd.audit.hlo.module import Computation, Frame, Instruction, Module
from gspmd.audit.hlo.text import until

_NAME = re.compile(r"%([\w.\-]+)")
_BARE_NAME = re.compile(r"([\w.\-]+)$")
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*\) -> .*)?\{$")
_START = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_END = re.compile(r"^\}(?:,|\s*$)")
_DEVICES = re.compile(r", (?:num_partitions|replica_count)=(\d+)")


class HloError(PlanError):
    """An error that is raised if a text is not an HLO module."""


def parse(text: str) -> Module:
    """Parse the text of an HLO module.

    Args:
        text: the text `compiled.as_text()`, or the contents of a file that XLA has dumped (`--xla_dump_to`,
            `*after_optimizations.txt`).

    Raises:
        HloError: `text` is not a string, or has no entry computation.

    Example:
        >>> module = parse('''HloModule m, is_scheduled=true
        ...
        ... ENTRY %main (p: f32[4,8]) -> f32[8,4] {
        ...   %p = f32[4,8]{1,0} parameter(0)
        ...   ROOT %t = f32[8,4]{0,1} transpose(%p), dimensions={1,0}
        ... }''')
        >>> module.entry.root.opcode, module.entry.root.bytes
        ('transpose', 128)

    Source: the printer of XLA's HloModule, openxla/xla, `hlo/ir/hlo_module.cc`.
    """
    if not isinstance(text, str):
        raise HloError(f"cannot read {article(type(text).__name__)} as an HLO module.\n  Give compiled.as_text().")
    lines = iter(text.splitlines())
    header = next((line for line in text.splitlines() if line.startswith("HloModule ")), "")
    computations, entry = {}, None
    for line in lines:
        if opening := _HEADER.match(line):
            computations[opening["name"]] = Computation(opening["name"], tuple(_body(lines)))
            entry = opening["name"] if opening["entry"] else entry
    if entry is None:
        raise HloError("this text holds no HLO module: it has no ENTRY computation.\n  Give compiled.as_text().")
    name = header.split(",")[0].removeprefix("HloModule ").strip()
    scheduled, devices = "is_scheduled=true" in header, prod(map(int, _DEVICES.findall(header)))
    return Module(name, computations[entry], computations, _frames(text), scheduled, devices)


def _body(lines: Iterator[str]) -> Iterator[Instruction]:
    """Yield the instructions of a computation from the lines after its header.

    If the metadata of a kernel breaks an instruction into several lines, these lines are joined.
    """
    begun, text = None, ""
    for line in lines:
        ends, begins = _END.match(line), _START.match(line)
        if ends or begins:
            if begun:
                yield _instruction(begun, text)
            begun, text = begins, line
        elif begun:
            text += line
        if ends:
            return


def _instruction(start: re.Match[str], line: str) -> Instruction:
    """Parse a line `  ROOT %name = type opcode(arguments), attributes`; `start` is the match up to the type."""
    kind = until(line, start.end(), " ")
    at = start.end() + len(kind) + 1
    opcode, _, _ = line[at:].partition("(")
    arguments = until(line, at + len(opcode) + 1, ")")
    rest = line[at + len(opcode) + 1 + len(arguments) + 1 :].removeprefix(", ")
    operands = () if opcode in ("constant", "parameter") else _operands(arguments)
    return Instruction(start["name"], opcode.strip(), kind, operands, arguments, rest, bool(start["root"]))


def _operands(arguments: str) -> tuple[str, ...]:
    """Return the names of the operands in the text between the parentheses; some printers omit the percent signs."""
    if "%" in arguments or not arguments:
        return tuple(_NAME.findall(arguments))
    names, at = [], 0
    while at < len(arguments):
        one = until(arguments, at, ",")
        at += len(one) + 1
        names += _BARE_NAME.findall(one.strip())
    return tuple(names)


def _frames(text: str) -> dict[int, Frame]:
    """Return a mapping from numbers to stack frames, from the four tables in the module's header."""
    files, functions = _table(text, "FileNames"), _table(text, "FunctionNames")
    locations = {number: _fields(row) for number, row in _table(text, "FileLocations").items()}
    rows = {number: _fields(row) for number, row in _table(text, "StackFrames").items()}
    # Ids begin at 1. Some versions print the parent's id plus one, so that a root frame names itself, or 1.
    shift = int(any(row.get("parent_frame_id") == number for number, row in rows.items()))
    frames = {}
    for number, row in rows.items():
        place = locations.get(row.get("file_location_id", 0), {})
        file = files.get(place.get("file_name_id", 0), "").strip('"')
        function = functions.get(place.get("function_name_id", 0), "").strip('"')
        parent = max(0, row.get("parent_frame_id", 0) - shift)
        frames[number] = Frame(file, place.get("line", 0), function, parent)
    return frames


def _table(text: str, title: str) -> dict[int, str]:
    """Return a mapping from numbers to rows, for a numbered table in the module's header."""
    table = re.search(rf"^{title}\n((?:\d+ .*\n?)*)", text, re.MULTILINE)
    rows = (row.partition(" ") for row in table[1].splitlines()) if table else ()
    return {int(number): value for number, _, value in rows}


def _fields(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}
