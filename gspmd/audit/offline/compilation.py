"""`compile_offline`: the real compiler's answer for a machine that is not there: does it fit, and what will it cost?"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gspmd.annotate.errors import PlanError, shown
from gspmd.audit.hlo import Module, parse
from gspmd.audit.ledgers.ledger import Ledger
from gspmd.audit.ledgers.reader import of_module
from gspmd.audit.offline import memory
from gspmd.audit.offline.tpu import Topology, topology
from gspmd.audit.simulation.simulator import timeline
from gspmd.audit.simulation.timeline import Timeline
from gspmd.display.plain import printable
from gspmd.display.printed import Printed
from gspmd.display.units import amount_of_bytes, amount_of_flops, amount_of_seconds
from gspmd.tracing.program_plan import ProgramPlan
from gspmd.tracing.trace import check_call, trace

_FULL = re.compile(r"RESOURCE_EXHAUSTED")
_NEEDED = re.compile(r"(?:required for HLO temporaries \(|Used )([\d.]+)([KMGTP]?)")
_OFFERED = re.compile(r"(?:available HBM \(|Used [\d.]+[KMGTP]? of )([\d.]+)([KMGTP]?)")
_BINARY = re.compile(r"\b([\d.]+)([KMGTP])(?=[\s.,;)]|$)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}


_KEPT = 64  # buffers that a report lists


@dataclass(frozen=True, repr=False)
class Report(Printed):
    """What the compiler made of a function for a machine that is not there; figures are per device and execution.

    Attributes:
        topology: the machine.
        mesh: sizes of the mesh axes.
        fits: whether the compiler could place everything in the memory of one device.
        argument_bytes: what goes in: parameters, optimizer state, batch. Donated arguments are given back as results.
        output_bytes: results that are not donated arguments.
        temporary_bytes: what the program holds besides, at its peak; with the results, where it does not fit.
        hbm_bytes: of one device.
        plan: what gspmd planned.
        ledger, timeline: of the compiled program; None where it does not fit.
        module, hlo: the scheduled program, parsed and as text; nothing where it does not fit.
        buffers: the largest arrays of one device, largest first: arguments, and what the program makes. Where it does
            not fit these are the values of the traced function, of which the compiler would have merged some.
        compile_seconds: tracing, lowering, compiling.
        reason: the compiler's own words where it does not fit; but for its units, which are powers of 1024.
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
    buffers: tuple[memory.Buffer, ...] = field(repr=False)
    compile_seconds: float = 0.0
    reason: str = ""

    @property
    def bytes_per_device(self) -> int:
        """Bytes that one device holds at the peak."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes

    @property
    def flops(self) -> int:
        """Operations of the matrix products as compiled; as planned where it does not fit."""
        return self.ledger.flops if self.ledger else self.plan.flops

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends; as planned where it does not fit."""
        return self.ledger.wire_bytes if self.ledger else self.plan.wire_bytes

    def to_json(self) -> str:
        """The figures as JSON; seconds, hidden and exposed are null where it does not fit."""
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
            "step_seconds": line and line.step_seconds,
            "compute_seconds": line and line.compute_seconds,
            "hidden_seconds": line and line.hidden_seconds,
            "exposed_seconds": line and line.exposed_seconds,
            "wire_bytes": self.wire_bytes,
            "flops": self.flops,
            "mfu": line and line.mfu,
            "memory_bound_share": line and line.memory_share,
            "compile_seconds": self.compile_seconds,
            "reason": self.reason,
        }
        return json.dumps(figures, indent=2)

    def summary(self) -> Table:
        """Does it fit, and what will it cost: the figures as a table of two columns."""
        table = Table(show_header=False, box=None, pad_edge=False)
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        verdict = "[bold green]fits[/]" if self.fits else "[bold red]does not fit[/]"
        held, room = amount_of_bytes(self.bytes_per_device), amount_of_bytes(self.hbm_bytes)
        parts = (f"{amount_of_bytes(n)} {name}" for n, name in self._parts())
        table.add_row("machine", f"{self.topology.num_devices} {self.topology.chip.name} devices, mesh {mesh}")
        table.add_row("memory", f"{verdict}: {held} of {room} per device ({', '.join(parts)})")
        table.add_row("work", f"{amount_of_flops(self.flops)} per device in matrix products")
        table.add_row("sent", f"{amount_of_bytes(self.wire_bytes)} per device")
        if self.timeline:
            table.add_row("time", self.timeline.summary)
        table.add_row("compiled in", amount_of_seconds(self.compile_seconds))
        return table

    def _parts(self) -> list[tuple[int, str]]:
        return [
            (self.argument_bytes, "arguments"),
            (self.output_bytes, "results"),
            (self.temporary_bytes, "temporaries"),
        ]

    def __rich__(self) -> Group:
        shown: list[Any] = [self.summary()]
        if not self.fits:
            shown += [Text(f"\n{self.reason}", style="red"), memory.buffers_table(self.buffers, 5)]
        if self.ledger and self.timeline:
            comparison = self.ledger.compare(self.plan)
            shown += ["", comparison.table()]
            if comparison.differing:
                shown.append(comparison.steps_table())
            shown += ["", self.timeline.table()]
        return Group(*shown)

    def __repr__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        held, room = amount_of_bytes(self.bytes_per_device), amount_of_bytes(self.hbm_bytes)
        figures = f"{verdict}, {held} of {room} per device"
        return printable(f"<Report for {self.topology.name}: {figures}; print it for its tables>")


