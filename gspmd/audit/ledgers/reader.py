"""`gspmd.ledger`: makes the ledger of a compiled program from its optimized HLO."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import jax

from gspmd.annotate.errors import PlanError, article
from gspmd.audit.arguments import mesh_sizes
from gspmd.audit.hlo import Computation, Instruction, Module, parse
from gspmd.audit.hlo.collectives import Collective, collective
from gspmd.audit.hlo.flops import product_flops, uncounted
from gspmd.audit.hlo.loops import trips
from gspmd.audit.hlo.origin import by_origin
from gspmd.audit.hlo.replica_groups import axes_of, shared_node
from gspmd.audit.hlo.slices import of_all_slices
from gspmd.audit.ledgers.entries import Entry
from gspmd.audit.ledgers.ledger import Ledger
from gspmd.audit.ledgers.slices import whole_permutes
from gspmd.display.units import mesh_text
from gspmd.hardware.chips import Chip, chip_of_device
from gspmd.hardware.links import network_bytes
from gspmd.lowerings.in_force import slices_of


def ledger(compiled: Any, mesh: Any = None) -> Ledger:
    """List the collectives of a compiled program, and count the FLOPs of its matrix products.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()`, for any platform, or the text of its optimized HLO.
        mesh: a mesh, or a mapping from the mesh axes, in order, to their sizes. The default is the mesh of the
            program's inputs or outputs; if these have no mesh, the default is the current mesh.

    Returns:
        A `Ledger`, which lists every collective with its mesh axes, number of runs, bytes, dtype, planned step and
        source line.

    Raises:
        PlanError: `compiled` is not a compiled program; `mesh` is not a mesh; no mesh is given or found; or the mesh
            and the program have different numbers of devices.
        HloError: the text is not an HLO module.

    Example:
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> x = jax.ShapeDtypeStruct((4, 4), "float32", sharding=jax.NamedSharding(mesh, jax.P("x")))
        >>> ledger(jax.jit(lambda x: x @ x).lower(x).compile()).flops
        128

    Differs: `compiled.cost_analysis()` counts the body of a loop only once, and does not list collectives.
    """
    text = _text_of(compiled)
    mesh = _mesh_of(compiled) if mesh is None else mesh
    sizes, slices = mesh_sizes(mesh), slices_of(mesh)
    chip = chip_of_device(mesh.devices.flat[0].device_kind) if slices > 1 else None
    if chip is not None:
        chip = replace(chip, node_devices=prod(sizes.values()) // slices)
    return of_module(of_all_slices(parse(text), mesh), sizes, chip)


def of_module(module: Module, mesh: Mapping[str, int], chip: Chip | None = None) -> Ledger:
    """Return the ledger of a parsed module; `chip` tells how many devices share a node or a slice."""
    if module.devices not in (1, prod(mesh.values())):
        raise PlanError(
            f"cannot name the mesh axes of {module.name}: {module.devices} devices run it, and the mesh "
            f"{mesh_text(mesh)} has {prod(mesh.values())}.\n  Give mesh=, the mesh that it was compiled for."
        )
    reader = _ModuleReader(module, mesh, chip)
    entries, flops = reader.read(module.entry, 1)
    notes = tuple(dict.fromkeys(reader.notes))
    slices = 1 if chip is None or chip.is_switch else chip.nodes(mesh)
    if slices > 1:
        entries = whole_permutes(entries)
    return Ledger(tuple(entries), flops, dict(mesh), module.name, notes, slices)


class _ModuleReader:
    """A reader of a module; it multiplies the figures of a loop's body by the loop's trip count."""

    def __init__(self, module: Module, mesh: Mapping[str, int], chip: Chip | None):
        self.module, self.mesh = module, mesh
        self.chip = chip if chip is not None and chip.nodes(mesh) > 1 else None
        self.notes: list[str] = []
        self.devices = prod(mesh.values())

    def read(self, computation: Computation, times: int) -> tuple[list[Entry], int]:
        """Return the entries and the total FLOPs of a computation that runs `times` times."""
        entries: list[Entry] = []
        flops = 0
        for instruction in computation.instructions:
            flops += times * product_flops(self.module, computation, instruction)
            for name, target in uncounted(self.module, computation, instruction):
                self.notes.append(f"the operations of custom call {name} ({target}) are not counted")
            sent = collective(self.module, computation, instruction, self.devices)
            if sent and sent.phase != "done" and sent.group > 1:
                entries += self._entries(computation, instruction, sent, times)
            if instruction.opcode == "conditional":
                inner = max((self.read(branch, times) for branch in self._called(instruction)), key=_size)
                entries, flops = entries + inner[0], flops + inner[1]
            elif instruction.opcode in ("while", "call", "async-start") and not sent:
                for branch, runs in self._runs(computation, instruction):
                    if runs == 0:
                        continue
                    inner = self.read(branch, times * runs)
                    entries, flops = entries + inner[0], flops + inner[1]
        return entries, flops

    def _called(self, instruction: Instruction) -> list[Computation]:
        return [self.module.computations[name] for name in instruction.called]

    def _runs(self, computation: Computation, caller: Instruction) -> Iterator[tuple[Computation, int]]:
        """Yield each computation that an instruction runs, and how often it runs in one run of the instruction."""
        if caller.opcode != "while":
            yield from ((each, 1) for each in self._called(caller))
            return
        known = trips(self.module, computation, caller)
        runs = 1 if known is None else known
        if known is None:
            self.notes.append(f"the trips of loop {caller.name} depend on computed values; it is counted once")
        for role, times in (("condition", runs + 1 if known else 1), ("body", runs)):
            yield self.module.computations[caller.attribute(role).lstrip("%")], times

    def _entries(
        self, computation: Computation, instruction: Instruction, sent: Collective, times: int
    ) -> Iterator[Entry]:
        """Yield the entries of a collective, one for each origin (equation, step and source line) of its arrays.

        On several TPU slices, yield one entry for each array.
        """
        parts = [*by_origin(self.module, computation, instruction, sent)]
        if self.chip and not self.chip.is_switch:
            # Without names only the bytes of each array tell the step to which it belongs
            # (`gspmd.audit.ledgers.slices`).
            parts = [(origin, replace(part, arrays=(array,))) for origin, part in parts for array in part.arrays]
        together = sum(len(part.arrays) for _, part in parts)  # Concatenated arrays count separately.
        near = self.chip and shared_node(sent.instruction, self.devices, self.chip.node_devices)
        for origin, part in parts:
            yield Entry(
                part.kind,
                axes_of(sent.instruction, self.mesh),
                times,
                part.wire_bytes * times,
                part.dtype,
                origin.source,
                origin.equation,
                origin.step,
                instruction.name,
                asynchronous=sent.phase == "start",
                arrays=len(part.arrays),
                group=part.group,
                together=together,
                network_bytes=self._away(part, near, times) if near else 0,
            )

    def _away(self, part: Collective, near: int, times: int) -> int:
        """Return the bytes that one device sends over the network, if `near` devices of each group share a node."""
        assert self.chip is not None
        return network_bytes(part.kind, part.group, near, part.wire_bytes, self.chip) * times


def _size(part: tuple[list[Entry], int]) -> tuple[int, int]:
    return sum(entry.wire_bytes for entry in part[0]), part[1]


def _text_of(compiled: Any) -> str:
    if isinstance(compiled, str):
        return compiled
    if not hasattr(compiled, "as_text"):
        raise PlanError(
            f"cannot read what {article(type(compiled).__name__)} sends: it is not compiled.\n"
            "  Give jax.jit(f).lower(...).compile(), or the text of its optimized HLO."
        )
    return compiled.as_text()


def _mesh_of(compiled: Any) -> Any:
    """Return the mesh of a program's inputs or outputs, or the current mesh if these have no mesh."""
    if not isinstance(compiled, str):
        for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
            if isinstance(sharding, jax.NamedSharding) and not sharding.mesh.empty:
                return sharding.mesh
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise PlanError(
            "cannot name the mesh axes of this program: none of its inputs and outputs is on a mesh.\n"
            "  Give mesh=, or call inside `with jax.set_mesh(mesh):`."
        )
    return mesh
