"""`gspmd.ledger`: what a compiled program really sends, read from its optimized HLO."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from rich.console import Group
from rich.markup import escape
from rich.text import Text

from gspmd.annotate.errors import PlanError, shown
from gspmd.audit import hlo
from gspmd.audit.hlo.collectives import Collective, collective
from gspmd.audit.hlo.flops import product_flops, uncounted
from gspmd.audit.hlo.loops import trips
from gspmd.audit.hlo.origin import by_origin
from gspmd.audit.hlo.replica_groups import axes_of
from gspmd.display.tables import Column, Sheet, counted
from gspmd.display.units import amount_of_bytes, amount_of_flops, axes_text
from gspmd.planner.drawing import COLORS

if TYPE_CHECKING:
    from gspmd.audit.ledgers.comparison import Comparison
    from gspmd.audit.ledgers.difference import Difference
    from gspmd.planner.plan import Plan
    from gspmd.tracing.program_plan import ProgramPlan
from gspmd.display.plain import printable
from gspmd.display.printed import Printed

Key = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, repr=False)
class Entry:
    """One collective instruction of a compiled program, all its executions together; figures are per device.

    An instruction that a compiler made of several has an entry for each of them.

    Attributes:
        kind: as in a plan: all-gather, reduce-scatter, all-reduce, all-to-all, collective-permute.
        axes: the mesh axes it runs over, in the mesh's order; `("?",)` where its groups are those of no mesh axes.
        count: how often it runs.
        wire_bytes: bytes that one device sends in all of them; for a permute, the device that sends most.
        dtype: what crosses the wire, as HLO names it: `f32`, `bf16`.
        source: the line of the program that asked for it, `file:line`; empty where the compiler says nothing.
        equation: the planned equation it belongs to; empty where no plan asked for it.
        step: the plan's step, `step2.reduce-scatter.x`; empty where the compiler chose within an equation.
        name: of the instruction in the HLO.
        asynchronous: whether it is started and waited for by two instructions.
        arrays: how many arrays it moves at once.
        group: how many devices take part together.
        together: how many arrays the instruction moves, where it is the entry of several who asked for a part of it.
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

    def __repr__(self) -> str:
        what = f"{self.count} × {self.kind} {axes_text(self.axes)} {self.dtype}".rstrip()
        return printable(f"<Entry {what}: {amount_of_bytes(self.wire_bytes)}, {_asked(self)}>")


