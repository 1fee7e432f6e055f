"""`Report`: the memory and the time of a function that was compiled for a machine that is not attached."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gspmd.audit.hlo.module import Module
from gspmd.audit.ledgers.ledger import Ledger
from gspmd.audit.offline.memory import AllocatedArray, buffers_table
from gspmd.audit.offline.topology import Topology
from gspmd.audit.simulation.timeline import Timeline
from gspmd.display.plain import printable
from gspmd.display.printed import Printed
from gspmd.display.units import amount_of_bytes, amount_of_flops, amount_of_seconds
from gspmd.tracing.program_plan import ProgramPlan


@dataclass(frozen=True, repr=False)
class Report(Printed):
    """The report on a function compiled for a machine that is not attached; figures are per device and execution.

    If the program was not compiled because it does not fit in memory, the figures come from the plan.

    Attributes:
        topology: the machine for which the function was compiled.
        mesh: sizes of the mesh axes.
        fits: whether the program fits in the memory of one device.
        argument_bytes: bytes of all arguments (parameters, optimizer state, batch), including donated arguments.
        output_bytes: bytes of the results that do not reuse the memory of a donated argument.
        temporary_bytes: peak bytes of everything else. If the program was not compiled, this includes the results.
        hbm_bytes: bytes of memory of one device.
        plan: the plan of the function.
        ledger, timeline: the ledger and the timeline of the compiled program, or None if the program was not compiled.
        module: the scheduled program, parsed; None if the program was not compiled.
        hlo: the text of the scheduled program; empty if the program was not compiled.
        buffers: the largest arrays on one device (arguments and temporaries), largest first. If the program was not
            compiled, the temporaries are the values of the traced function, some of which the compiler would have
            merged.
        compile_seconds: seconds of tracing, lowering and compiling.
        reason: the reason why the program does not fit; empty if it fits. If the compiler refused the program, this is
            the compiler's message, with binary units converted to decimal units.
        peak_bytes: the largest number of bytes that arguments, results and temporaries take together at any time, by
            the compiler's assignment of buffers; 0 if the program was not compiled.
        host_bytes: bytes of arguments, results and temporaries in host memory, for one device; 0 if the program was not
            compiled. They are not part of the other figures.
    """

    topology: Topology
    mesh: Mapping[str, int]
    fits: bool
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    hbm_bytes: int
    plan: ProgramPlan = field(repr=False)
    ledger: Ledger | None = field(repr=False)
    timeline: Timeline | None = field(repr=False)
    module: Module | None = field(repr=False)
    hlo: str = field(repr=False)
    buffers: tuple[AllocatedArray, ...] = field(repr=False)
    compile_seconds: float = 0.0
    reason: str = ""
    peak_bytes: int = 0
    host_bytes: int = 0

    @property
    def bytes_per_device(self) -> int:
        """Sum of the bytes of arguments, results and temporaries on one device."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes

    @property
    def flops(self) -> int:
        """FLOPs of the matrix products in the compiled program, or in the plan if the program was not compiled."""
        return self.ledger.flops if self.ledger else self.plan.flops

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends in the compiled program, or in the plan if the program was not compiled."""
        return self.ledger.wire_bytes if self.ledger else self.plan.wire_bytes

    @property
    def network_bytes(self) -> int:
        """Bytes that one device sends over the network between GPU nodes or TPU slices."""
        return self.ledger.network_bytes if self.ledger else self.plan.network_bytes(self.mesh, self.topology.chip)

    @property
    def is_lower_bound(self) -> bool:
        """Whether the figures are lower bounds, because a loop with a data-dependent trip count is counted once.

        In serving, expert layers without slots have such loops, over the blocks of rows that are routed to each expert.
        """
        return self.ledger is not None and any("depend on computed values" in note for note in self.ledger.notes)

    def to_json(self) -> str:
        """Return the figures as JSON; the figures of the timeline are null if the program was not compiled."""
        line = self.timeline
        figures = {
            "topology": self.topology.name,
            "mesh": dict(self.mesh),
            "fits": self.fits,
            "bytes_per_device": self.bytes_per_device,
            "argument_bytes": self.argument_bytes,
            "output_bytes": self.output_bytes,
            "temporary_bytes": self.temporary_bytes,
            "hbm_bytes": self.hbm_bytes,
            "host_bytes": self.host_bytes,
            "step_seconds": line and line.step_seconds,
            "compute_seconds": line and line.compute_seconds,
            "hidden_seconds": line and line.hidden_seconds,
            "exposed_seconds": line and line.exposed_seconds,
            "wire_bytes": self.wire_bytes,
            "flops": self.flops,
            "mfu": line and line.mfu,
            "is_lower_bound": self.is_lower_bound,
            "launch_seconds": line and line.launch_seconds,
            "host_seconds": line and line.host_seconds,
            "planned_wire_bytes": self.plan.wire_bytes,
            "network_bytes": self.network_bytes,
            "planned_network_bytes": self.plan.network_bytes(self.mesh, self.topology.chip),
            "warnings": line and line.warnings,
            "notes": line and line.notes,
            "memory_bound_share": line and line.memory_share,
            "compile_seconds": self.compile_seconds,
            "reason": self.reason,
        }
        return json.dumps(figures, indent=2)

    def summary(self) -> Table:
        """Return a two-column table that says whether the program fits in memory, and what it costs."""
        table = Table(show_header=False, box=None, pad_edge=False)
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        verdict = "[bold green]fits[/]" if self.fits else "[bold red]does not fit[/]"
        held, room = amount_of_bytes(self.bytes_per_device), amount_of_bytes(self.hbm_bytes)
        # A program that was not compiled has only known parts: its arguments, and what a refusing compiler says.
        parts = (f"{amount_of_bytes(n)} {name}" for n, name in self._parts() if n or self.ledger)
        slices = f" in {self.topology.slices} slices" if self.topology.slices > 1 else ""
        table.add_row("machine", f"{self.topology.num_devices} {self.topology.chip.name} devices{slices}, mesh {mesh}")
        table.add_row("memory", f"{verdict}: {held} of {room} per device ({', '.join(parts)})")
        if self.host_bytes:
            table.add_row("host memory", f"{amount_of_bytes(self.host_bytes)} per device")
        least, planned = "at least " if self.is_lower_bound else "", "" if self.ledger else ", as planned"
        table.add_row("work", f"{least}{amount_of_flops(self.flops)} per device in matrix products{planned}")
        table.add_row("sent", f"{amount_of_bytes(self.wire_bytes)} per device{planned}{self._over_the_network}")
        if self.timeline:
            table.add_row("time", f"{least}{self.timeline.summary}")
        table.add_row("compiled in" if self.ledger else "planned in", amount_of_seconds(self.compile_seconds))
        return table

    @property
    def _over_the_network(self) -> str:
        chip = self.topology.chip
        if chip.nodes(self.mesh) == 1:
            return ""
        away, planned = amount_of_bytes(self.network_bytes), self.plan.network_bytes(self.mesh, chip)
        beside = f" ({amount_of_bytes(planned)} planned)" if planned != self.network_bytes else ""
        return f", {away} of it over the network between {'nodes' if chip.is_switch else 'slices'}{beside}"

    def _parts(self) -> list[tuple[int, str]]:
        return [
            (self.argument_bytes, "arguments"),
            (self.output_bytes, "results"),
            (self.temporary_bytes, "temporaries"),
        ]

    def tables(self, details: bool = False) -> Group:
        """Return the summary, followed by the tables of planned and compiled bytes and the table of the timeline.

        Args:
            details: whether every step that differs from the plan has a separate row. By default, steps share one row
                if one collective, which belongs to another step, sends the bytes of all of them.
        """
        shown: list[Any] = [self.summary()]
        if not self.fits:
            shown += [Text(f"\n{self.reason}", style="red"), buffers_table(self.buffers, 5)]
        if self.ledger and self.timeline:
            comparison = self.ledger.compare(self.plan)
            shown += ["", comparison.table()]
            if comparison.differing:
                shown.append(comparison.steps_table(together=not details))
            shown += ["", self.timeline.table(), *self.timeline.remarks()]
        return Group(*shown)

    def __rich__(self) -> Group:
        return self.tables()

    def __repr__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        held, room = amount_of_bytes(self.bytes_per_device), amount_of_bytes(self.hbm_bytes)
        figures = f"{verdict}, {held} of {room} per device"
        return printable(f"<Report for {self.topology.name}: {figures}; print it for its tables>")
