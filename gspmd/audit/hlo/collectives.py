"""Collectives as compilers write them: alone, started and waited for, wrapped, fused, several arrays in one."""

import re
from dataclasses import dataclass, replace

from gspmd.audit.hlo.module import Array, Computation, Instruction, Module
from gspmd.audit.hlo.replica_groups import groups, is_permute, pairs
from gspmd.hardware.links import wire_bytes

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_OTHER = {"ragged-all-to-all": "all-to-all", "collective-broadcast": "collective-permute"}
_OPCODE = re.compile(rf"({'|'.join([*_OTHER, *KINDS])})(?:-(start|done))?")
_SENT = re.compile(r'_xla_send_recv_source_target_pairs="?(\{(?:\{\d+,\s*\d+\}[,\s]*)*\})')
_CUTS = ("dynamic-slice", "slice")
_ASYNCHRONOUS = {"AsyncCollectiveStart": "start", "AsyncCollectiveDone": "done"}


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program, as often as its instruction stands there: once.

    Attributes:
        kind: as in a plan.
        phase: `"sync"`, or `"start"` and `"done"` of one that runs beside other instructions.
        instruction: what says how it is done: the wrapped or fused one where it is not the line itself.
        arrays: what a device holds on the larger side: gathered, or before it is scattered.
        group: how many devices take part together; of a permute 2, or 1 where nothing moves.
        fused: whether the instruction is part of a fusion, so that only the fusion has a place in the schedule.
    """

    kind: str
    phase: str
    instruction: Instruction
    arrays: tuple[Array, ...]
    group: int
    fused: bool = False

    @property
    def buffer(self) -> int:
        """Bytes per device of the larger side."""
        return sum(array.bytes for array in self.arrays)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends; for a permute the device that sends most."""
        if self.kind == "collective-permute":
            return self.buffer if self.group > 1 else 0
        return sum(wire_bytes(self.kind, self.group, array.bytes) for array in self.arrays)

    @property
    def dtype(self) -> str:
        """HLO's name of the dtype on the wire; of several, of the largest array."""
        return max(self.arrays, key=lambda array: array.bytes).dtype if self.arrays else ""


def collective(module: Module, computation: Computation, instruction: Instruction, devices: int) -> Collective | None:
    """The collective that a scheduled instruction is, starts or waits for; None for anything else.

    Args:
        module: the whole program.
        computation: where the instruction stands.
        instruction: any instruction but one inside a fusion.
        devices: how many devices run the program.

    Source: opcodes and result types as XLA's HLO verifier demands them (openxla/xla, `service/hlo_verifier.cc`).
    """
    found = _OPCODE.fullmatch(instruction.opcode)
    if found:
        kind, phase = _OTHER.get(found[1], found[1]), found[2] or "sync"
        if phase == "done":  # its start may stand before the loop whose tuple brought it here
            return Collective(kind, "done", instruction, instruction.arrays, 0)
        return _make(kind, phase, instruction, devices)
    if instruction.opcode == "send":
        return _sent(instruction)
    if instruction.opcode in ("async-start", "async-done"):
        return _wrapped(module, instruction, devices)
    return _fused(module, instruction, devices) if instruction.opcode == "fusion" else None


def _sent(send: Instruction) -> Collective | None:
    """A permute that XLA:GPU took apart, which lasts from the send to its done; the receiving side is not another."""
    found = _SENT.search(send.attribute("frontend_attributes"))
    if not found:  # to the host, or to one other device by its channel
        return None
    permute = replace(send, attributes=f"source_target_pairs={found[1]}, {send.attributes}")
    return Collective("collective-permute", "start", permute, send.arrays[:1], _group(permute, 0))


def _wrapped(module: Module, instruction: Instruction, devices: int) -> Collective | None:
    """What an asynchronous start or done wraps; XLA prints the wrapped computation with either, or with the start."""
    phase = instruction.opcode.removeprefix("async-")
    for name in instruction.called:
        inner = module.computations[name]
        for each in inner.instructions:
            found = collective(module, inner, each, devices)
            if found:
                return replace(found, phase=phase)
    return None


def _fused(module: Module, fusion: Instruction, devices: int) -> Collective | None:
    """A fusion's collective. An all-reduce of which a part is kept is a reduce-scatter, which the TPU fuses that way.

    An asynchronous one is three fusions: one that starts it, products that carry it along, one that waits for it.
    """
    inner = module.computations[fusion.called[0]]
    phase = _ASYNCHRONOUS.get(inner.root.attribute("custom_call_target").strip('"'), "sync")
    if phase == "sync" and fusion.attribute("kind") != "kCustom":
        return None
    for each in inner.instructions:
        found = _OPCODE.fullmatch(each.opcode)
        if found and not found[2]:
            made = _make(_OTHER.get(found[1], found[1]), "sync", each, devices)
            cut = any(other.opcode in _CUTS for other in inner.instructions)
            kind = "reduce-scatter" if made.kind == "all-reduce" and cut else made.kind
            return Collective(kind, phase, each, made.arrays, made.group, True)
    return None


def _make(kind: str, phase: str, instruction: Instruction, devices: int) -> Collective:
    group, arrays = _group(instruction, devices), _results(instruction)
    if kind == "reduce-scatter":
        arrays = tuple(Array(array.dtype, (group, *array.shape)) for array in arrays)
    elif kind == "all-to-all":  # a tuple is the parts of one array
        arrays = (Array(arrays[0].dtype, (sum(array.size for array in arrays),)),)
    return Collective(kind, phase, instruction, arrays, group)


def _group(instruction: Instruction, devices: int) -> int:
    if is_permute(instruction):
        return 2 if any(source != target for source, target in pairs(instruction)) else 1
    return max(len(group) for group in groups(instruction, devices))


def _results(instruction: Instruction) -> tuple[Array, ...]:
    """The arrays that come out; what starts a gather or a permute carries its operands first, and flags last.

    So does whatever wraps a collective, which XLA prints as one instruction, `reduce-scatter-start`, where it can.
    """
    if instruction.opcode in ("all-gather-start", "collective-permute-start") or instruction.type.startswith("(("):
        count = len(instruction.operands)
        return instruction.arrays[count : 2 * count]
    return instruction.arrays
