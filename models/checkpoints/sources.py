"""Which tensors of a checkpoint a parameter consists of, and which part of each a shard needs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from ..config import ModelConfig
from ..parameters import Parameter, parameters
from .config import Described
from .families import Stored


@dataclass(frozen=True)
class Source:
    """A parameter and its tensors: one, or one for every layer, or for every expert of every layer.

    Attributes:
        row: the parameter, whose shape may be padded.
        stored: how its tensors are called and shaped.
        sizes: of the dimensions, without padding.
        first: number of the layer that is 0 of N.
        period: layers from one of N to the next.
        factor: the parameter is factor · (tensor + offset).
    """

    row: Parameter
    stored: Stored
    sizes: Mapping[str, int]
    first: int
    period: int
    factor: float

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """The dimensions of a tensor, in its order, none merged."""
        return tuple(self.stored.dims.replace("(", "").replace(")", ""))

    @cached_property
    def split(self) -> tuple[int, ...]:
        """The sizes of `dims`."""
        return tuple(self.sizes[dim] for dim in self.dims)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of a tensor, in which the dimensions in parentheses are one."""
        groups = re.findall(r"\((\w+)\)|(\w)", self.stored.dims)
        return tuple(math.prod(self.sizes[dim] for dim in merged or single) for merged, single in groups)

    @cached_property
    def counted(self) -> tuple[str, ...]:
        """The dimensions of the parameter that its tensors are counted by: layers, experts."""
        return tuple(dim for dim in self.row.spec.dims if f"{{{dim}}}" in self.stored.name)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The permutation from the parameter's dimensions, but for the counted ones, to those of a tensor."""
        own = [dim for dim in self.row.spec.dims if dim not in self.counted]
        return tuple(own.index(dim) for dim in self.dims)

    def name(self, numbers: tuple[int, ...]) -> str:
        """The name of the tensor at these numbers of the counted dimensions."""
        at = dict(zip(self.counted, numbers))
        if "N" in at:
            at["N"] = at["N"] * self.period + self.first
        return self.stored.name.format(**at)

    def counts(self, index: tuple[slice, ...] | None = None) -> list[tuple[int, ...]]:
        """The numbers of the tensors that a shard has parts of; of all tensors without one."""
        if index is None:
            return list(product(*(range(self.sizes[dim]) for dim in self.counted)))
        slices = self._slices(index)
        if any(part.start == part.stop for part in slices.values()):
            return []  # all of it is padding
        return list(product(*(range(slices[dim].start, slices[dim].stop) for dim in self.counted)))

    def piece(
        self, index: tuple[slice, ...], numbers: tuple[int, ...]
    ) -> tuple[tuple[int | slice, ...], tuple[slice, ...]]:
        """Return the part of a tensor that a shard has, without padding.

        Args:
            index: the shard, one slice for each dimension of the parameter.
            numbers: of the tensor, one of `counts(index)`.

        Returns:
            Where it lies in the shard, in the order of the parameter's dimensions, with numbers for the counted ones;
            and the region of the tensor, in the order of `dims`.
        """
        slices, at = self._slices(index), dict(zip(self.counted, numbers))
        place = tuple(
            at[dim] - part.start if dim in at else slice(0, part.stop - part.start) for dim, part in slices.items()
        )
        return place, tuple(slices[dim] for dim in self.dims)

    def _slices(self, index: tuple[slice, ...]) -> dict[str, slice]:
        """Dimension to the slice of a shard that is not padding."""
        slices = {}
        for dim, part, padded in zip(self.row.spec.dims, index, self.row.shape):
            start, stop, _ = part.indices(padded)
            slices[dim] = slice(start, max(start, min(stop, self.sizes[dim])))
        return slices


def sources(checkpoint: Described, config: ModelConfig, layout: Any) -> dict[str, Source]:
    """Return the source of every parameter by its path.

    Args:
        checkpoint: the family's table, and the factors.
        config: the model.
        layout: a `gspmd.Layout`.
    """
    sizes = config.sizes(batch=1, length=1) | {"V": config.vocabulary, "N": config.layers // config.period}
    table = {}
    for path, row in parameters(config, layout).items():
        place, name = 0, path
        if path.startswith("blocks."):
            _, number, name = path.split(".", 2)
            place = int(number)
        factor = checkpoint.factors.get(name, 1.0)
        table[path] = Source(row, checkpoint.family.tensors[name], sizes, place, config.period, factor)
    return table
