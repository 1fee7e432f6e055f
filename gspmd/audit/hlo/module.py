"""A compiled program as data: a `Module`, its computations, and the instructions of each computation.

The classes of this module do not interpret the program. `gspmd.audit.hlo.parser` makes their objects from the text of a
program.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from gspmd.audit.hlo.bundles import KernelSchedule
from gspmd.audit.hlo.text import until
from gspmd.ops.interface.kernels import KernelWork, kernel_work

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_LAYOUT = re.compile(r"\{[^{}]*\}|/\*.*?\*/")
_STRING = r'"(?:[^"\\]|\\.)*"'
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|called_computations|branch_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_LINE = re.compile(r'source_file="([^"]*)"(?:,? source_line=(\d+))?')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OVERFLOWED = 2**63 - 1
"""The number of cycles that libtpu writes if its estimate overflows. This happens, for example, for thin int8 products
whose operands are in VMEM."""


@dataclass(frozen=True)
class Array:
    """One array of an instruction's result: the dtype, as HLO names it, and the shape on one device."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def bytes(self) -> int:
        """Bytes of the array's elements, without the padding of a tiled memory layout."""
        return (self.size * _bits(self.dtype) + 7) // 8


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0


@dataclass(frozen=True)
class Instruction:
    """One instruction of HLO, which is one line of the text: `name = type opcode(arguments), attributes`.

    Attributes:
        name: the name of the instruction, without the percent sign.
        opcode: the opcode in HLO, such as `all-gather-start` or `fusion`.
        type: the text of the result's type, including memory layouts.
        operands: names of the instructions, in the same computation, whose results are the operands.
        arguments: the text between the parentheses, such as a constant's value or a parameter's number.
        attributes: the text after the parentheses.
        root: whether the computation returns the result of this instruction.
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
        """The arrays of the result; if the result is a tuple, the arrays of the flattened tuple."""
        return tuple(
            Array(dtype, tuple(int(n.removeprefix("<=")) for n in shape.split(",") if n))
            for dtype, shape in _ARRAY.findall(_LAYOUT.sub("", self.type))  # a layout's tiles look like shapes
        )

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.bytes for array in self.arrays)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that the instruction runs."""
        lists = _CALLED.findall(self._unquoted)
        return tuple(name.strip("%{} ") for one in lists for name in one.split(",") if name.strip("%{} "))

    @cached_property
    def op_name(self) -> str:
        """JAX's name stack from the metadata, or "" for an instruction that the compiler added."""
        name = _OP_NAME.search(self.attributes)
        return name[1] if name else ""

    @property
    def target(self) -> str:
        """The name of the library function or kernel that the instruction calls; empty if there is none."""
        return self.attribute("custom_call_target").strip('"') if self.opcode == "custom-call" else ""

    @property
    def is_kernel(self) -> bool:
        """Whether the instruction calls a Pallas kernel for TPUs."""
        return self.target == "tpu_custom_call"

    @property
    def kernel_work(self) -> KernelWork | None:
        """The work of the kernel that the instruction calls, or None if the program does not state it."""
        return kernel_work(self.op_name) if self.is_kernel else None

    @cached_property
    def _unquoted(self) -> str:
        """The text of the attributes, with all quoted strings emptied.

        Users choose some of the names in these strings, and such a name may look like an attribute.
        """
        return re.sub(_STRING, '""', self.attributes)

    @property
    def frame(self) -> int:
        """The number of the instruction's stack frame in the module, or 0 if the instruction has no stack frame."""
        number = _FRAME.search(self._unquoted)
        return int(number[1]) if number else 0

    @property
    def line(self) -> tuple[str, int] | None:
        """The (file, line) of the instruction, or None if the metadata has a stack frame instead, or has neither."""
        line = _LINE.search(self.attributes)
        return (line[1], int(line[2] or 0)) if line else None

    @property
    def cycles(self) -> int:
        """The TPU compiler's estimate of the cycles of one execution; 0 if there is no estimate or it overflowed."""
        cycles = self._written_cycles
        return 0 if cycles == _OVERFLOWED else cycles

    @property
    def cycles_overflowed(self) -> bool:
        """Whether the TPU compiler's estimate of the cycles overflowed."""
        return self._written_cycles == _OVERFLOWED

    @cached_property
    def _written_cycles(self) -> int:
        cycles = _CYCLES.search(self.attributes)
        return int(cycles[1]) if cycles else 0

    def attribute(self, name: str) -> str:
        """Return the text of an attribute, or an empty string if the instruction does not have it.

        >>> Instruction("s.1", "slice", "f32[8]{0}", ("p",), "%p", "slice={[0:8]}, sharding={r}").attribute("slice")
        '{[0:8]}'
        """
        strings_too = re.finditer(rf"{_STRING}|(?:^|, )({name}=)", self.attributes)
        found = next((each for each in strings_too if each[1]), None)
        return until(self.attributes, found.end(), ",").strip() if found else ""

    @cached_property
    def config(self) -> dict:
        """The attribute `backend_config` as a dict; empty if the attribute is not a JSON object."""
        try:
            loaded = json.loads(self.attribute("backend_config") or "{}")
        except json.JSONDecodeError:
            return {}
        return loaded if isinstance(loaded, dict) else {}


