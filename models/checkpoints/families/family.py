"""A family of public models: the tensors of its checkpoints, and the entries of its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .window import Window

if TYPE_CHECKING:
    from ...config import ModelConfig

REQUIRED, WRONG = object(), object()


@dataclass(frozen=True)
class Option:
    """An entry of config.json that sets fields of `ModelConfig`.

    Attributes:
        key: the entry's name, or several alternative names, of which the first is written.
        default: its value if it is absent: a constant, a function of the fields of other entries, or REQUIRED.
        names: maps values in the file to values of the field; None if both are the same.
        null: its value if it is null, given like `default`; WRONG if null is not allowed.
    """

    key: str | tuple[str, ...]
    default: Any = REQUIRED
    names: Mapping[Any, Any] | None = None
    null: Any = WRONG

    @property
    def keys(self) -> tuple[str, ...]:
        """Return all names of the entry."""
        return (self.key,) if isinstance(self.key, str) else self.key

    def entries(self, json: Mapping[str, Any]) -> dict[str, Any]:
        """Return the names that a file uses, with their values; the first name with the default if it uses none."""
        found = {key: json[key] for key in self.keys if key in json} or {self.keys[0]: self.default}
        return {key: self.null if value is None and self.null is not WRONG else value for key, value in found.items()}


@dataclass(frozen=True)
class Stored:
    """The stored form of a parameter.

    Attributes:
        name: the tensor's name; {N} is the number of the layer and {X} that of the expert.
        dims: its dimensions, in the parameter's letters; those in parentheses are merged into one, as in "(HD)E", and 1
            is a dimension of size 1.
        offset: the constant that the model adds to it: 1 for norms that scale by 1 + w.
        gated: its name in a feed-forward layer with a gate, if that differs.
    """

    name: str
    dims: str
    offset: float = 0.0
    gated: str = ""


@dataclass(frozen=True)
class Agreement:
    """Entries of config.json that no `Option` reads, because they must agree with others or be read together with them.

    Attributes:
        keys: their names.
        read: a function from config.json, the fields of the options, and a list of faults to which it adds, to fields.
        write: a function from a model to the entries.
        fields: the names of the fields that `read` returns.
    """

    keys: tuple[str, ...]
    read: Callable[[Mapping[str, Any], Mapping[str, Any], list[str]], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """One architecture of public models, as a table that serves both loading and saving.

    Every field of `ModelConfig` is in `options`, `fixed` or `derived`, or belongs to the rotary embedding, or does not
    affect a checkpoint's contents.

    Attributes:
        title: its name in prose.
        architecture: its name in `architectures` of config.json.
        model_type: its name in `model_type`.
        options: maps a field (those of experts as "moe.experts") to the entries that set it.
        fixed: maps a field to the value that it has in the whole family.
        tensors: maps a parameter's path, without "blocks.0." or another place, to its stored form.
        derived: maps a field to its value as a function of the other fields.
        inactive: maps an entry to the values with which it has no effect, its default first; others are refused.
        ignored_entries: entries that have no effect in this family, whatever their value.
        rope_base: default of rope_theta; None if it cannot be set.
        partial_rotary: default of partial_rotary_factor; None if it cannot be set.
        window: the entries that describe a sliding window; None if the family has no such layers.
        logit_scale: default of the factor of the logits; None if the family has no such factor.
        scale_embedding: whether its models multiply embedded tokens by √E.
        length: names of the entry with the longest sequence, of which the first is written; none if there is none.
        agreement: entries that are read together with others; None if there are none.
        root_scaled: entries of which the first that is given, true by default, says whether logits are multiplied by
            1/√E; none if they never are. Models that are written have this factor if they are tied.
        output_dropout: the entry with the share of the experts' outputs that training drops, and its default. In
            evaluation outputs are multiplied by 1 - share; here their last matrix and bias are. Models that are written
            have a share of 0. None if the family has no such entry.
        copies: tensors that are copies of the embedding table; they are written if the logits have their own table.
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
    agreement: Agreement | None = None
    root_scaled: tuple[str, ...] = ()
    output_dropout: tuple[str, float] | None = None
    copies: tuple[str, ...] = ()

    #: Tensors that are computed rather than learned; old files contain them.
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq", r".*\.attn\.(masked_)?bias")

    @property
    def has_encoder(self) -> bool:
        """Whether its models are encoder–decoders."""
        return "encoder_layers" in self.options
