"""`gspmd.audit.timeline`: simulate one device running a compiled program."""

from collections.abc import Mapping

from gspmd.annotate.errors import PlanError, article
from gspmd.audit.arguments import mesh_sizes, operations
from gspmd.audit.hlo.module import Module
from gspmd.audit.simulation.interpreter import Interpreter
from gspmd.audit.simulation.links import Torus
from gspmd.audit.simulation.machine import Machine
from gspmd.audit.simulation.timeline import CategoryTotal, Timeline
from gspmd.display.units import amount_of_seconds
from gspmd.hardware.chips import Chip
from gspmd.hardware.chips import chip as chip_named

NOTABLE = 0.02
"""The minimum fraction of a step at which a copy inside a loop is reported."""

NOTABLE_SLICES = 0.1
"""The minimum fraction of a step at which the slices that loops copy out of stacks are reported."""

_MODELLED = "times are modelled: products as in cuBLAS, other kernels by their bytes, launches, collectives as in NCCL"


def timeline(
    module: Module, chip: Chip | str, mesh: Mapping[str, int], *, flops: float = 0, torus: Torus | None = None
) -> Timeline:
    """Simulate one device running a compiled program once.

    - **Computation**: an instruction takes the cycles that the TPU compiler estimates, divided by the chip's clock (of
      both cores together, if a chip has two). Without an estimate it takes as long as its matrix products at the chip's
      peak, or its bytes at the bandwidth of main memory, whichever is longer. Instructions that only name a value are
      free.
    - **On a GPU** the compiler makes no estimates. A product takes as long as in cuBLAS (`gspmd.hardware.matmul`),
      fused attention takes the time of its FLOPs and then of its bytes at the rates of cuDNN, and any other kernel
      takes the time of its bytes at the bandwidth that kernels reach. Every kernel also takes time to start. The host
      launches kernels one by one, five or more in a row as one CUDA graph, and runs ahead of the device; when it is not
      ahead, the device waits. The device also waits for the host at a conditional, and in a loop whose trips are not
      known.
    - **Collectives** take `gspmd.hardware.links.occupancy`, along the rings that the compiler names; if it names none,
      along the rings of `torus`, or along one ring for each mesh axis. A permute that moves data by the same number of
      positions along one axis (a step of a ring) sends its bytes over one link per position, in one direction
      (`gspmd.audit.simulation.links`). Groups that no mesh axes span count as one ring.
    - **Asynchronous collectives** overlap with the instructions between their start and their done; at the done, the
      device waits for the rest.
    - **Links**: a mesh axis has two directions. A collective other than a shift uses both, on all of its axes.
      Collectives in the same direction of an axis share it evenly; each is as slow as on its most contended link, and
      bandwidth that this leaves on other links is not used. Hops take time, but no bandwidth.
    - **Copies** between memories (`copy-start`, asynchronous slices) take the time of their bytes at the bandwidth of
      main memory, which they share. Waiting for one counts as computing.
    - **Loops** are simulated until an iteration leaves the transfers in flight as it found them (the first does, unless
      a transfer is in flight across iterations); it stands for all that remain. The slowest branch of a conditional
      runs.

    Args:
        module: an optimized and scheduled program, `gspmd.audit.hlo.parse(compiled.as_text())`.
        chip: the hardware to simulate.
        mesh: sizes of the mesh axes, in the order of the devices.
        flops: FLOPs of the model, per device and step, for `mfu`; by default the FLOPs of the program's matrix
            products.
        torus: mesh axis -> sizes of its torus axes (`Topology.rings`); by default, each mesh axis is one torus axis.

    Returns:
        A `Timeline`, to print; `gspmd.audit.gantt.draw` and `gspmd.audit.perfetto.write` make pictures of it.

    Raises:
        PlanError: `module` is not a parsed program, `mesh` is not a mesh, or no chip has this name.

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

    Leaves out: launches of TPU programs; kernels that find their arrays in a GPU's cache; sorting; skew between
    devices, and barriers; contention for main memory, and for a GPU's multiprocessors, between collectives, copies and
    computation; latency of copies; how a collective is pipelined, and its work on the cores; padding to tiles; routing,
    except of shifts; mesh axes that share a torus axis; links between slices; clocks other than the nominal one.

    Source: for the links the *scaling book* (jax-ml), parts 2 and 3; for cycles the TPU compiler, `backend_config`;
    for GPUs see `gspmd.hardware.matmul` and `gspmd.hardware.nccl`.
    """
    if not isinstance(module, Module):
        raise PlanError(
            f"cannot simulate {article(type(module).__name__)}: it is not a parsed program.\n"
            "  Give gspmd.audit.hlo.parse(compiled.as_text())."
        )
    flops, mesh = operations(flops), mesh_sizes(mesh)
    interpreter = Interpreter(module, chip_named(chip), mesh, torus or {})
    interpreter.run(module.entry, [])
    machine = interpreter.machine
    machine.drain()
    sums = machine.sums
    modelled = [_MODELLED] * interpreter.chip.is_switch  # XLA:GPU estimates no cycles.
    return Timeline(
        sums["compute"],
        sums["hidden"],
        sums["exposed"],
        sums["memory"],
        int(sums["flops"]),
        flops or sums["flops"],
        tuple(machine.spans),
        _parts(machine),
        interpreter.chip,
        mesh,
        module.name,
        tuple(dict.fromkeys([*modelled, *interpreter.notes])),
        (*_copied_in_loops(interpreter), *_cut_in_loops(interpreter)),
        sums["launch"],
    )


def _copied_in_loops(interpreter: Interpreter) -> list[str]:
    """Return a line for each copy that a loop repeats in every iteration and that takes over `NOTABLE` of the time."""
    elapsed = interpreter.machine.elapsed
    return [
        f"{each.instruction.name} copies the whole {each.instruction.arrays[0]} in each of {each.times} iterations, "
        f"though none changes it: {amount_of_seconds(each.seconds)} of {amount_of_seconds(elapsed)}. If lowering "
        "looped cuts it, lowering blocking makes no such copy"
        for each in interpreter.copied_in_loops.values()
        if each.seconds > NOTABLE * elapsed
    ]


def _cut_in_loops(interpreter: Interpreter) -> list[str]:
    """Return a line about slices that loops copy out of stacked arrays, if they exceed `NOTABLE_SLICES` of the time."""
    elapsed = interpreter.machine.elapsed
    every = sorted(interpreter.cut_in_loops.values(), key=lambda each: -each.seconds)
    together = sum(each.seconds for each in every)
    if together <= NOTABLE_SLICES * elapsed:
        return []
    first, others = every[0], f", and {len(every) - 1} more do so" * (len(every) > 1)
    return [
        f"{first.instruction.name} copies {first.instruction.arrays[0]} out of a stack in each of {first.times} "
        f"iterations{others}: {amount_of_seconds(together)} of {amount_of_seconds(elapsed)}. If lowering looped or "
        "auto cuts this weight into pieces, try lowering blocking. In serving, blocks with weights of their own need "
        "no copy: --model.no-stacked, or gspmd generate --unstacked"
    ]


def _parts(machine: Machine) -> tuple[CategoryTotal, ...]:
    sums = machine.sums
    keys = dict.fromkeys(key[:2] for key in sums if isinstance(key, tuple) and key[0] != "loop")
    parts = [
        CategoryTotal(
            category,
            () if rows[0] in ("compute", "memory") else rows,
            int(sums[category, rows, "count"]),
            sums[category, rows, "seconds"],
            sums[category, rows, "exposed"],
        )
        for category, rows in keys
    ]
    return tuple(sorted(parts, key=lambda part: -part.seconds))