@dataclass(frozen=True, repr=False)
class Ledger(Printed):
    """What one device of a compiled program sends and multiplies in one execution.

    A conditional counts its branch with the most bytes. A loop whose trips depend on what is computed counts once, and
    is named in `notes`.

    Attributes:
        entries: every collective instruction, in program order.
        flops: of the matrix products, loops counted: two per multiplication.
        mesh: sizes of the mesh axes.
        name: of the program.
        notes: what could not be counted.
    """

    entries: tuple[Entry, ...]
    flops: int
    mesh: Mapping[str, int]
    name: str = ""
    notes: tuple[str, ...] = ()

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends."""
        return sum(entry.wire_bytes for entry in self.entries)

    def by_kind_and_axes(self) -> dict[Key, tuple[int, int]]:
        """For every collective kind and set of mesh axes: how often it runs, and the bytes sent."""
        counts, sent = Counter(), Counter()
        for entry in self.entries:
            key = (entry.kind, tuple(sorted(entry.axes)))
            counts[key] += entry.count * entry.arrays
            sent[key] += entry.wire_bytes
        return {key: (counts[key], sent[key]) for key in sorted(counts)}

    def compare(self, plan: "ProgramPlan | Plan") -> "Comparison":
        """What was planned beside what was compiled, by (kind, axes) and by step; see `gspmd.audit.compare`."""
        from gspmd.audit.ledgers.comparison import compare

        return compare(self, plan)

    def diff(self, other: "Ledger") -> "Difference":
        """What changes from this ledger to another; see `gspmd.audit.ledgers.difference`."""
        from gspmd.audit.ledgers.difference import difference

        return difference(self, other)

    def to_json(self) -> str:
        """The whole ledger as JSON: name, mesh, wire_bytes, flops, notes, entries."""
        totals = {"name": self.name, "mesh": dict(self.mesh), "wire_bytes": self.wire_bytes, "flops": self.flops}
        return json.dumps({**totals, "notes": self.notes, "entries": [asdict(entry) for entry in self.entries]})

    def table(self) -> Sheet:
        """The collectives as a rich table, like ones in one row, most bytes first."""
        sheet = Sheet(f"ledger of {self._named}: what one of {prod(self.mesh.values())} devices sends", _COLUMNS)
        for entry, count, sent in self._rows():
            kind = f"[{COLORS[entry.kind]}]{entry.kind}[/]"
            how = "async" if entry.asynchronous else ""
            figures = (axes_text(entry.axes), entry.dtype, how, str(count), amount_of_bytes(sent))
            sheet.add(kind, *figures, asked(entry))
        count = str(sum(entry.count for entry in self.entries))
        work = f"{amount_of_flops(self.flops)} in matrix products"
        sheet.add("all", "", "", "", count, amount_of_bytes(self.wire_bytes), work, total=True)
        return sheet

    @property
    def _named(self) -> str:
        return self.name or "a program"

    def _rows(self) -> list[tuple[Entry, int, int]]:
        """Entries that differ in nothing but count and bytes, together."""
        rows: dict[tuple, list] = {}
        for entry in self.entries:
            alike = (entry.kind, entry.axes, entry.dtype, entry.equation, entry.step, entry.source, entry.asynchronous)
            row = rows.setdefault(alike, [entry, 0, 0])
            row[1] += entry.count
            row[2] += entry.wire_bytes
        return sorted((tuple(row) for row in rows.values()), key=lambda row: (-row[2], row[0].kind, row[0].axes))

    def __rich__(self) -> Group:
        return Group(self.table(), *(Text(f"note: {note}") for note in self.notes))

    def __repr__(self) -> str:
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        figures = f"{amount_of_bytes(self.wire_bytes)} sent, {amount_of_flops(self.flops)}"
        entries = counted(len(self.entries), "collective")
        return printable(f"<Ledger of {self._named}, mesh {mesh}: {entries}, {figures}; print it for its table>")


_COLUMNS = (
    Column("kind"),
    Column("mesh axes"),
    Column("dtype", goes=3),
    Column("", goes=2),
    Column("count", "right", goes=1),
    Column("sent", "right"),
    Column("asked for by", folds=True),
)


def asked(entry: Entry) -> str:
    """Who asked for a collective, for a person: the equation with its step, and the source line."""
    return escape(_asked(entry))


def _asked(entry: Entry) -> str:
    planned = " ".join(part for part in (entry.equation, number(entry.step)) if part)
    return "  ".join(part for part in (planned, short(entry.source)) if part) or "the compiler"


def number(step: str) -> str:
    """`step2.reduce-scatter.x` as `step 2`."""
    return step.partition(".")[0].replace("step", "step ")


def short(source: str) -> str:
    """A source line with the last two parts of its path."""
    return "/".join(Path(source).parts[-2:]) if source else ""


def ledger(compiled: Any, mesh: Any = None) -> Ledger:
    """Read what a compiled program sends.

    Args:
        compiled: `jax.jit(f).lower(...).compile()`, for any platform, or the text of its optimized HLO.
        mesh: a mesh, or sizes of its axes in its order; that of the program's inputs or outputs, or else the one in
            force, if not given.

    Returns:
        A `Ledger`: every collective with its mesh axes, executions, bytes, dtype, plan step and source line.

    Raises:
        PlanError: `compiled` is not compiled, or `mesh` no mesh; no mesh is given, and none can be found; or it has not
            as many devices as the program.
        HloError: the text is no HLO module.

    Example:
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> x = jax.ShapeDtypeStruct((4, 4), "float32", sharding=jax.NamedSharding(mesh, jax.P("x")))
        >>> ledger(jax.jit(lambda x: x @ x).lower(x).compile()).flops
        128

    Differs: from `compiled.cost_analysis()`, which counts a loop's body once and has no collectives.
    """
    module = hlo.parse(_text_of(compiled))
    return of_module(module, sizes_of(_mesh_of(compiled) if mesh is None else mesh))


def of_module(module: hlo.Module, mesh: Mapping[str, int]) -> Ledger:
    """The ledger of a module that is already parsed."""
    if module.devices not in (1, prod(mesh.values())):
        written = ",".join(f"{axis}={size}" for axis, size in mesh.items())
        raise PlanError(
            f"cannot name the mesh axes of {module.name}: {module.devices} devices run it, and the mesh {written} has "
            f"{prod(mesh.values())}.\n  Give mesh=, the one that it was compiled for."
        )
    reader = _Reader(module, mesh)
    entries, flops = reader.read(module.entry, 1)
    return Ledger(tuple(entries), flops, dict(mesh), module.name, tuple(dict.fromkeys(reader.notes)))


class _Reader:
    """One walk through a module."""

    def __init__(self, module: hlo.Module, mesh: Mapping[str, int]):
        self.module, self.mesh, self.notes = module, mesh, []
        self.devices = prod(mesh.values())

    def read(self, computation: hlo.Computation, times: int) -> tuple[list[Entry], int]:
        """The entries of a computation that runs so often, and the operations of its products."""
        entries, flops = [], 0
        for instruction in computation.instructions:
            flops += times * product_flops(self.module, computation, instruction)
            for name, target in uncounted(self.module, computation, instruction):
                self.notes.append(f"the operations of custom call {name} ({target}) are not counted")
            found = collective(self.module, computation, instruction, self.devices)
            if found and found.phase != "done" and found.group > 1:
                entries += self._entries(computation, instruction, found, times)
            if instruction.opcode == "conditional":
                inner = max((self.read(branch, times) for branch in self._called(instruction)), key=_size)
                entries, flops = entries + inner[0], flops + inner[1]
            elif instruction.opcode in ("while", "call", "async-start") and not found:
                for branch, runs in self._runs(computation, instruction):
                    if runs == 0:
                        continue
                    inner = self.read(branch, times * runs)
                    entries, flops = entries + inner[0], flops + inner[1]
        return entries, flops

    def _called(self, instruction: hlo.Instruction) -> list[hlo.Computation]:
        return [self.module.computations[name] for name in instruction.called]

    def _runs(self, computation: hlo.Computation, caller: hlo.Instruction) -> Iterator[tuple[hlo.Computation, int]]:
        if caller.opcode != "while":
            yield from ((each, 1) for each in self._called(caller))
            return
        known = trips(self.module, computation, caller)
        runs = 1 if known is None else known
        if known is None:
            self.notes.append(f"the trips of loop {caller.name} depend on what is computed; it is counted once")
        for role, times in (("condition", runs + 1 if known else 1), ("body", runs)):
            yield self.module.computations[caller.attribute(role).lstrip("%")], times

    def _entries(
        self, computation: hlo.Computation, instruction: hlo.Instruction, found: Collective, times: int
    ) -> Iterator[Entry]:
        """An entry for everybody who asked for a part of a collective."""
        axes, phase = axes_of(found.instruction, self.mesh), found.phase == "start"
        for came, part in by_origin(self.module, computation, instruction, found):
            yield Entry(
                part.kind,
                axes,
                times,
                part.wire_bytes * times,
                part.dtype,
                came.source,
                came.equation,
                came.step,
                instruction.name,
                phase,
                len(part.arrays),
                part.group,
                len(found.arrays),
            )


def _size(part: tuple[list[Entry], int]) -> tuple[int, int]:
    return sum(entry.wire_bytes for entry in part[0]), part[1]


def _text_of(compiled: Any) -> str:
    if isinstance(compiled, str):
        return compiled
    if not hasattr(compiled, "as_text"):
        raise PlanError(
            f"cannot read what a {type(compiled).__name__} sends: it is not compiled.\n"
            "  Give jax.jit(f).lower(...).compile(), or the text of its optimized HLO."
        )
    return compiled.as_text()


def _mesh_of(compiled: Any) -> Any:
    """The mesh that a program's inputs lie on, or its outputs; else the one in force."""
    if not isinstance(compiled, str):
        for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
            if isinstance(sharding, jax.NamedSharding) and not sharding.mesh.empty:
                return sharding.mesh
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise PlanError(
            "cannot name the mesh axes of this program: nothing it takes or makes lies on a mesh.\n"
            "  Give mesh=, or call inside `with jax.set_mesh(mesh):`."
        )
    return mesh


def sizes_of(mesh: Any) -> dict[str, int]:
    """The sizes of a mesh's axes, in its order.

    Args:
        mesh: a mesh, or a mapping.

    Raises:
        PlanError: it is neither.
    """
    try:
        sizes = dict(getattr(mesh, "shape", mesh))
    except (TypeError, ValueError):
        sizes = {"": None}
    if not all(isinstance(size, (int, np.integer)) for size in sizes.values()):
        raise PlanError(
            f"cannot name the mesh axes with mesh={shown(mesh)}: it is no mesh.\n"
            "  Give a mesh, or sizes of its axes in its order, such as {'x': 4, 'y': 2}."
        )
    return sizes
