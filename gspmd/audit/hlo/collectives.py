"""Collectives as compilers print them: synchronous or asynchronous, wrapped, fused, or several combined into one."""

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
        phase: `"sync"`, or for an asynchronous collective `"start"` or `"done"`.
        instruction: the collective's own instruction, which may be inside a scheduled instruction that wraps or fuses
            it.
        arrays: the arrays on one device, before or after the collective, whichever are larger: those after a gather,
            those before a scatter.
        group: number of devices that communicate with each other; for a permute 2, or 1 if nothing moves.
        fused: whether the instruction is part of a fusion, so that only the fusion is scheduled.
        rings: sizes of the torus rings along which the algorithm runs, if the TPU compiler names them; otherwise empty.
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
        """Bytes of `arrays`: those on one device before or after the collective, whichever are more."""
        return sum(array.bytes for array in self.arrays)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends; for a permute, the most that any device sends."""
        if self.kind == "collective-permute":
            return self.buffer if self.group > 1 else 0
        return sum(wire_bytes(self.kind, self.group, array.bytes) for array in self.arrays)

    @property
    def dtype(self) -> str:
        """HLO's name of the dtype on the wire; for several arrays, the dtype of the largest."""
        return max(self.arrays, key=lambda array: array.bytes).dtype if self.arrays else ""


def collective(module: Module, computation: Computation, instruction: Instruction, devices: int) -> Collective | None:
    """Return the collective that a scheduled instruction runs, starts or waits for, or None if there is none.

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
    """Return a collective that a compiler splits into a send and a recv, which count as one collective.

    XLA:GPU splits permutes: they last from the send to its done. libtpu splits everything that crosses slices. Its
    groups were added by `gspmd.audit.hlo.slices`, and the operand is what one device sends.
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
    """Return the collective in the computation that an instruction of `_WRAPPERS` starts or waits for.

    The instruction that ends such a call names no computation, so the result for it is None. Its operand is the start
    for which it waits.
    """
    phase = instruction.opcode.rpartition("-")[2]
    for name in instruction.called:
        inner = module.computations[name]
        for each in inner.instructions:
            if wrapped := collective(module, inner, each, devices):
                return replace(wrapped, phase=phase)
    return None


def _fused(module: Module, fusion: Instruction, devices: int) -> Collective | None:
    """Return the collective in a fusion of the TPU compiler.

    In such a fusion, a reduce-scatter is an all-reduce with a slice. An asynchronous collective is three fusions: the
    first starts it, the second computes products meanwhile and passes it on, and the third waits for it.
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
    """Return the sizes of the torus rings that a collective's algorithm runs along.

    - A strategy lists the sizes as cores, `cores:{4 4 4}`.
    - A gather by `1DAllGather...` has one ring.
    - On a SparseCore the data is divided into one part per color. All parts travel along the same rings of chips, in
      different orders and directions, so the rings of the first part are returned. If both devices of each chip are in
      the group, a ring of size 2 is added.
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
    """Return the arrays that a collective returns, without operands or context that its start may return too.

    The start of a gather or a permute returns a tuple: operands, then results, then context. So does the start of a
    wrapped collective, which XLA prints as one instruction (`reduce-scatter-start`) where it can.
    """
    if instruction.opcode in ("all-gather-start", "collective-permute-start") or instruction.type.startswith("(("):
        count = len(instruction.operands)
        return instruction.arrays[count : 2 * count]
    return instruction.arrays
