"""`timeline`: a compiled program in simulated time, and how much of its communication is hidden behind computation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, prod
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from gspmd.annotate.errors import PlanError, article, shown
from gspmd.audit.arguments import mesh_sizes
from gspmd.audit.hlo.module import Module
from gspmd.audit.simulation.interpreter import Walk
from gspmd.audit.simulation.links import Torus
from gspmd.audit.simulation.machine import Machine, Span
from gspmd.display.plain import printable
from gspmd.display.printed import Printed
from gspmd.display.tables import Column, Sheet
from gspmd.display.units import amount_of_seconds, axes_text
from gspmd.hardware import chips
from gspmd.hardware.chips import Chip
from gspmd.planner.drawing import COLORS

_ROUNDING = 1e-12
"""Seconds by which sums of seconds may miss one another."""


@dataclass(frozen=True)
class Part:
    """All executions of one category on the same rows.

    Attributes:
        category: a collective's kind, `einsum`, `other` or `copy`.
        axes: mesh axes of a collective.
        count: executions.
        seconds: of all of them, from the start of each to its end.
        exposed: of these, seconds for which nothing was computed because of them.
    """

    category: str
    axes: tuple[str, ...]
    count: int
    seconds: float
    exposed: float


@dataclass(frozen=True, repr=False)
class Timeline(Printed):
    """One device running a compiled program once; figures are seconds, every iteration of every loop counted.

    Attributes:
        compute_seconds: in which the device computes, or waits for its own memory.
        hidden_seconds: of these, in which a collective is under way as well.
        exposed_seconds: in which it waits for a collective.
        memory_seconds: of `compute_seconds`, what main memory bounds: instructions whose bytes take longer at its full
            bandwidth than their matrix products at the peak, and waiting for copies. What is not a product and touches
            main memory at all is among them; the compiler's estimate of such an instruction is the time counted.
        flops: operations of the matrix products: two per multiplication.
        model_flops: what `mfu` divides: as given, or else `flops`.
        spans: what to draw, in the order in which things end. A loop is drawn once, with how often it runs.
        parts: the same summed up, by category and mesh axes, longest first.
        chip: that it runs on.
        mesh: sizes of the mesh axes.
        name: of the program.
        notes: what could not be counted.
    """

    compute_seconds: float
    hidden_seconds: float
    exposed_seconds: float
    memory_seconds: float
    flops: int
    model_flops: float
    spans: tuple[Span, ...] = field(repr=False)
    parts: tuple[Part, ...] = field(repr=False)
    chip: Chip
    mesh: Mapping[str, int]
    name: str = ""
    notes: tuple[str, ...] = ()

    @property
    def step_seconds(self) -> float:
        """The whole program once."""
        return self.compute_seconds + self.exposed_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: `model_flops` over what the chip could do meanwhile in bfloat16."""
        return self.model_flops / (self.step_seconds * self.chip.flops("bfloat16")) if self.step_seconds else 0.0

    @property
    def memory_share(self) -> float:
        """The share of `compute_seconds` that main memory bounds."""
        return self.memory_seconds / self.compute_seconds if self.compute_seconds else 0.0

    @property
    def rows(self) -> tuple[str, ...]:
        """Rows of a drawing: compute, the mesh axes of more than one device, and whatever else is used."""
        axes = [axis for axis, size in self.mesh.items() if size > 1]
        used = [row for span in self.spans for row in span.rows]
        last = [row for row in dict.fromkeys(used) if row not in ("compute", "memory", *axes)]
        return ("compute", *axes, *last, *(["memory"] if "memory" in used else []))

    def lanes(self, row: str) -> list[tuple[Span, int]]:
        """The spans on a row in the order in which they start, loops aside, each with the first lane that is free."""
        ends: list[float] = []
        found = []
        spans = (span for span in self.spans if row in span.rows and span.category != "loop")
        for span in sorted(spans, key=lambda span: span.start):
            lane = next((lane for lane, end in enumerate(ends) if end <= span.start + _ROUNDING), len(ends))
            ends[lane : lane + 1] = [span.start + span.seconds]
            found.append((span, lane))
        return found

    def table(self) -> Sheet:
        """The parts as a rich table, longest first, and the step as its last row; `summary` says the rest."""
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        chips = f"{prod(self.mesh.values())} {self.chip.describe(self.mesh)}"
        title = f"timeline of {self.name or 'a program'}: one of {chips}, {mesh}"
        sheet = Sheet(title, _COLUMNS)
        for part in self.parts:
            sheet.add(f"[{COLORS.get(part.category, 'default')}]{part.category}[/]", *_figures(part))
        sheet.add("step", "", "", "", *_amounts(self.step_seconds, self.exposed_seconds), total=True)
        return sheet

    @property
    def summary(self) -> str:
        """One line with the figures of the step."""
        step, compute, exposed, hidden = _amounts(
            self.step_seconds, self.compute_seconds, self.exposed_seconds, self.hidden_seconds
        )
        return (
            f"{step} = {compute} computing ({self.memory_share:.0%} bound by memory) + {exposed} waiting for "
            f"collectives; {hidden} of collectives hidden; MFU {self.mfu:.1%}"
        )

    def __rich__(self) -> Group:
        return Group(self.table(), Text(self.summary), *(Text(f"note: {note}") for note in self.notes))

    def __repr__(self) -> str:
        return printable(f"<Timeline of {self.name or 'a program'} on {self.chip.name}: {self.summary}>")