def compile_offline(
    fn: Callable,
    *abstract_args: Any,
    topology: "Topology | str",
    mesh: Any = None,
    donate_argnums: Sequence[int] = (),
    flops: float = 0,
    progress: Callable[[str], None] = lambda what: None,
) -> Report:
    """Compile a function for a machine that is not there, with the machine's own compiler.

    Args:
        fn: any function that JAX traces.
        abstract_args: `jax.ShapeDtypeStruct`s with shardings over a mesh of `topology`.
        topology: such as `"tpu-v4:4x4x4"`, or `gspmd.audit.topology(...)`.
        mesh: the mesh, if the arguments do not say it: a `Mesh`, or sizes of its axes.
        donate_argnums: arguments whose memory the results may take, such as a training state.
        flops: model FLOPs of one execution over all devices, for the MFU; the program's own products if not given.
        progress: told what begins: "planning", "lowering", "compiling", "reading".

    Returns:
        A `Report`; where the compiler runs out of memory one that says so, with the plan's figures.

    Raises:
        PlanError: no such topology, a mesh that does not fit it, no libtpu, or arguments that lie on no mesh.

    Example:
        >>> topology = gspmd.audit.topology("tpu-v4:4x4x4")             # doctest: +SKIP
        >>> mesh = topology.mesh({"x": 4, "y": 4, "z": 4})              # doctest: +SKIP
        >>> print(compile_offline(step, *args, topology=topology))      # doctest: +SKIP
    """
    target = _topology(topology)
    check_call("compile", fn, abstract_args)
    if not isinstance(flops, (int, float)) or isinstance(flops, bool) or not flops >= 0:
        raise PlanError(f"cannot count {shown(flops)} operations.\n  Give flops= of one execution, as a number.")
    placed = _mesh(mesh, target, abstract_args)
    sizes, began = dict(placed.shape), time.perf_counter()
    held = tuple(memory.arguments(abstract_args, sizes))
    with jax.set_mesh(placed):
        progress("planning")
        plan = trace(fn, *abstract_args)
        compiled, reason = None, _overfull(held, target)
        if not reason:
            progress("lowering")
            lowered = jax.jit(fn, donate_argnums=tuple(donate_argnums)).lower(*abstract_args)
            progress("compiling")
            compiled, reason = _compile(lowered)
    seconds = time.perf_counter() - began
    if compiled is None:
        with jax.set_mesh(placed):
            values = memory.values(jax.make_jaxpr(fn)(*abstract_args).jaxpr)
        return _too_large(target, sizes, plan, (*held, *values), reason, seconds)
    progress("reading")
    text, stats = compiled.as_text(), compiled.memory_analysis()
    module = parse(text)
    share = flops / target.num_devices
    needed = stats.argument_size_in_bytes, stats.output_size_in_bytes - stats.alias_size_in_bytes
    buffers = sorted([*held, *memory.temporaries(module)], key=lambda buffer: -buffer.bytes)[:_KEPT]
    return Report(
        target, sizes, True, *needed, stats.temp_size_in_bytes, target.chip.hbm_bytes, plan,
        of_module(module, sizes), timeline(module, target.chip, sizes, flops=share, torus=target.rings(placed)),
        module, text, tuple(buffers), seconds,
    )  # fmt: skip


