"""The tensors of a checkpoint that a parameter consists of, and the part of each that a shard needs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from gspmd.layouts import Layout
from gspmd.layouts.rules.sizes import Padded

from ..config import ModelConfig
from ..parameters import ParameterRow, parameters
from .config import Described
from .families import Stored

Place = tuple[int | slice, ...]
Region = tuple[slice, ...]


@dataclass(frozen=True)
class ParameterSource:
    """A parameter and its tensors: one, or one for every layer, or for every expert of every layer.

    Attributes:
        row: the parameter, whose shape may be padded.
        stored: how its tensors are called and shaped.
        factor: the parameter is factor · (tensor + offset).
    """

    row: ParameterRow
    stored: Stored
    factor: float

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of the parameter's dimensions, without padding."""
        return dict(zip(self.row.spec.dims, self.row.real_shape))

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
        return self.stored.name.format(**dict(zip(self.counted, numbers)))

    def names(self) -> Iterator[str]:
        """The names of all its tensors."""
        yield from map(self.name, self.counts())

    def counts(self, index: tuple[slice, ...] | None = None) -> list[tuple[int, ...]]:
        """The numbers of the tensors that a shard has parts of; of all tensors without one."""
        parts = dict(zip(self.row.spec.dims, index or [slice(None)] * len(self.row.shape)))
        return list(product(*(range(*parts[dim].indices(self.sizes[dim])) for dim in self.counted)))

    def pieces(self, index: tuple[slice, ...], numbers: tuple[int, ...]) -> Iterator[tuple[Place, Region]]:
        """Cut the part of a tensor that a shard has into pieces: one, or several with padding between them.

        Args:
            index: the shard, one slice for each dimension of the parameter.
            numbers: of the tensor, one of `counts(index)`.

        Yields:
            Where a piece lies in the shard, in the order of the parameter's dimensions, with numbers for the counted
            ones; and the region of the tensor, in the order of `dims`.
        """
        at = dict(zip(self.counted, numbers))
        runs: list[list[tuple[int | slice, slice]]] = []
        for dim, part, padded, size in zip(self.row.spec.dims, index, self.row.padding, self.row.shape):
            if dim in at:
                runs.append([(at[dim] - part.indices(size)[0], slice(at[dim], at[dim] + 1))])
            else:
                runs.append(list(_runs(*part.indices(size)[:2], padded)))
        for run in product(*runs):
            regions = {dim: region for dim, (_, region) in zip(self.row.spec.dims, run)}
            yield tuple(place for place, _ in run), tuple(regions[dim] for dim in self.dims)


def _runs(start: int, stop: int, padded: Padded | None) -> Iterator[tuple[slice, slice]]:
    """The runs of real entries from start to stop: where they lie after start, and which entries they are."""
    if padded is None:
        yield slice(0, stop - start), slice(start, stop)
        return
    for run in range(padded.runs):
        shift = run * (padded.wide_length - padded.length)
        first, last = run * padded.wide_length, run * padded.wide_length + padded.length
        first, last = max(start, first), min(stop, last)
        if first < last:
            yield slice(first - start, last - start), slice(first - shift, last - shift)


def sources(checkpoint: Described, config: ModelConfig, layout: Layout) -> dict[str, ParameterSource]:
    """Return the source of every parameter by its path.

    Args:
        checkpoint: the family's table, and the factors.
        config: the model.
        layout: a `gspmd.Layout`.
    """
    table = {}
    for path, row in parameters(config, layout).items():
        name = path.removeprefix("blocks.0.")  # no family has layers of several kinds
        table[path] = ParameterSource(row, checkpoint.family.tensors[name], checkpoint.factors.get(name, 1.0))
    return table
