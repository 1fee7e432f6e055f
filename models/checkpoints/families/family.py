"""A family of public models: which tensors its checkpoints hold, and what its config.json says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .window import Window

REQUIRED, WRONG = object(), object()


@dataclass(frozen=True)
class Option:
    """An entry of config.json that sets fields of `ModelConfig`.

    Attributes:
        key: its name, or names of which the first is written.
        default: its value where it is absent; a function of the fields of other entries; or REQUIRED.
        names: value in the file to value here, where they are called otherwise; None if they are the same.
        null: its value where it is null, likewise; WRONG where null is no value of it.
    """

    key: str | tuple[str, ...]
    default: Any = REQUIRED
    names: Mapping[Any, Any] | None = None
    null: Any = WRONG

    @property
    def keys(self) -> tuple[str, ...]:
        """All its names."""
        return (self.key,) if isinstance(self.key, str) else self.key

    def entries(self, json: Mapping[str, Any]) -> dict[str, Any]:
        """Its names in a file, each with its value; its first name with its default if the file has none."""
        found = {key: json[key] for key in self.keys if key in json} or {self.keys[0]: self.default}
        return {key: self.null if value is None and self.null is not WRONG else value for key, value in found.items()}


@dataclass(frozen=True)
class Stored:
    """The stored form of a parameter.

    Attributes:
        name: of the tensor; {N} is the number of the layer and {X} that of the expert.
        dims: its dimensions, in the parameter's letters; those in parentheses are one, as in "(HD)E".
        offset: what the model adds to it: 1 for norms that scale by 1 + w.
    """

    name: str
    dims: str
    offset: float = 0.0


@dataclass(frozen=True)
class Family:
    """One architecture of public models: a table that loading reads in one direction and saving in the other.

    Every field of `ModelConfig` is in `options`, `fixed` or `derived`, or belongs to the rotary embedding, or does not
    change what a checkpoint holds.

    Attributes:
        title: what it is called in prose.
        architecture: its name in `architectures` of config.json.
        model_type: its name in `model_type`.
        options: field, those of experts as "moe.experts", to the entries that set it.
        fixed: field to the value that it has in the whole family.
        tensors: path of a parameter, without "blocks.0.", to how it is stored.
        derived: field to its value as a function of the other fields.
        inactive: entry to the values, its default first, under which it has no effect; other values are refused.
        ignored_entries: entries that change nothing in this family, whatever their value.
        rope_base: the default of rope_theta; None where it cannot be set.
        partial_rotary: the default of partial_rotary_factor; None where it cannot be set.
        window: how it says that attention looks back over a few tokens only; None where it has no such layers.
        logit_scale: the default of the factor of the logits; None where there is none.
        scale_embedding: whether its models multiply embedded tokens by √E.
        length: the names of the entry with the longest sequence, of which the first is written.
    """

    title: str
    architecture: str
    model_type: str
    options: Mapping[str, Option]
    fixed: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    derived: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    inactive: Mapping[str, tuple] = field(default_factory=dict)
    ignored_entries: tuple[str, ...] = ()
    rope_base: float | None = 10000.0
    partial_rotary: float | None = None
    window: Window | None = None
    logit_scale: float | None = None
    scale_embedding: bool = False
    length: tuple[str, ...] = ("max_position_embeddings",)

    #: Tensors that are computed, not learned: old files have them.
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq", r".*\.attn\.(masked_)?bias")
