"""The slice or nodes that are searched for: chip and shape, read from the name without the compiler."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from gspmd.audit.offline.names import CORES, read_name, shapes
from gspmd.hardware.chips import Chip
from gspmd.search.answers import factorings, meshes


@dataclass(frozen=True)
class Slice:
    """A TPU slice, or nodes of GPUs.

    Attributes:
        chip: the figures of one device.
        shape: chips along each torus axis; for GPUs the number of nodes, if there are several, and of GPUs in a node.
    """

    chip: Chip
    shape: tuple[int, ...]

    @classmethod
    def named(cls, name: str) -> "Slice":
        """Return the slice of a name, such as tpu-v5p:4x8x8.

        Raises:
            PlanError: no such slice exists.
        """
        return cls(*read_name(name))

    @property
    def name(self) -> str:
        """Its canonical name."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def torus(self) -> tuple[int, ...]:
        """Devices along each axis of the torus; the devices of one chip are another axis. For GPUs the shape."""
        return (*self.shape, CORES.get(self.chip.name, 1))

    @property
    def devices(self) -> int:
        """Number of devices."""
        return prod(self.torus)

    def meshes(self) -> list[dict[str, int]]:
        """Return the meshes to search: those of whole torus axes; for GPUs all, because a switch has no rings."""
        return factorings(self.devices, self.chip) if self.chip.is_switch else meshes(self.torus)

    def larger(self) -> Iterator["Slice"]:
        """Return the slices of this chip with more devices, the smallest first."""
        every = (Slice(self.chip, shape) for shape in shapes(self.chip))
        return (each for each in every if each.devices > self.devices)
