"""Entries of config.json about layers without experts: which layers these are, and their width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

from .entries import in_json, is_whole
from .family import Agreement

if TYPE_CHECKING:
    from ...config import ModelConfig

_FIRST, _STEP, _ONLY, _WIDTH = "first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers", "intermediate_size"


@dataclass(frozen=True)
class DenseLayers:
    """The entries of a family in which some layers are dense and others have experts.

    Attributes:
        width: default of intermediate_size, the width of dense layers, or None if it must be given.
        first: in families whose first layers are dense, the default of first_k_dense_replace, which is the number of
            these layers. None in families that choose dense layers one by one. In such a family a layer is dense if
            mlp_only_layers lists it, or if its number, counted from 1, is not a multiple of decoder_sparse_step.
    """

    width: int | None
    first: int | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the entries."""
        return (_WIDTH, *((_STEP, _ONLY) if self.first is None else (_FIRST,)))

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields that `read` returns."""
        return "moe.every", "moe.offset", "moe.dense_layers", "moe.dense_feed_forward"

    @property
    def agreement(self) -> Agreement:
        """The entries as an `Agreement`, for a family in which no other entries depend on each other."""
        return Agreement(self.keys, self.read, self.write, self.fields, reasons=self.reasons)

    def read(self, json: Mapping[str, Any], fields: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
        """Return the fields about dense layers; the arguments are the same as for `Agreement.read`."""
        if fields["layers"] < 1:  # `ModelConfig` refuses this later
            return pattern([True]) | {"moe.dense_feed_forward": 0}
        sparse = self._sparse(json, fields["layers"], faults)
        width: Any = json.get(_WIDTH, self.width)
        if not all(sparse) and not (is_whole(width) and width >= 1):
            faults.append(f"{_WIDTH} is {in_json(width)}; it must be a whole number.")
        if sparse and not any(sparse):
            named = {key: f"{key} is {in_json(json[key])}" for key in self.keys if key in json and key != _WIDTH}
            # If the file has no such entry, only the default of first_k_dense_replace can leave all layers without
            # experts.
            given = " and ".join(named.values()) or f"{_FIRST} is {self.first} by default"
            faults.append(f"{given}, so none of the {len(sparse)} layers has experts; at least one must.")
        if faults:
            return {}
        return pattern(sparse) | {"moe.dense_feed_forward": 0 if all(sparse) else width}

    def _sparse(self, json: Mapping[str, Any], layers: int, faults: list[str]) -> list[bool]:
        """Return, for each layer, whether it has experts, or an empty list if the entries are wrong."""
        if self.first is not None:
            first = json.get(_FIRST, self.first)
            if is_whole(first):
                return [number >= first for number in range(layers)]
            faults.append(f"{_FIRST} is {in_json(first)}; it must be a whole number of layers.")
            return []
        step, only = json.get(_STEP, 1), json.get(_ONLY)
        if not is_whole(step) or step < 1:
            faults.append(f"{_STEP} is {in_json(step)}; it must be a whole number of layers.")
        if not (only is None or (isinstance(only, list) and all(map(is_whole, only)))):
            faults.append(f"{_ONLY} is {in_json(only)}; it must be a list of numbers of layers.")
        if faults:
            return []
        return [(number + 1) % step == 0 and number not in (only or ()) for number in range(layers)]

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Return the entries about a model's dense layers."""
        moe = config.moe
        assert moe is not None
        entries: dict[str, Any] = {_WIDTH: moe.dense_feed_forward or config.feed_forward}
        dense = [number for number in range(config.layers) if not config.is_sparse(number)]
        if self.first is not None:
            return entries | {_FIRST: len(dense)}
        if config.expert_place == moe.every - 1:
            return entries | {_STEP: moe.every, _ONLY: [*moe.dense_layers]}
        return entries | {_STEP: 1, _ONLY: dense}

    def reasons(self, config: ModelConfig) -> list[str]:
        """Return the reasons why the entries cannot express the dense layers of a model."""
        sparse = [*map(config.is_sparse, range(config.layers))]
        if config.moe is None or self.first is None or sparse == sorted(sparse):
            return []
        dense = ", ".join(str(number) for number, each in enumerate(sparse) if not each)
        return [f"layers {dense} have no experts, and in this family only the first layers can have none"]


def pattern(sparse: Sequence[bool]) -> dict[str, Any]:
    """Return the fields that say which layers have experts, with as few `moe.dense_layers` as possible.

    Args:
        sparse: for each layer, whether it has experts. At least one layer must have experts.

    >>> pattern([False, True] * 4)
    {'moe.every': 2, 'moe.offset': 1, 'moe.dense_layers': ()}
    >>> pattern([False, True, True, True])["moe.dense_layers"]
    (0,)
    """
    there = [number for number, each in enumerate(sparse) if each]
    every = gcd(len(sparse), *(number - there[0] for number in there))
    regular = range(there[0] % every, len(sparse), every)
    dense = tuple(number for number in regular if not sparse[number])
    return {"moe.every": every, "moe.offset": regular.start, "moe.dense_layers": dense}