_COLUMNS = (
    Column("what runs"),
    Column("mesh axes"),
    Column("count", "right", goes=2),
    Column("each", "right", goes=1),
    Column("together", "right"),
    Column("exposed", "right"),
)


def _figures(part: Part) -> tuple[str, ...]:
    amounts = _amounts(part.seconds / part.count, part.seconds)
    exposed = amount_of_seconds(part.exposed) if part.category not in ("einsum", "other", "copy") else ""
    return axes_text(part.axes), str(part.count), *amounts, exposed


def _amounts(*seconds: float) -> tuple[str, ...]:
    return tuple(map(amount, seconds))


def amount(seconds: float) -> str:
    """Seconds for a reader; what is less than a nanosecond is rounding."""
    return amount_of_seconds(seconds if seconds >= 1e-9 else 0)


def of_a_timeline(given: Any, doing: str) -> Timeline:
    """The timeline, refused where it is anything else.

    Raises:
        PlanError: it is no timeline.
    """
    if not isinstance(given, Timeline):
        raise PlanError(
            f"cannot {doing} {article(type(given).__name__)}: it is no timeline.\n"
            "  Give what gspmd.audit.timeline(...) returns, or the timeline of compile_offline's report."
        )
    return given


def path_of(given: Any) -> Path:
    """The file to write.

    Raises:
        PlanError: it is no path.
    """
    if not isinstance(given, str | PathLike):
        raise PlanError(f"cannot write into {shown(given)}: it is no path.\n  Give the name of a file.")
    return Path(given)


