"""The blocks of a tensor that is sharded over a mesh, and the devices that hold them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from gspmd.annotate.spec import Spec


@dataclass(frozen=True)
class Ownership:
    """A tensor split into blocks over a mesh; devices are numbered so that the last mesh axis varies fastest.

    Attributes:
      spec: the spec of the tensor.
      shape: the sizes of the tensor's dimensions, in order.
      mesh: the size of every mesh axis.

    Example:
      >>> from gspmd.annotate import Spec
      >>> held = Ownership(Spec.parse("B_xE_y"), (8, 6), {"x": 4, "y": 2})
      >>> held.coordinates(5), held.place(5), held.block(5), held.slices(5)
      ({'x': 2, 'y': 1}, (2, 1), 5, (slice(4, 6, None), slice(3, 6, None)))
    """

    spec: Spec
    shape: Sequence[int]
    mesh: Mapping[str, int]

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return prod(self.mesh.values())

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """The number of blocks along each dimension."""
        return tuple(prod(self.mesh[axis] for axis in axes) for axes in self.spec.axes)

    @property
    def blocks(self) -> int:
        """The number of different blocks."""
        return prod(self.parts)

    @property
    def copies(self) -> int:
        """The number of devices that hold the same block of the same summand."""
        return self.devices // (self.blocks * self.summands)

    @property
    def summands(self) -> int:
        """The number of summands of a partial sum, which is 1 for any other tensor."""
        return prod(self.mesh[axis] for axis in self.spec.partial)

    @property
    def summary(self) -> str:
        """The number and the size of the blocks in words: `4 blocks of 4 × 3, 2 summands`."""
        local = sizes_text([size // count for size, count in zip(self.shape, self.parts)])
        whole = "whole on every device" if self.devices > 1 else "whole"
        said = f"{self.blocks:,} blocks of {local}" if self.blocks > 1 else whole
        return said + (f", {self.summands:,} summands" if self.summands > 1 else "")

    def coordinates(self, device: int) -> dict[str, int]:
        """Return a device's coordinate along each mesh axis."""
        found = {}
        for axis in reversed(list(self.mesh)):
            device, found[axis] = divmod(device, self.mesh[axis])
        return {axis: found[axis] for axis in self.mesh}

    def place(self, device: int) -> tuple[int, ...]:
        """Return the index of a device's block along each dimension of the tensor."""
        at = self.coordinates(device)
        return tuple(self._number(axes, at) for axes in self.spec.axes)

    def block(self, device: int) -> int:
        """Return the index of a device's block among all blocks in row-major order."""
        number = 0
        for place, count in zip(self.place(device), self.parts):
            number = number * count + place
        return number

    def summand(self, device: int) -> int:
        """Return the index of the summand of a partial sum that a device holds."""
        return self._number(self.spec.partial, self.coordinates(device))

    def holder(self, place: Sequence[int], summand: int, copy: int) -> int:
        """Return the device that holds a given copy of a block.

        `place` is the index of the block along each dimension. The copies are numbered in the order of the devices.

        >>> from gspmd.annotate import Spec
        >>> held = Ownership(Spec.parse("B_x"), (8,), {"x": 2, "y": 4})
        >>> [held.holder((1,), 0, copy) for copy in range(held.copies)]
        [4, 5, 6, 7]
        """
        at: dict[str, int] = {}
        for axes, number in (*zip(self.spec.axes, place), (self.spec.partial, summand)):
            for axis in reversed(axes):
                number, at[axis] = divmod(number, self.mesh[axis])
        for axis in reversed([axis for axis in self.mesh if axis not in at]):
            copy, at[axis] = divmod(copy, self.mesh[axis])
        return self._number(tuple(self.mesh), at)

    def slices(self, device: int) -> tuple[slice, ...]:
        """Return the slice of each dimension that a device holds."""
        local = [size // count for size, count in zip(self.shape, self.parts)]
        return tuple(slice(at * size, (at + 1) * size) for at, size in zip(self.place(device), local))

    def _number(self, axes: Sequence[str], at: Mapping[str, int]) -> int:
        number = 0
        for axis in axes:  # major first
            number = number * self.mesh[axis] + at[axis]
        return number


def sizes_text(sizes: Sequence[int]) -> str:
    """Return the sizes of a tensor as text.

    >>> sizes_text((8, 6)), sizes_text(())
    ('8 × 6', 'a scalar')
    """
    return " × ".join(map(str, sizes)) or "a scalar"
