"""The checkpoint's tensors from which each parameter is read, and the region of each tensor that a shard needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from gspmd.layouts import Layout
from gspmd.layouts.rules.sizes import Padded

from ..config import ModelConfig
from ..parameters import ParameterRow, parameters
from ..tensors import tensor_sizes
from .config import Described
from .families import Stored
from .form import Form

Place = tuple[int | slice, ...]
Region = tuple[slice, ...]


@dataclass(frozen=True)
class ParameterSource:
    """A parameter and the tensors that store it: one tensor, one per layer, or one per expert of every layer.

    Attributes:
        row: the row of the parameter; its shape may include padding.
        stored: names and dimensions of the parameter's tensors.
        factor: the factor in the equation parameter = factor · (tensor + offset).
        layers: the indices of the checkpoint's layers that are stacked in the parameter, if the parameter belongs to
            blocks.
        sizes: the sizes of all dimensions without padding; Q is the number of query heads per key/value head.
    """

    row: ParameterRow
    stored: Stored
    factor: float
    layers: range = range(0)
    sizes: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def form(self) -> Form:
        """The position of the parameter in each tensor."""
        own = dict(zip(self.row.spec.dims, self.row.real_shape))
        return Form.of(self.stored.dims, self.stored.part, {**self.sizes, **own})

    @cached_property
    def counted(self) -> tuple[str, ...]:
        """The dimensions whose indices are in tensors' names: layers, and experts if each has tensors of its own."""
        return tuple(dim for dim in self.row.spec.dims if f"{{{dim}}}" in self.stored.name)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The permutation from the parameter's dimensions, without `counted` ones, to the tensor's dimensions."""
        own = [dim for dim in self.row.spec.dims if dim not in self.counted]
        return tuple(own.index("H" if dim == "Q" else dim) for dim in self.form.dims if dim in own or dim == "Q")

    def name(self, numbers: tuple[int, ...]) -> str:
        """Return the name of the tensor with the indices `numbers` of the `counted` dimensions."""
        at = dict(zip(self.counted, numbers))
        return self.stored.name.format(**at | ({"N": self.layers[at["N"]]} if "N" in at else {}))

    def names(self) -> Iterator[str]:
        """Yield the names of all tensors of the parameter."""
        yield from map(self.name, self.counts())

    def counts(self, index: tuple[slice, ...] | None = None) -> list[tuple[int, ...]]:
        """Return the indices of the tensors that contain parts of a shard, or of all tensors if `index` is None."""
        parts = dict(zip(self.row.spec.dims, index or [slice(None)] * len(self.row.shape)))
        real = dict(zip(self.row.spec.dims, self.row.real_shape))
        return list(product(*(range(*parts[dim].indices(real[dim])) for dim in self.counted)))

    def pieces(self, index: tuple[slice, ...], numbers: tuple[int, ...]) -> Iterator[tuple[Place, Region]]:
        """Cut a shard's part of a tensor into pieces, which padding or other heads may separate.

        Args:
            index: the shard, one slice for each dimension of the parameter.
            numbers: the indices of the tensor, one of the elements of `counts(index)`.

        Yields:
            The position of a piece in the shard, and the region of the parameter that the piece covers. The position is
            in the order of the parameter's dimensions, with integers for the `counted` dimensions. The region is in the
            order of `form.dims`.
        """
        at = dict(zip(self.counted, numbers))
        runs: list[list[tuple[int | slice, dict[str, slice]]]] = []
        for dim, part, padded, size in zip(self.row.spec.dims, index, self.row.padding, self.row.shape):
            if dim in at:
                runs.append([(at[dim] - part.indices(size)[0], {})])
            elif dim == "H" and "Q" in self.form.dims:
                of_heads = _runs(*part.indices(size)[:2], padded)
                runs.append([each for run in of_heads for each in _groups(*run, self.sizes["Q"])])
            else:
                runs.append([(place, {dim: region}) for place, region in _runs(*part.indices(size)[:2], padded)])
        for run in product(*runs):
            regions = {dim: region for _, of_dim in run for dim, region in of_dim.items()}
            yield tuple(place for place, _ in run), tuple(regions[dim] for dim in self.form.dims)


def _runs(start: int, stop: int, padded: Padded | None) -> Iterator[tuple[slice, slice]]:
    """Yield each run of real elements between `start` and `stop` as two slices.

    The first slice has offsets from `start`, and the second slice has indices that do not count padding.
    """
    if padded is None:
        yield slice(0, stop - start), slice(start, stop)
        return
    for run in range(padded.runs):
        shift = run * (padded.wide_length - padded.length)
        first, last = run * padded.wide_length, run * padded.wide_length + padded.length
        first, last = max(start, first), min(stop, last)
        if first < last:
            yield slice(first - start, last - start), slice(first - shift, last - shift)


def _groups(place: slice, heads: slice, queries: int) -> Iterator[tuple[slice, dict[str, slice]]]:
    """Cut a run of query heads into parts, each of which belongs to one key/value head."""
    head = heads.start
    while head < heads.stop:
        group, first = divmod(head, queries)
        count = min(queries - first, heads.stop - head)
        start = place.start + head - heads.start
        yield slice(start, start + count), {"K": slice(group, group + 1), "Q": slice(first, first + count)}
        head += count


def unplaced(path: str) -> tuple[str, int]:
    """Split a parameter's path into the name in a family's table and the position of its block in the period.

    Example:
        >>> unplaced("encoder.blocks.1.ffn.w_in"), unplaced("output.norm")
        (('encoder.ffn.w_in', 1), ('output.norm', 0))
    """
    place = re.search(r"(?<!\w)blocks\.(\d+)\.", path)
    return (path.replace(place[0], ""), int(place[1])) if place else (path, 0)


def sources(checkpoint: Described, config: ModelConfig, layout: Layout) -> dict[str, ParameterSource]:
    """Return the source of every parameter, by its path.

    Args:
        checkpoint: the checkpoint, with the family's table and the factors.
        config: the model configuration.
        layout: the `gspmd.Layout` of the parameters.
    """
    sizes = {**tensor_sizes(config), "Q": config.heads // config.kv_heads}
    others = {"attention.w_k_up": "values", "attention.w_v_up": "keys"}  # W is the width of a tensor's other part
    table = {}
    for path, row in parameters(config, layout).items():
        name, place = unplaced(path)
        stored = checkpoint.family.tensors[name]
        if config.gated and stored.gated:
            stored = replace(stored, name=stored.gated)
        if config.parallel_norms == 2 and stored.paired:
            stored = replace(stored, name=stored.paired)
        beside = {"W": sizes[others[name]]} if name in others else {}
        factor = checkpoint.factors.get(name, 1.0)
        layers = config.weight_stacks(config.encoder_layers if path.startswith("encoder.") else None)[place]
        table[path] = ParameterSource(row, stored, factor, layers, {**sizes, **beside})
    return table
