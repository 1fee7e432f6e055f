"""Rewriting of programs for several TPU slices, so that their collectives name the devices of all slices.

libtpu compiles one program, and every slice runs this program. The replica groups in the program number the devices of
only one slice. For transfers between slices, the program hands the data to the host, whose runtime (MegaScale) sends
the data over the data-centre network:

    %send = (bf16[64,128], u32[], token[]) send(%x, %after-all), is_host_transfer=true, frontend_attributes={
        _xla_host_transfer_rendezvous="psum_0", _xla_megascale_target="{1,2}x{0:255}",
        _xla_megascale_transfer_type="ALL_REDUCE", ...}
    %recv = (bf16[64,128], u32[], token[]) recv(%after-all), ...
    %send-done = token[] send-done(%send)
    %recv-done = (bf16[64,128], token[]) recv-done(%recv)

Source: programs that libtpu 0.0.42 compiles for topologies with `num_slices`. Their format is not documented.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from gspmd.annotate.errors import PlanError
from gspmd.audit.hlo.module import Computation, Instruction, Module
from gspmd.audit.hlo.replica_groups import Groups, groups, pairs
from gspmd.audit.hlo.text import integers
from gspmd.display.units import mesh_text
from gspmd.lowerings.in_force import slices_of

_TARGET = re.compile(r'_xla_megascale_target=("[^"]*"|\{(?:\{[^{}]*\},?)*\})')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_PRODUCT = re.compile(r"\{([\d,]+)\}x\{(\d+):(\d+)\}")
_IN_SLICE = re.compile(r"(all-gather|all-reduce|reduce-scatter|(ragged-)?all-to-all|collective-broadcast)(-start)?")
_SLICE = 100_000
"""The factor of the slice in device ids: id = 100,000 · slice + position in the slice, with slices counted from 1."""


def of_all_slices(module: Module, mesh: Any) -> Module:
    """Return a program with its replica groups and source-target pairs extended from one slice to all slices.

    In the result, devices are numbered by their position in the mesh. If the mesh has only one slice, the program is
    returned unchanged. A mesh of CPUs or GPUs always has one slice.

    A send to other slices gets, as an attribute, the groups of devices that its target names.
    `gspmd.audit.hlo.collectives` then reads the send as a collective that lasts until the `recv-done`. The `send-done`
    waits only until the operand has been read, and is replaced by a token.

    Args:
        module: the program.
        mesh: the mesh for which the program was compiled; only a `jax.sharding.Mesh` has slices.

    Raises:
        PlanError: the slices do not fill the mesh one after another, or the program was compiled for a different number
            of devices.
    """
    slices = slices_of(mesh)
    if slices == 1:
        return module
    devices, in_slice = list(mesh.devices.flat), module.devices
    if in_slice * slices != len(devices):
        raise PlanError(
            f"cannot number the devices of {module.name}: {in_slice} run it in each of {slices} slices, but the mesh "
            f"{mesh_text(mesh.shape)} has {len(devices) // slices}.\n  Give the mesh that it was compiled for."
        )
    places = {device.id: place for place, device in enumerate(devices)}
    computations = {name: _of_computation(each, in_slice, slices, places) for name, each in module.computations.items()}
    return replace(module, computations=computations, entry=computations[module.entry.name], devices=len(devices))


def _of_computation(computation: Computation, in_slice: int, slices: int, places: Mapping[int, int]) -> Computation:
    sends = {_rendezvous(each): each.name for each in computation.instructions if each.opcode == "send"}
    sends.pop("", None)  # sends within a slice
    seen: set[str] = set()
    late: dict[str, str] = {}  # a recv before its send -> the send
    instructions = []
    for each in computation.instructions:
        seen.add(each.name)
        if _IN_SLICE.fullmatch(each.opcode):
            each = _with(each, "replica_groups", _repeated(groups(each, in_slice), in_slice, slices))
        elif each.attribute("source_target_pairs"):
            each = _with(each, "source_target_pairs", _repeated(pairs(each), in_slice, slices))
        elif each.opcode == "send" and (target := _TARGET.search(each.attributes)):
            each = _sent(each, target[1].strip('"'), places)
        elif each.opcode == "recv" and (send := sends.get(_rendezvous(each))):
            # An instruction that waits for the receive waits for the transfer, which is identified by the send.
            if send in seen:
                each = replace(each, operands=(*each.operands, send))
            else:
                late[each.name] = send
        elif each.opcode == "recv-done" and each.operands[:1] and each.operands[0] in late:
            each = replace(each, operands=(late[each.operands[0]], *each.operands[1:]))
        elif each.opcode == "send-done" and not {*each.operands}.isdisjoint(sends.values()):
            each = replace(each, opcode="after-all", operands=())
        instructions.append(each)
    return replace(computation, instructions=tuple(instructions))


def _rendezvous(instruction: Instruction) -> str:
    """Return the name that a send to other slices and its recv have in common; empty for other instructions."""
    found = _RENDEZVOUS.search(instruction.attributes)
    return found[1] if found and "_xla_megascale_target" in instruction.attributes else ""


def _sent(send: Instruction, target: str, places: Mapping[int, int]) -> Instruction:
    if "->" in target:
        return _with(send, "source_target_pairs", _numbered(target.replace("->", ","), places))
    return _with(send, "replica_groups", _numbered(target, places))


def _numbered(target: str, places: Mapping[int, int]) -> str:
    """Convert a `_xla_megascale_target` to the text of replica groups or of source-target pairs.

    In this text, devices are numbered by their position in the mesh. The target `{1,3}x{0:7}` stands for eight groups.
    For each d from 0 to 7, one group contains device d of slice 1 and device d of slice 3. Targets in any other form
    list device ids.
    """
    if product := _PRODUCT.fullmatch(target):
        slices, first, last = integers(product[1]), int(product[2]), int(product[3])
        listed = [[_SLICE * one + device for one in slices] for device in range(first, last + 1)]
    else:
        listed = [integers(group) for group in re.findall(r"\{([\d,\s]+)\}", target)]
    if unknown := {device for group in listed for device in group}.difference(places):
        raise PlanError(
            f"cannot read what slices send each other: the mesh has no device {min(unknown)}.\n"
            "  Give the mesh that the program was compiled for."
        )
    return _written([[places[device] for device in group] for group in listed])


@lru_cache(maxsize=1024)
def _repeated(listed: Groups, in_slice: int, slices: int) -> str:
    """Return the text of replica groups in which the groups of one slice are repeated for every slice."""
    return _written([[in_slice * one + place for place in group] for one in range(slices) for group in listed])


def _written(listed: Sequence[Sequence[int]]) -> str:
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in listed) + "}"


def _with(instruction: Instruction, name: str, value: str) -> Instruction:
    """Return a copy of an instruction in which the attribute `name` is set to `value`."""
    if old := instruction.attribute(name):
        return replace(instruction, attributes=instruction.attributes.replace(f"{name}={old}", f"{name}={value}", 1))
    return replace(instruction, attributes=f"{name}={value}, {instruction.attributes}")
