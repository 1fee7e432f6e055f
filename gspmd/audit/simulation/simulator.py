"""`gspmd.audit.timeline`: simulation of one device that runs a compiled program."""

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
"""The fraction of a step's time above which a copy that is repeated in a loop, or products that are computed again, are
reported.
"""

NO_REMATERIALIZATION = "xla_tpu_rematerialization_min_size_in_bytes=1000000000000"
"""A compiler option with which libtpu computes no product again to save memory, since no array is that large."""

NOTABLE_SLICES = 0.1
"""The fraction of a step's time above which the slices that loops copy out of stacked arrays are reported."""

_MODELLED = "times are modelled: products as in cuBLAS, other kernels by their bytes, launches, collectives as in NCCL"


def timeline(
    module: Module, chip: Chip | str, mesh: Mapping[str, int], *, flops: float = 0, torus: Torus | None = None
) -> Timeline:
    """Simulate one execution of a compiled program on one device.

    - **Computation**: an instruction takes the cycles that the TPU compiler estimates, divided by the chip's clock. If
      a chip has two cores, the cycles are those of both cores together. An instruction without an estimate takes the
      time of its matrix products at the chip's peak FLOP/s, or the time of its bytes at the bandwidth of main memory,
      whichever is longer. Instructions that only give a name to a value, such as `tuple` and `bitcast`, take no time.
    - **On a TPU whose kernels have been timed** (v5e and v6e), the estimates are known to be wrong; on v5p this is
      assumed. There an instruction that reads or writes main memory takes as long as timed kernels with the same FLOPs
      and bytes (for v5p, those of a v5e), and an instruction in on-chip memory less than its cycles
      (`gspmd.audit.simulation.roofline.cost`).
    - **On a GPU**, the compiler makes no estimates. A matrix product takes the time that is predicted for cuBLAS
      (`gspmd.hardware.matmul`). Fused attention takes the time of its FLOPs plus the time of its bytes, at the rates
      that cuDNN reaches. Any other kernel takes the time of its bytes, at the memory bandwidth that kernels reach.
      Scatters are an exception, because they are slower (`SCATTER_EFFICIENCY` of `gspmd.audit.simulation.roofline`).
      Every kernel also takes time to start.
    - **Launches**: on a GPU, the host launches kernels one by one, or five or more consecutive kernels as one CUDA
      graph. The host runs ahead of the device. If the host is not ahead, the device waits for the next launch. The
      device also waits for the host at a conditional, and in a loop whose trip count is unknown.
    - **Collectives** take the time of `gspmd.hardware.links.occupancy`, along the rings that the compiler states. If
      the compiler states no rings, collectives run along the rings of `torus`, or along one ring for each mesh axis. A
      group of devices that does not match a set of mesh axes counts as one ring. A shift is a permute that moves all
      data by the same number of positions along one axis, such as a step of a ring. It sends its bytes over one link
      per position, in one direction (`gspmd.audit.simulation.links`).
    - **Asynchronous collectives** overlap with the instructions between their start instruction and their done
      instruction. At the done instruction, the device waits until the collective is finished.
    - **Links**: a mesh axis has two directions. A shift uses one direction of one axis, and any other collective uses
      both directions of all its axes. Collectives that use the same direction of an axis share it evenly. The speed of
      a collective is the speed on its most contended link. Bandwidth that this leaves free on other links is not used.
      Hops take time, but no bandwidth.
    - **Copies** between memories (`copy-start`, asynchronous slices) take the time of their bytes at the bandwidth of
      main memory. Several copies share this bandwidth; on a chip whose kernels have been timed, they share it with the
      kernels that run beside them, which take as much as they need. Copies to and from host memory take the time of
      their bytes at the bandwidth of the link to the host, each direction by itself. The time of waiting for a copy
      counts as computing.
    - **Loops** are simulated until an iteration ends with the same transfers in flight as when it began. This iteration
      then stands for all remaining iterations. It is the first iteration, unless a transfer is in flight from one
      iteration to the next.
    - **Conditionals**: the slowest branch is taken.

    Args:
        module: an optimized and scheduled program, from `gspmd.audit.hlo.parse(compiled.as_text())`.
        chip: the hardware to simulate, or its name.
        mesh: sizes of the mesh axes, in the order of the devices.
        flops: FLOPs of the model, per device and step, for `mfu`; by default the FLOPs of the program's matrix
            products.
        torus: a mapping from a mesh axis to the sizes of its torus axes (`Topology.rings`). A mesh axis that is not in
            the mapping counts as one torus axis.

    Returns:
        A `Timeline`, which can be printed. `gspmd.audit.gantt.draw` draws a timeline, and `gspmd.audit.perfetto.write`
        writes a timeline as a trace.

    Raises:
        PlanError: `module` is not a parsed program, `mesh` is not a mesh, `flops` is not a number of FLOPs, or no chip
            has the name `chip`.

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
    devices; barriers; contention between collectives and computation, for main memory and for a GPU's multiprocessors;
    contention between copies and computation for main memory, unless the kernels of the chip have been timed; the
    latency of copies; the pipelining of a collective, and its work on the cores; padding to tiles; the routing of
    collectives other than shifts; mesh axes that share a torus axis; links between slices; clocks other than the
    nominal clock.

    Source: for links, the *scaling book* (jax-ml), parts 2 and 3. For cycles, the TPU compiler's `backend_config`; for
    TPU v5e and v6e, kernels that others timed (benchmarks/tpu.py). For GPUs, the sources in `gspmd.hardware.matmul` and
    `gspmd.hardware.nccl`.
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
        (*_copied_in_loops(interpreter), *_cut_in_loops(interpreter), *_computed_again(interpreter)),
        sums["launch"],
        sums["host"],
    )


def _copied_in_loops(interpreter: Interpreter) -> list[str]:
    """Return a line of text for each copy that a loop repeats in every iteration.

    A copy is reported only if it takes more than the fraction `NOTABLE` of the step's time.
    """
    elapsed = interpreter.machine.elapsed
    return [
        f"{each.instruction.name} copies the whole {each.instruction.arrays[0]} in each of {each.times} iterations, "
        f"though none changes it: {amount_of_seconds(each.seconds)} of {amount_of_seconds(elapsed)}. If lowering "
        "looped cuts it, lowering blocking makes no such copy"
        for each in interpreter.copied_in_loops.values()
        if each.seconds > NOTABLE * elapsed
    ]


def _cut_in_loops(interpreter: Interpreter) -> list[str]:
    """Return a line of text about the slices that loops copy out of stacked arrays.

    The list is empty unless these copies together take more than the fraction `NOTABLE_SLICES` of the step's time.
    """
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


def _computed_again(interpreter: Interpreter) -> list[str]:
    """Return a line of text about the products that the compiler computes again, instead of keeping their results.

    XLA's pass `HloRematerialization` does so if it estimates that the program does not fit in memory. It runs before
    buffers are assigned, and its estimate may be too high: with `zero-1`, it made a step of Llama 8B on 16 v5p 15%
    slower, which takes 77 of 102 GB with the pass and without it. Each copy of an instruction has the name of the
    original with `.remat` appended, and the original is left out if only copies are used.

    The list is empty unless this takes more than the fraction `NOTABLE` of the step's time.
    """
    elapsed = interpreter.machine.elapsed
    took: dict[str, dict[str, float]] = {}  # An instruction of a loop may have several spans.
    for span in interpreter.machine.spans:
        if span.category == "einsum":
            copies = took.setdefault(span.instruction.partition(".remat")[0], {})
            copies[span.instruction] = copies.get(span.instruction, 0.0) + span.seconds * span.times
    again = {name: sum(copies.values()) - max(copies.values()) for name, copies in took.items()}
    together = sum(again.values())
    if together <= NOTABLE * elapsed:
        return []
    remedy = "use more microbatches, recompute more with --model.remat, or use a layout that holds less"
    if not interpreter.chip.is_switch:
        remedy = (
            f"if the program takes less memory than a chip has, try --compiler-options {NO_REMATERIALIZATION}; "
            f"otherwise {remedy}"
        )
    return [
        "the compiler computes products again, because it expects that their results do not fit in memory: "
        f"{amount_of_seconds(together)} of {amount_of_seconds(elapsed)}, most of it for "
        f"{max(again, key=lambda name: again[name])}. To avoid it, {remedy}"
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
