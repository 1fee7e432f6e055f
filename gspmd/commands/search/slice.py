"""The slice, slices or nodes for which a layout is searched, read from a name without the compiler."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from gspmd.audit.offline.names import Named, read_name, shapes
from gspmd.hardware.chips import CHIPS, Chip


@dataclass(frozen=True)
class Slice:
    """One or several TPU slices, or nodes of GPUs.

    Attributes:
        topology: chip, shape and number of slices, parsed from the name.
    """

    topology: Named

    @classmethod
    def named(cls, name: str) -> "Slice":
        """Return the slice with a name such as tpu-v5p:4x8x8.

        Raises:
            PlanError: no such slice exists.
        """
        return cls(read_name(name))

    @property
    def chip(self) -> Chip:
        """The figures of one device.

        For a single TPU slice they include the shape of the slice, which affects the costs of axes.
        """
        chip, alone = self.topology.chip, self.topology.slices == 1 and self.topology.cores == 1
        return chip if chip.is_switch or not alone else replace(chip, slice_shape=tuple(n for n in self.shape if n > 1))

    @property
    def name(self) -> str:
        """The canonical name of the topology."""
        return self.topology.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Chips along each torus axis of a slice.

        For GPUs, the number of GPUs of a node, preceded by the number of nodes if there are several.
        """
        return self.topology.shape

    @property
    def torus(self) -> tuple[int, ...]:
        """Devices along each axis of the torus.

        The devices of a chip are a further axis. For GPUs, this is `shape` followed by 1.
        """
        return (*self.shape, self.topology.cores)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.topology.slices * prod(self.torus)

    def meshes(self) -> list[dict[str, int]]:
        """Return the meshes to be searched.

        On TPUs these are meshes of whole torus axes. On GPUs the sizes of mesh axes may be any factors of the number of
        devices, because a switch has no rings.
        """
        from gspmd.search.answers import factorings, meshes  # this imports JAX, but flags are read without it

        return factorings(self.devices, self.chip) if self.chip.is_switch else meshes(self.torus, self.topology.slices)

    def larger(self) -> Iterator["Slice"]:
        """Yield the larger topologies of this chip with the same number of slices, the smallest first."""
        of = CHIPS[self.chip.name]
        every = (Slice.named(Named(of, shape, self.topology.slices).name) for shape in shapes(of, self.topology.slices))
        return (each for each in every if each.devices > self.devices)