def timeline(
    module: Module, chip: Chip | str, mesh: Mapping[str, int], *, flops: float = 0, torus: Torus | None = None
) -> Timeline:
    """Simulate one device running a compiled program once.

    - **Computing**: an instruction takes the cycles that the TPU compiler estimates for it, over the chip's clock (of
      both cores together, where a chip has two). One without an estimate takes the longer of its matrix products at
      the chip's peak and its bytes at the bandwidth of main memory; what only names something is free.
    - **Collectives** take the seconds of `gspmd.hardware.links.collective_seconds`, each mesh axis being one ring
      or those of `torus`; a permute by the same number of places along one axis (a ring's step) takes its bytes over
      one link for each place, in one direction (`gspmd.audit.simulation.links`). Groups that no mesh axes make are one
      ring.
    - **Asynchronous ones** run beside what stands between start and done; at done the device waits for what is left.
    - **Links**: a mesh axis has two directions, a collective but for a shift fills both on all of its axes, and those
      that fill the same direction of an axis at the same time share it evenly: each goes on as slowly as on the most
      crowded of its links, and what that leaves idle on others is left idle. Hops take time, but no bandwidth.
    - **Copies** between memories (`copy-start`, asynchronous slices) take their bytes at the bandwidth of main memory,
      share it with each other, and waiting for one counts as computing.
    - **Loops** run until an iteration begins as the last one began (at once, unless something is under way across its
      border); that one counts for the rest. Of a conditional, the branch that takes longest is taken.

    Args:
        module: an optimized and scheduled program, `gspmd.audit.hlo.parse(compiled.as_text())`.
        chip: that it was compiled for, or is to be thought of as running on.
        mesh: sizes of the mesh axes, in the order of the devices.
        flops: of the model, per device and step, for `mfu`; those of the program's matrix products if not given.
        torus: mesh axis -> sizes of the torus axes that it is laid over (`Topology.rings`); one if not given.

    Returns:
        A `Timeline`, to print; `gspmd.audit.gantt.draw` and `gspmd.audit.perfetto.write` make pictures of it.

    Raises:
        PlanError: `module` is no parsed program or `mesh` no mesh, or no chip has this name.

    Example:
        >>> from gspmd.audit import hlo
        >>> module = hlo.parse('''HloModule m, is_scheduled=true
        ...
        ... ENTRY %main (p: bf16[8,128]) -> bf16[8,512] {
        ...   %p = bf16[8,128]{1,0} parameter(0)
        ...   %n = bf16[8,128]{1,0} negate(%p), backend_config={"window_config":{"estimated_cycles":"1050"}}
        ...   ROOT %g = bf16[8,512]{1,0} all-gather(%n), replica_groups={{0,1,2,3}}, dimensions={1}
        ... }''')
        >>> found = timeline(module, "tpu-v4", {"x": 4})
        >>> round(found.compute_seconds * 1e6, 3), round(found.exposed_seconds * 1e6, 3)
        (1.0, 2.068)

    Leaves out: what it costs to launch an instruction, a loop or a program; skew between devices, and the barriers in
    which they wait for one another; that collectives, copies and computing take bandwidth of main memory from each
    other, and from the cores; the latency of a copy; how a collective is cut into pieces, and what it needs on the
    cores; padding to tiles; routing of anything that is no shift; mesh axes that share one torus axis; links between
    slices; clocks other than the nominal.

    Source: for the links the *scaling book* (jax-ml), parts 2 and 3; for cycles the TPU compiler, `backend_config`.
    """
    if not isinstance(module, Module):
        raise PlanError(
            f"cannot simulate a {type(module).__name__}: it is no parsed program.\n"
            "  Give gspmd.audit.hlo.parse(compiled.as_text())."
        )
    if not isinstance(flops, Real) or isinstance(flops, bool) or not isfinite(flops) or flops < 0:
        raise PlanError(f"cannot count {shown(flops)} operations.\n  Give flops= of one execution, as a number.")
    mesh = mesh_sizes(mesh)
    walk = Walk(module, chips.chip(chip), mesh, torus or {})
    walk.run(module.entry, [])
    walk.machine.drain()
    sums = walk.machine.sums
    return Timeline(
        sums["compute"],
        sums["hidden"],
        sums["exposed"],
        sums["memory"],
        int(sums["flops"]),
        flops or sums["flops"],
        tuple(walk.machine.spans),
        _parts(walk.machine),
        walk.chip,
        mesh,
        module.name,
        tuple(dict.fromkeys(walk.notes)),
    )


def _parts(machine: Machine) -> tuple[Part, ...]:
    sums = machine.sums
    keys = dict.fromkeys(key[:2] for key in sums if isinstance(key, tuple) and key[0] != "loop")
    parts = [
        Part(category, () if rows[0] in ("compute", "memory") else rows, *(sums[category, rows, n] for n in _SUMMED))
        for category, rows in keys
    ]
    return tuple(sorted(parts, key=lambda part: -part.seconds))


_SUMMED = ("count", "seconds", "exposed")