@dataclass(frozen=True)
class Computation:
    """A named list of instructions, which is in the order of execution if the module is scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """A mapping from names to instructions."""
        return {each.name: each for each in self.instructions}

    @property
    def root(self) -> Instruction:
        """The instruction whose result the computation returns."""
        return next((each for each in self.instructions if each.root), self.instructions[-1])

    @property
    def parameters(self) -> dict[int, Instruction]:
        """A mapping from parameter numbers to parameter instructions."""
        return {int(each.arguments): each for each in self.instructions if each.opcode == "parameter"}


@dataclass(frozen=True)
class Frame:
    """A stack frame: its file, line and function, and the number of the caller's frame, or 0 if there is no caller."""

    file: str
    line: int
    function: str
    parent: int


@dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
        name: the name of the program, such as `jit_step`.
        entry: the computation that runs first.
        computations: a mapping from names to computations.
        frames: a mapping from numbers to stack frames.
        is_scheduled: whether the instructions are in the order of execution.
        devices: number of devices that run the program; 1 if the text does not state it.
        kernels: a mapping from the name of an instruction that calls a Pallas kernel to the TPU compiler's schedule of
            the kernel.
    """

    name: str
    entry: Computation
    computations: dict[str, Computation]
    frames: dict[int, Frame] = field(default_factory=dict, repr=False)
    is_scheduled: bool = False
    devices: int = 1
    kernels: dict[str, KernelSchedule] = field(default_factory=dict, repr=False)

    @cached_property
    def callers(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        """For each computation, the instructions that run it, as (containing computation, instruction) pairs."""
        callers: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                for name in instruction.called:
                    callers.setdefault(name, []).append((computation, instruction))
        return callers

    def source(self, instruction: Instruction, skip: tuple[str, ...] = ()) -> str:
        """Return the source line of an instruction as `file:line`, skipping files that begin with a text in `skip`.

        If the metadata has several stack frames, the line is that of the innermost frame whose file is not skipped. The
        result is "" if there is no such frame or line.
        """
        if instruction.line and not instruction.line[0].startswith(skip or ("\0",)):
            return f"{instruction.line[0]}:{instruction.line[1]}"
        for frame in self.stack(instruction):
            if not frame.file.startswith(skip or ("\0",)):
                return f"{frame.file}:{frame.line}"
        return ""

    def stack(self, instruction: Instruction) -> Iterator[Frame]:
        """Yield the stack frames of an instruction, innermost first."""
        number = instruction.frame
        while frame := self.frames.get(number):
            yield frame
            number = frame.parent
