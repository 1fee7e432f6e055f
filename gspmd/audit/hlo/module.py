"""Optimized HLO as data: `compiled.as_text()` read into computations and instructions.

The text is public API on every platform, holds what the proto holds (layouts, trip counts, the TPU compiler's estimated
cycles, stack frames), and can be kept in a file. Only what an audit needs is read; nothing is interpreted here but the
number of times that a loop runs.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from gspmd.annotate.errors import PlanError

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_BARE_NAME = re.compile(r"([\w.\-]+)$")
_STRING = r'"(?:[^"\\]|\\.)*"'
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*\) -> .*)?\{$")
_START = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|called_computations|branch_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_LINE = re.compile(r'source_file="([^"]*)"(?:,? source_line=(\d+))?')
_DEVICES = re.compile(r", (?:num_partitions|replica_count)=(\d+)")
KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True)
class Array:
    """One array of an instruction's result: HLO's name of its dtype, and its shape on one device."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of its elements, without the padding of a tiled layout."""
        return (self.size * _bits(self.dtype) + 7) // 8


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0


@dataclass(frozen=True)
class Instruction:
    """One line of HLO.

    Attributes:
        name: without the percent sign.
        opcode: as HLO spells it: `all-gather-start`, `fusion`, ...
        arrays: the result's arrays, a tuple's one after the other.
        type: the result's type as written, layouts included.
        operands: names of the operands, in the same computation.
        arguments: what stands between the parentheses, as written; a constant's value, a parameter's number.
        attributes: the rest of the line.
        root: whether the computation returns it.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    arguments: str = ""
    attributes: str = ""
    root: bool = False

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The result's arrays, a tuple's one after the other."""
        return tuple(
            Array(dtype, tuple(int(n.removeprefix("<=")) for n in shape.split(",") if n))
            for dtype, shape in _ARRAY.findall(_plain(self.type))
        )

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.bytes for array in self.arrays)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs."""
        found = _CALLED.findall(self._unquoted)
        return tuple(name.strip("%{} ") for one in found for name in one.split(",") if name.strip("%{} "))

    @cached_property
    def op_name(self) -> str:
        """The scopes in which JAX made it, or nothing where the compiler did."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @cached_property
    def _unquoted(self) -> str:
        """The attributes without their strings, in which a user's names may look like anything."""
        return re.sub(_STRING, '""', self.attributes)

    @property
    def frame(self) -> int:
        """Number of its stack frame in the module, 0 for none."""
        found = _FRAME.search(self._unquoted)
        return int(found[1]) if found else 0

    @property
    def line(self) -> tuple[str, int] | None:
        """File and line, where they are written out instead of a stack frame."""
        found = _LINE.search(self.attributes)
        return (found[1], int(found[2] or 0)) if found else None

    @property
    def cycles(self) -> int:
        """The TPU compiler's estimate of the cycles one execution takes; 0 where it makes none."""
        found = _CYCLES.search(self.attributes)
        return int(found[1]) if found else 0

    def attribute(self, name: str) -> str:
        """The text of an attribute, such as `dimensions={2}`; empty where there is none.

        >>> _instruction("  ROOT %s.1 = f32[8]{0} slice(%p), slice={[0:8]}, sharding={replicated}").attribute("slice")
        '{[0:8]}'
        """
        either = re.finditer(rf"{_STRING}|(?:^|, )({name}=)", self.attributes)
        found = next((each for each in either if each[1]), None)
        return _until(self.attributes, found.end(), ",").strip() if found else ""

    @cached_property
    def config(self) -> dict:
        """The backend's own configuration, where it is JSON."""
        try:
            loaded = json.loads(self.attribute("backend_config") or "{}")
        except json.JSONDecodeError:
            return {}
        return loaded if isinstance(loaded, dict) else {}


@dataclass(frozen=True)
class Computation:
    """A list of instructions, in the order of execution where the module is scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Every instruction by its name."""
        return {each.name: each for each in self.instructions}

    @property
    def root(self) -> Instruction:
        """What the computation returns."""
        return next((each for each in self.instructions if each.root), self.instructions[-1])

    @property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        return {int(each.arguments): each for each in self.instructions if each.opcode == "parameter"}


@dataclass(frozen=True)
class Frame:
    """One call: where it stands, and the frame that called it, 0 for none."""

    file: str
    line: int
    function: str
    parent: int


@dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
        name: of the module, `jit_step`.
        entry: what runs first.
        computations: every computation by name.
        frames: the stack frames that instructions refer to, by number.
        is_scheduled: whether the order of instructions is that of execution.
        devices: how many run it; 1 where the text does not say.
    """

    name: str
    entry: Computation
    computations: dict[str, Computation]
    frames: dict[int, Frame] = field(default_factory=dict, repr=False)
    is_scheduled: bool = False
    devices: int = 1

    @cached_property
    def callers(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        """Who runs each computation: instructions, and the computations in which they stand."""
        found: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                for name in instruction.called:
                    found.setdefault(name, []).append((computation, instruction))
        return found

    def source(self, instruction: Instruction, skip: tuple[str, ...] = ()) -> str:
        """`file:line` of the innermost call outside the files that begin with one of `skip`; empty where unknown."""
        if instruction.line and not instruction.line[0].startswith(skip or ("\0",)):
            return f"{instruction.line[0]}:{instruction.line[1]}"
        for frame in self.stack(instruction):
            if not frame.file.startswith(skip or ("\0",)):
                return f"{frame.file}:{frame.line}"
        return ""

    def stack(self, instruction: Instruction) -> Iterator[Frame]:
        """The calls that led to an instruction, innermost first."""
        number = instruction.frame
        while frame := self.frames.get(number):
            yield frame
            number = frame.parent


class HloError(PlanError):
    """A text that is not an HLO module."""


def parse(text: str) -> Module:
    """Read an HLO module.

    Args:
        text: `compiled.as_text()`, or a dump of XLA (`--xla_dump_to`, `*after_optimizations.txt`).

    Raises:
        HloError: it is no text, or there is no entry computation.

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
        raise HloError(f"cannot read a {type(text).__name__} as an HLO module.\n  Give compiled.as_text().")
    lines = iter(text.splitlines())
    header = next((line for line in text.splitlines() if line.startswith("HloModule ")), "")
    computations, entry = {}, None
    for line in lines:
        opened = _HEADER.match(line)
        if opened:
            computations[opened["name"]] = Computation(opened["name"], tuple(_body(lines)))
            entry = opened["name"] if opened["entry"] else entry
    if entry is None:
        raise HloError("this text holds no HLO module: it has no ENTRY computation.\n  Give compiled.as_text().")
    name = header.split(",")[0].removeprefix("HloModule ").strip()
    scheduled, devices = "is_scheduled=true" in header, prod(map(int, _DEVICES.findall(header)))
    return Module(name, computations[entry], computations, _frames(text), scheduled, devices)


def _body(lines: Iterator[str]) -> Iterator[Instruction]:
    for line in lines:
        if line.startswith("}"):
            return
        if _START.match(line):
            yield _instruction(line)


def _instruction(line: str) -> Instruction:
    start = _START.match(line)
    kind = _until(line, start.end(), " ")
    at = start.end() + len(kind) + 1
    opcode, _, _ = line[at:].partition("(")
    arguments = _until(line, at + len(opcode) + 1, ")")
    rest = line[at + len(opcode) + 1 + len(arguments) + 1 :].removeprefix(", ")
    operands = () if opcode in ("constant", "parameter") else _operands(arguments)
    return Instruction(start["name"], opcode.strip(), kind, operands, arguments, rest, bool(start["root"]))


def _operands(arguments: str) -> tuple[str, ...]:
    """The names between the parentheses, which some printers give no percent sign."""
    if "%" in arguments or not arguments:
        return tuple(_NAME.findall(arguments))
    found, at = [], 0
    while at < len(arguments):
        one = _until(arguments, at, ",")
        at += len(one) + 1
        found += _BARE_NAME.findall(one.strip())
    return tuple(found)


_OPEN, _CLOSE = "({[", ")}]"


def _until(text: str, start: int, stop: str) -> str:
    """From `start` to the first `stop` that stands outside brackets and strings."""
    depth, quoted, at = 0, False, start
    while at < len(text):
        character = text[at]
        if quoted:
            at += character == "\\"
            quoted = character != '"'
        elif character == '"':
            quoted = True
        elif depth == 0 and character == stop:
            break
        elif character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        at += 1
    return text[start:at]


def integers(text: str) -> tuple[int, ...]:
    """Every number in a text, such as an attribute's `{0,2}`.

    >>> integers("{0,2}")
    (0, 2)
    """
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _plain(kind: str) -> str:
    """A type without its layouts, whose tiles look like shapes."""
    return re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", kind)


def _frames(text: str) -> dict[int, Frame]:
    files, functions = _table(text, "FileNames"), _table(text, "FunctionNames")
    locations = {number: _fields(row) for number, row in _table(text, "FileLocations").items()}
    rows = {number: _fields(row) for number, row in _table(text, "StackFrames").items()}
    # Some versions print a parent's number plus one, so that a root's parent is itself or 1; ids begin at 1.
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
    """A numbered table of the module's header."""
    found = re.search(rf"^{title}\n((?:\d+ .*\n?)*)", text, re.MULTILINE)
    rows = (row.partition(" ") for row in found[1].splitlines()) if found else ()
    return {int(number): value for number, _, value in rows}


def _fields(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}
