"""Replica groups of compiled collectives, in XLA's three notations, and the mesh axes that the groups span.

Source: `CollectiveDeviceListBase` and `Mesh` in openxla/xla (`hlo/ir/replica_group.h`, `hlo/ir/mesh_and_axis.h`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, pairwise
from math import prod

import numpy as np

from gspmd.annotate.errors import PlanError
from gspmd.audit.hlo.module import Instruction
from gspmd.audit.hlo.text import integers
from gspmd.hardware.links import fewest_together

UNNAMED = ("?",)
"""The axes that are returned for a collective whose groups match no set of mesh axes."""

Groups = tuple[tuple[int, ...], ...]


def groups(instruction: Instruction, devices: int) -> Groups:
    """Return the groups of devices that communicate with each other, with devices as positions in the mesh.

    Args:
        instruction: a collective.
        devices: number of devices. If the instruction lists no groups, all these devices are one group.
    """
    text = instruction.attribute("replica_groups")
    if text.startswith("mesh["):  # A mesh in a different order has a second attribute, which ends in the axes.
        return _of_mesh(text, instruction.attribute("device_ids"))
    return _groups(text, devices)


@lru_cache(maxsize=4096)
def _groups(text: str, devices: int) -> Groups:
    if "<=" in text:
        return _of_iota(text)
    listed = tuple(tuple(integers(group)) for group in re.findall(r"\{([\d,\s]+)\}", text))
    return listed or (tuple(range(devices)),)


def _of_iota(text: str) -> Groups:
    """Parse replica groups in iota notation.

    For example, `[4,2]<=[2,4]T(1,0)` means that the numbers 0 to 7 are arranged as a 2 × 4 array, which is transposed
    and then cut into four groups of two.
    """
    parts = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not parts:
        raise PlanError(
            f"cannot read the replica groups {text!r}: this notation is not known.\n"
            "  Give the text of a program that a supported release of JAX compiled."
        )
    shape, dims, order = (integers(part or "") for part in parts.groups())
    numbers = np.arange(prod(dims)).reshape(dims)
    return _rows((numbers.transpose(order) if order else numbers).reshape(shape[0], -1))


@lru_cache(maxsize=4096)
def _of_mesh(text: str, reordered: str) -> Groups:
    """Parse replica groups along named axes of a mesh, such as `mesh['x'=4,'y'=2] {'y'}`.

    Instead of a whole axis, the text may name a part of an axis. For example, `'x':(2)4` means that axis x is split
    into factors of 2, 4 and the rest, from major to minor, and that the part is the second factor. If the devices of
    the mesh are not in ascending order, an attribute `device_ids=(1,0,...)` or `device_ids=([2,4]T(1,0))` follows.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", text)}
    named = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", (reordered or text).rpartition("{")[2])
    along = [(name, int(first or 1), int(first or 1) * int(size or sizes[name])) for name, first, size in named]
    factors = [factor for name, size in sizes.items() for factor in _factors(name, size, along)]
    inside = lambda factor: any(factor[0] == n and a <= factor[1] < b for n, a, b in along)  # noqa: E731
    order = sorted(range(len(factors)), key=lambda place: inside(factors[place]))
    numbers = _order_of(reordered, prod(sizes.values())).reshape([size for *_, size in factors]).transpose(order)
    return _rows(numbers.reshape(-1, prod(factor[2] for factor in factors if inside(factor))))


def _factors(name: str, size: int, along: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Cut a mesh axis into pieces at every point where a named part of the axis begins or ends.

    Return (name, product of the sizes of all earlier pieces, size) for each piece, from major to minor.

    Args:
        name: the mesh axis.
        size: the size of the mesh axis.
        along: the parts in the replica groups, each as (name of the axis, product of the sizes before the part, product
            of the sizes up to and including the part).
    """
    cuts = sorted({1, size, *(at for other, *ends in along if other == name for at in ends)})
    return [(name, first, last // first) for first, last in pairwise(cuts)]


def _order_of(text: str, devices: int) -> np.ndarray:
    """Return the device numbers in the order of the mesh, from the text of `device_ids`."""
    iota = re.match(r"\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", text)
    if iota:
        dims, order = (integers(part or "") for part in iota.groups())
        return np.arange(devices).reshape(dims).transpose(order or None).reshape(-1)
    return np.array(integers(text.partition("{")[0])) if text else np.arange(devices)


def pairs(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    """Return the (source, target) pairs of devices of a permute."""
    listed = re.findall(r"\{(\d+),\s*(\d+)\}", instruction.attribute("source_target_pairs"))
    return tuple((int(source), int(target)) for source, target in listed)


def is_permute(instruction: Instruction) -> bool:
    """Return whether a collective has a list of (source, target) pairs, which may be empty, instead of groups."""
    return bool(instruction.attribute("source_target_pairs"))


def axes_of(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes over which a collective runs, in the order of the mesh and without axes of size 1.

    Args:
        instruction: a collective, or the instruction that starts a collective.
        mesh: sizes of the mesh axes. Devices are numbered in row-major order (last axis fastest).

    Returns:
        The names of the mesh axes. For a permute, they are the axes along which data moves. If the groups match no set
        of mesh axes, for example if each group is half of an axis, the result is `UNNAMED`.
    """
    if is_permute(instruction):
        return _crossed(pairs(instruction), tuple(mesh.items()))
    return _spanned(groups(instruction, prod(mesh.values())), tuple(mesh.items()))


def touched_by(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of one group differ, even if a group covers only part of an axis."""
    named = axes_of(instruction, mesh)
    if named != UNNAMED or is_permute(instruction):
        return named
    first = groups(instruction, prod(mesh.values()))[0]
    return _crossed(tuple((first[0], other) for other in first), tuple(mesh.items()))


def shared_node(instruction: Instruction, devices: int, node: int) -> int:
    """Return the number of devices of one group that share a node; if groups or nodes differ, the smallest such number.

    The result is 0 if no group spans several nodes. For a permute, the result is 1 if any data leaves a node, and 0
    otherwise.

    Args:
        instruction: a collective.
        devices: number of devices that run the program.
        node: number of devices per node.
    """
    if moves := pairs(instruction):
        return int(any(source // node != target // node for source, target in moves))
    listed = groups(instruction, devices)
    near = fewest_together(listed, node)
    return near if near < max(map(len, listed)) else 0


@lru_cache(maxsize=4096)
def _crossed(sent: tuple[tuple[int, int], ...], mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    shape = [size for _, size in mesh]
    moved = [pair for pair in sent if pair[0] != pair[1]]
    if not moved:
        return ()
    if max(map(max, moved)) >= prod(shape):
        return UNNAMED
    sources, targets = (np.unravel_index(np.array(side), shape) for side in zip(*moved))
    return tuple(name for (name, _), a, b in zip(mesh, sources, targets) if (a != b).any())


@lru_cache(maxsize=4096)
def _spanned(listed: Groups, mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    wanted = {frozenset(group) for group in listed}
    if all(len(group) == 1 for group in wanted):
        return ()
    for names in _subsets([name for name, size in mesh if size > 1]):
        if wanted == _along(names, mesh):
            return names
    return UNNAMED


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(names) + 1):
        yield from combinations(names, count)


@lru_cache(maxsize=4096)
def _along(names: tuple[str, ...], mesh: tuple[tuple[str, int], ...]) -> set[frozenset[int]]:
    order = [i for i, (name, _) in enumerate(mesh) if name not in names]
    order += [i for i, (name, _) in enumerate(mesh) if name in names]
    shape = tuple(size for _, size in mesh)
    numbers = np.arange(prod(shape)).reshape(shape).transpose(order)
    return {frozenset(row) for row in _rows(numbers.reshape(-1, prod(dict(mesh)[name] for name in names)))}


def _rows(numbers: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in numbers)
