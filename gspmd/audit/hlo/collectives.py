"""Collectives in optimized HLO, which may be synchronous or asynchronous, wrapped in a call, fused, or combined."""

import re
from dataclasses import dataclass, replace
from math import prod

from gspmd.annotate.errors import PlanError
from gspmd.audit.hlo.module import Array, Computation, Instruction, Module
from gspmd.audit.hlo.replica_groups import groups, is_permute, pairs
from gspmd.hardware.links import wire_bytes

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_OTHER = {"ragged-all-to-all": "all-to-all", "collective-broadcast": "collective-permute"}
_OPCODE = re.compile(rf"({'|'.join([*_OTHER, *KINDS])})(?:-(start|done))?")
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_TRANSFERS = {
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_SENT = re.compile(r'_xla_send_recv_source_target_pairs="?(\{(?:\{\d+,\s*\d+\}[,\s]*)*\})')
_CORES = re.compile(r"\bcores:\{([\d ]+)\}")
_WRAPPERS = ("async-start", "async-done", "call-start", "call-done")  # A call on a TPU's SparseCore is asynchronous.
_SLICES = ("dynamic-slice", "slice")
_ASYNCHRONOUS = {"AsyncCollectiveStart": "start", "AsyncCollectiveDone": "done"}


@dataclass(frozen=True)
class Collective:
    """One execution of a collective of a compiled program.

    Attributes:
        kind: the kind of collective, named as in a plan.
        phase: `"sync"` for a synchronous collective. For an asynchronous collective, `"start"` or `"done"`.
        instruction: the instruction of the collective itself, such as an all-gather. A scheduled instruction may wrap
            or fuse this instruction.
        arrays: the arrays on one device before or after the collective, whichever have more bytes. For a gather these
            are the arrays after it, and for a scatter the arrays before it.
        group: number of devices in each group of devices that communicate with each other. For a permute the number is
            2, or 1 if nothing moves.
        fused: whether the instruction is inside a fusion; in that case only the fusion is scheduled.
        rings: sizes of the torus rings along which the algorithm runs, if the TPU compiler states them; otherwise
            empty.
    """

    kind: str
    phase: str
    instruction: Instruction
    arrays: tuple[Array, ...]
    group: int
    fused: bool = False
    rings: tuple[int, ...] = ()

    @property
    def buffer(self) -> int:
        """Bytes of `arrays`, the arrays on one device before or after the collective, whichever are larger."""
        return sum(array.bytes for array in self.arrays)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends; for a permute, the bytes of the device that sends the most."""
        if self.kind == "collective-permute":
            return self.buffer if self.group > 1 else 0
        return sum(wire_bytes(self.kind, self.group, array.bytes) for array in self.arrays)

    @property
    def dtype(self) -> str:
        """The dtype on the wire, as HLO names it; if there are several arrays, the dtype of the largest array."""
        return max(self.arrays, key=lambda array: array.bytes).dtype if self.arrays else ""


def collective(module: Module, computation: Computation, instruction: Instruction, devices: int) -> Collective | None:
    """Return the collective that a scheduled instruction runs, starts or waits for.

    The result is None for any other instruction, and for one that ends a call (`call-done`).

    Args:
        module: the program.
        computation: the computation that contains the instruction.
        instruction: any instruction that is not inside a fusion.
        devices: number of devices that run the program.

    Source: opcodes and result types as XLA's HLO verifier requires them (openxla/xla, `service/hlo_verifier.cc`).
    """
    opcode = _OPCODE.fullmatch(instruction.opcode)
    if opcode:
        kind, phase = _OTHER.get(opcode[1], opcode[1]), opcode[2] or "sync"
        if phase == "done":  # The start may be before a loop that passes it on in its tuple.
            return Collective(kind, "done", instruction, instruction.arrays, 0)
        return _make(kind, phase, instruction, devices)
    if instruction.opcode == "send":
        return _sent(instruction, devices)
    if instruction.opcode in _WRAPPERS:
        return _wrapped(module, instruction, devices)
    return _fused(module, instruction, devices) if instruction.opcode == "fusion" else None


def _sent(send: Instruction, devices: int) -> Collective | None:
    """Return the collective that a compiler has split into a send and a recv; the pair counts as one collective.

    XLA:GPU splits permutes in this way, and a permute lasts from the send to the send-done. libtpu splits every
    collective that crosses slices. To the send of such a collective, `gspmd.audit.hlo.slices` has already added the
    groups of devices. The operand of the send holds the bytes of one device.

    The result is None for a send to the host, and for a send that reaches one other device by its channel.
    """
    if crosses := _TRANSFER.search(send.attribute("frontend_attributes")):
        if crosses[1] not in _TRANSFERS:
            raise PlanError(
                f"cannot read what slices send each other: the transfer {crosses[1]} of {send.name} is not known.\n"
                "  Give a program that the libtpu of a supported release of JAX compiled."
            )
        kind, group = _TRANSFERS[crosses[1]], _group(send, devices)
        given = send.arrays[:1]
        arrays = tuple(Array(each.dtype, (group, *each.shape)) for each in given) if kind == "all-gather" else given
        return Collective(kind, "start", send, arrays, group)
    pairs_text = _SENT.search(send.attribute("frontend_attributes"))
    if not pairs_text:  # A send to the host, or to one other device by its channel.
        return None
    permute = replace(send, attributes=f"source_target_pairs={pairs_text[1]}, {send.attributes}")
    return Collective("collective-permute", "start", permute, send.arrays[:1], _group(permute, 0))


def _wrapped(module: Module, instruction: Instruction, devices: int) -> Collective | None:
    """Return the collective in the computation that a wrapping instruction starts or waits for.

    Wrapping instructions have an opcode in `_WRAPPERS`. The instruction that ends a call (`call-done`) names no
    computation, but only the instruction that started the call, as its operand. So the result for a `call-done` is
    None.
    """
    phase = instruction.opcode.rpartition("-")[2]
    for name in instruction.called:
        inner = module.computations[name]
        for each in inner.instructions:
            if wrapped := collective(module, inner, each, devices):
                return replace(wrapped, phase=phase)
    return None


def _fused(module: Module, fusion: Instruction, devices: int) -> Collective | None:
    """Return the collective in a fusion of the TPU compiler, or None if the fusion contains none.

    In such a fusion, a reduce-scatter is written as an all-reduce and a slice. An asynchronous collective is written as
    three fusions. The first fusion starts the collective. The second computes products meanwhile, and passes the
    collective on. The third waits for the collective.
    """
    inner = module.computations[fusion.called[0]]
    phase = _ASYNCHRONOUS.get(inner.root.attribute("custom_call_target").strip('"'), "sync")
    if phase == "sync" and fusion.attribute("kind") != "kCustom":
        return None
    for each in inner.instructions:
        opcode = _OPCODE.fullmatch(each.opcode)
        if opcode and not opcode[2]:
            made = _make(_OTHER.get(opcode[1], opcode[1]), "sync", each, devices)
            sliced = any(other.opcode in _SLICES for other in inner.instructions)
            kind = "reduce-scatter" if made.kind == "all-reduce" and sliced else made.kind
            return replace(made, kind=kind, phase=phase, fused=True, rings=_rings(fusion, made.group))
    return None


def _make(kind: str, phase: str, instruction: Instruction, devices: int) -> Collective:
    group, arrays = _group(instruction, devices), _results(instruction)
    if kind == "reduce-scatter":
        arrays = tuple(Array(array.dtype, (group, *array.shape)) for array in arrays)
    elif kind == "all-to-all":  # the tuple holds the parts of one array
        arrays = (Array(arrays[0].dtype, (sum(array.size for array in arrays),)),)
    return Collective(kind, phase, instruction, arrays, group, rings=_rings(instruction, group))


def _rings(scheduled: Instruction, group: int) -> tuple[int, ...]:
    """Return the sizes of the torus rings along which a collective's algorithm runs, as the TPU compiler states them.

    The compiler states these sizes in one of three ways:

    - The debug text of the algorithm lists the sizes as numbers of cores, such as `cores:{4 4 4}`.
    - The name of the algorithm's emitter begins with `1D`, such as `1DAllGather...`. Such an algorithm runs along one
      ring.
    - On a SparseCore, the data is divided into parts, called colors. All parts travel along the same rings of chips,
      but in different orders and directions, so the rings of the first part are returned. If a chip has two devices and
      the group contains both, a ring of size 2 is added.

    The result is empty if the compiler states nothing about rings.
    """
    for offloaded in scheduled.config.get("collective_offload_config", {}).values():
        if isinstance(offloaded, dict) and (ways := offloaded.get("ici_strategy_config", {}).get("color_strategies")):
            rings = tuple(int(ring.get("core_count", 1)) for ring in ways[0]["phase_rings"])
            return (*rings, 2) if 2 * prod(rings) == group else rings
    algorithm = scheduled.config.get("collective_algorithm_config", {})
    if cores := _CORES.search(algorithm.get("debug", "")):
        return tuple(map(int, cores[1].split()))
    return (group,) if algorithm.get("emitter", "").startswith("1D") else ()


def _group(instruction: Instruction, devices: int) -> int:
    if is_permute(instruction):
        return 2 if any(source != target for source, target in pairs(instruction)) else 1
    return max(len(group) for group in groups(instruction, devices))


def _results(instruction: Instruction) -> tuple[Array, ...]:
    """Return the result arrays of a collective, without the operands and the context that some instructions return.

    The instruction that starts a gather or a permute returns a tuple of the operands, the results and the context, in
    this order. The instruction that starts a wrapped collective does the same. XLA prints a wrapped collective as one
    instruction, such as `reduce-scatter-start`, where this is possible.
    """
    if instruction.opcode in ("all-gather-start", "collective-permute-start") or instruction.type.startswith("(("):
        count = len(instruction.operands)
        return instruction.arrays[count : 2 * count]
    return instruction.arrays
