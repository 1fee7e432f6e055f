"""`Entry`: one collective of a compiled program, as a ledger lists it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gspmd.display.notebook import cell_of
from gspmd.display.plain import printable
from gspmd.display.units import amount_of_bytes, axes_text
from gspmd.lowerings.scopes import read_step

Key = tuple[str, tuple[str, ...]]
"""A kind of collective, and the names of its mesh axes in alphabetical order."""


@dataclass(frozen=True, repr=False)
class Entry:
    """One collective of a compiled program, with figures per device that cover all of its runs.

    If the compiler combined several collectives into one instruction, each of these collectives has its own entry.

    Attributes:
        kind: the kind of collective, named as in a plan: all-gather, reduce-scatter, all-reduce, all-to-all or
            collective-permute.
        axes: the mesh axes over which the collective runs, in the mesh's order. This is `("?",)` if the device groups
            of the instruction match no set of mesh axes.
        count: number of times that the instruction runs.
        wire_bytes: bytes that one device sends in all runs; for a collective-permute, the bytes of the device that
            sends the most.
        dtype: the dtype on the wire, as HLO names it: `f32`, `bf16`.
        source: the line of the user's program that caused the collective, as `file:line`; empty if unknown.
        equation: the planned equation to which the collective belongs; empty if there is no such equation.
        step: the scope name of the planned step that this collective runs, such as `step2.reduce-scatter.x`; empty if
            the compiler chose the collective.
        name: the name of the instruction in the HLO.
        asynchronous: whether one instruction starts the collective and another instruction waits for its result.
        arrays: number of arrays that this entry moves in one run.
        group: number of devices in each group of devices that communicate with each other.
        together: number of arrays that the instruction moves in one run, including arrays that are counted in other
            entries of the same instruction.
        network_bytes: the part of `wire_bytes` that crosses the network between GPU nodes or TPU slices; 0 if the
            ledger does not know which devices share a node.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    wire_bytes: int
    dtype: str
    source: str = ""
    equation: str = ""
    step: str = ""
    name: str = field(default="", compare=False)
    asynchronous: bool = False
    arrays: int = 1
    group: int = 1
    together: int = 1
    network_bytes: int = 0

    def __repr__(self) -> str:
        what = f"{self.count} × {self.kind} {axes_text(self.axes)} {self.dtype}".rstrip()
        sent = amount_of_bytes(self.wire_bytes)
        return printable(f"<Entry {what}: {sent}, {asked_for_by(self.equation, self.step, self.source)}>")


def asked_for_by(equation: str, step: str, source: str) -> str:
    """Return the origin of a collective as text: its equation, step and source line.

    If all three are empty, the text is "the compiler".
    """
    planned = " ".join(part for part in (equation, step_text(step)) if part)
    return "  ".join(part for part in (planned, short(source)) if part) or "the compiler"


def step_text(step: str) -> str:
    """Return the short text for a step's scope name: for `step2.reduce-scatter.x`, `step 2`."""
    return f"step {read_step(step).number}" if step else ""


def short(source: str) -> str:
    """Shorten a source line `file:line` to the last two parts of the path, or to `In[3]:line` in a notebook."""
    file, _, line = source.rpartition(":")
    cell = cell_of(file)
    return f"{cell}:{line}" if cell else "/".join(Path(source).parts[-2:]) if source else ""


def by_kind_and_axes(entries: Iterable[Entry]) -> dict[Key, tuple[int, int]]:
    """Return the number of arrays sent in all runs, and the bytes sent, for each kind and set of mesh axes."""
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    sent: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for entry in entries:
        key = (entry.kind, tuple(sorted(entry.axes)))
        counts[key] += entry.count * entry.arrays
        sent[key] += entry.wire_bytes
    return {key: (counts[key], sent[key]) for key in sorted(counts)}