def _topology(given: Topology | str) -> Topology:
    if isinstance(given, Topology):
        return given
    if not isinstance(given, str):
        raise PlanError(
            f"cannot compile for topology={shown(given)}: it is no topology.\n"
            "  Give a name, such as 'tpu-v4:4x4x4', or gspmd.audit.topology('tpu-v4:4x4x4')."
        )
    return topology(given)


def _mesh(given: Any, target: Topology, args: Any) -> jax.sharding.Mesh:
    """The mesh of the arguments, or the one given; both over all devices of the slice and no others."""
    meshes = [leaf.sharding.mesh for leaf in jax.tree.leaves(args) if _is_placed(leaf)]
    if isinstance(given, Mapping):
        meshes.append(target.mesh(given))
    elif isinstance(given, jax.sharding.Mesh):
        meshes.append(given)
    elif given is not None:
        raise PlanError(
            f"cannot compile for {target.name} with mesh={shown(given)}: it is no mesh.\n"
            "  Give a mesh of its devices, or sizes of its axes, such as {'x': 4, 'y': 4, 'z': 4}."
        )
    if not meshes:
        raise PlanError(
            f"cannot compile for {target.name}: no argument lies on a mesh.\n"
            "  Give mesh=, such as mesh={'x': 4, 'y': 4, 'z': 4}, or arguments with shardings."
        )
    for mesh in meshes:
        if set(mesh.devices.flat) != set(target.devices):
            raise PlanError(
                f"cannot compile for {target.name}: an argument, or mesh=, lies on a mesh of {mesh.devices.size} other "
                f"devices.\n  Make the mesh with topology({target.name!r}).mesh(...), over all {target.num_devices}."
            )
        if mesh != meshes[-1]:
            raise PlanError(
                f"cannot compile for {target.name}: there are two meshes, {_axes(mesh)} and {_axes(meshes[-1])}.\n"
                "  Place every argument on the same one."
            )
    return meshes[-1]


def _is_placed(leaf: Any) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, jax.NamedSharding) and isinstance(sharding.mesh, jax.sharding.Mesh)


def _axes(mesh: jax.sharding.Mesh) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def _overfull(held: Sequence[memory.Buffer], target: Topology) -> str:
    """Why there is no need to ask the compiler; empty where there is."""
    given, room = sum(buffer.bytes for buffer in held), target.chip.hbm_bytes
    if given <= room:
        return ""
    return f"Its arguments alone take {amount_of_bytes(given)} per device, and a device has {amount_of_bytes(room)}."


def _compile(lowered: Any) -> tuple[Any, str]:
    """The compiled program, or None and the compiler's words where the memory of a device does not hold it."""
    try:
        return lowered.compile(), ""
    except jax.errors.JaxRuntimeError as error:
        if not _FULL.search(str(error)):
            raise
        return None, str(error).partition("RESOURCE_EXHAUSTED: ")[2].strip()


def _too_large(
    target: Topology,
    mesh: Mapping[str, int],
    plan: ProgramPlan,
    buffers: tuple[memory.Buffer, ...],
    reason: str,
    seconds: float,
) -> Report:
    given = sum(buffer.bytes for buffer in buffers if buffer.kind == "argument")
    room = target.chip.hbm_bytes
    needed = max(0, _amount(_NEEDED, reason) - given)  # the compiler counts arguments and results among them
    room = _amount(_OFFERED, reason) or room
    first = _BINARY.sub(lambda found: amount_of_bytes(_amount(_BINARY, found[0])), reason.partition("\n")[0])
    buffers = tuple(sorted(buffers, key=lambda buffer: -buffer.bytes)[:_KEPT])
    return Report(target, mesh, False, given, 0, needed, room, plan, None, None, None, "", buffers, seconds, first)


def _amount(pattern: re.Pattern, text: str) -> int:
    found = pattern.search(text)
    return round(float(found[1]) * _UNITS[found[2]]) if found else 0
