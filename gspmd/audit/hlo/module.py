"""A compiled program as data: `Module`, its computations, and their instructions.

Nothing is interpreted here. `gspmd.audit.hlo.parser` makes these objects from the text of a program.
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
"""The number of cycles that libtpu writes if its estimate overflows, as for thin int8 products of operands in VMEM."""


@dataclass(frozen=True)
class Array:
    """One array of an instruction's result: its dtype, as HLO names it, and its shape on one device."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

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
        name: the name of the instruction, without the percent sign.
        opcode: the opcode in HLO, such as `all-gather-start` or `fusion`.
        type: the text of the result's type, including memory layouts.
        operands: names of the operands, in the same computation.
        arguments: the text between the parentheses, such as a constant's value or a parameter's number.
        attributes: the text after the parentheses.
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
        """The arrays of the result; a tuple is flattened."""
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
        """The name stack of JAX in the metadata, or "" for an instruction that the compiler added."""
        name = _OP_NAME.search(self.attributes)
        return name[1] if name else ""

    @property
    def target(self) -> str:
        """The library function or kernel that the instruction calls, or an empty string."""
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
        """The attributes with all quoted strings emptied, because user-given names may look like attributes."""
        return re.sub(_STRING, '""', self.attributes)

    @property
    def frame(self) -> int:
        """Number of the instruction's stack frame in the module, or 0 if it has none."""
        number = _FRAME.search(self._unquoted)
        return int(number[1]) if number else 0

    @property
    def line(self) -> tuple[str, int] | None:
        """File and line of the instruction, if the metadata has them instead of a stack frame."""
        line = _LINE.search(self.attributes)
        return (line[1], int(line[2] or 0)) if line else None

    @property
    def cycles(self) -> int:
        """The TPU compiler's estimate of the cycles of one execution; 0 if there is none, or if it overflowed."""
        cycles = self._written_cycles
        return 0 if cycles == _OVERFLOWED else cycles

    @property
    def cycles_overflowed(self) -> bool:
        """Whether the compiler's estimate of the cycles overflowed."""
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
        """The backend's configuration as a dict, empty if it is not a JSON object."""
        try:
            loaded = json.loads(self.attribute("backend_config") or "{}")
        except json.JSONDecodeError:
            return {}
        return loaded if isinstance(loaded, dict) else {}


@dataclass(frozen=True)
class Computation:
    """A list of instructions, in the order of execution if the module is scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Every instruction by its name."""
        return {each.name: each for each in self.instructions}

    @property
    def root(self) -> Instruction:
        """The instruction whose result the computation returns."""
        return next((each for each in self.instructions if each.root), self.instructions[-1])

    @property
    def parameters(self) -> dict[int, Instruction]:
        """The parameter instructions by their number."""
        return {int(each.arguments): each for each in self.instructions if each.opcode == "parameter"}


@dataclass(frozen=True)
class Frame:
    """A stack frame: file, line, function, and the number of the caller's frame or 0."""

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
        computations: every computation by name.
        frames: stack frames by number.
        is_scheduled: whether the instructions are in the order of execution.
        devices: number of devices that run the program; 1 if the text does not state it.
        kernels: the TPU compiler's schedules of Pallas kernels, by the name of the instruction that calls the kernel.
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
        """For each computation, the (containing computation, instruction) pairs of the instructions that run it."""
        callers: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                for name in instruction.called:
                    callers.setdefault(name, []).append((computation, instruction))
        return callers

    def source(self, instruction: Instruction, skip: tuple[str, ...] = ()) -> str:
        """Return `file:line` of the innermost stack frame outside the paths in `skip`, or "" if there is none."""
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
