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
        key: the entry's name, or several alternative names; the first is used for writing.
        default: the value of an absent entry: a constant, a function of the fields of other entries, or REQUIRED.
        names: maps values in the file to values of the field; None if they are the same.
        null: the value that null stands for, given like `default`; WRONG if null is not allowed.
    """

    key: str | tuple[str, ...]
    default: Any = REQUIRED
    names: Mapping[Any, Any] | None = None
    null: Any = WRONG

    @property
    def keys(self) -> tuple[str, ...]:
        """All names of the entry."""
        return (self.key,) if isinstance(self.key, str) else self.key

    def entries(self, json: Mapping[str, Any]) -> dict[str, Any]:
        """Return the names that a file uses, with their values; the first name with the default if it uses none."""
        found = {key: json[key] for key in self.keys if key in json} or {self.keys[0]: self.default}
        return {key: self.null if value is None and self.null is not WRONG else value for key, value in found.items()}


@dataclass(frozen=True)
class Stored:
    """The stored form of a parameter.

    Attributes:
        name: the tensor's name; {N} is the index of the layer and {X} the index of the expert.
        dims: the tensor's dimensions, in the parameter's letters; dimensions in parentheses are merged into one, as in
            "(HD)E", and 1 is a dimension of size 1. If the tensor holds several parameters, bars separate them where
            they follow each other: "(HD|KD|KD)E" has all queries, then all keys, then all values; "(K(QD|D|D))E" for
            each key head its Q queries, the key and the value; "E(F(1|1))" two matrices whose columns alternate.
        part: the index of the parameter among the parameters that the tensor holds.
        paired: the tensor's name in a parallel block with two norms, if that differs.
        offset: the constant that the model adds to the stored values: 1 for norms that scale by 1 + w.
        gated: the tensor's name in a feed-forward layer with a gate, if that differs.
    """

    name: str
    dims: str
    offset: float = 0.0
    gated: str = ""
    part: int = 0
    paired: str = ""


def fused(name: str, dims: str, *paths: str) -> dict[str, Stored]:
    """Return the rows of the parameters that one tensor holds, in the order of the tensor.

    Example:
        >>> fused("mlp.gate_up_proj", "(F|F)E", "ffn.w_gate", "ffn.w_in")["ffn.w_in"].part
        1
    """
    return {path: Stored(name, dims, part=part) for part, path in enumerate(paths)}


@dataclass(frozen=True)
class Agreement:
    """Entries of config.json that no `Option` reads, because they depend on other entries or must agree with them.

    Attributes:
        keys: their names.
        read: a function of config.json, the fields of the options, and a list to which it appends faults; returns
            fields.
        write: a function from a model to the entries.
        fields: the names of the fields that `read` returns.
        write_scaling: a function from a model to entries of the table of its rotary scaling.
        reasons: a function from a model to the reasons why the family cannot express it.
    """

    keys: tuple[str, ...]
    read: Callable[[Mapping[str, Any], Mapping[str, Any], list[str]], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    fields: tuple[str, ...] = ()
    write_scaling: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    reasons: Callable[[ModelConfig], list[str]] = lambda config: []


@dataclass(frozen=True)
class Multiplier:
    """An entry of config.json by which a model multiplies or divides activations; here it scales parameters instead.

    Attributes:
        multiplied: paths of the parameters that are multiplied by its value.
        divided: paths of the parameters that are divided by it.
        divided_if_tied: paths of the parameters that are divided by it if the logits reuse the embedding table.
    """

    multiplied: tuple[str, ...] = ()
    divided: tuple[str, ...] = ()
    divided_if_tied: tuple[str, ...] = ()

    def factors(self, value: float, *, tied: bool) -> dict[str, float]:
        """Return the factors of parameters."""
        divided = self.divided + (self.divided_if_tied if tied else ())
        return {**dict.fromkeys(self.multiplied, value), **dict.fromkeys(divided, 1 / value)}


@dataclass(frozen=True)
class Family:
    """One architecture of public models, as a table that serves both loading and saving.

    Every field of `ModelConfig` is in `options`, `fixed` or `derived`, or belongs to the rotary embedding, or does not
    affect a checkpoint's contents.

    Attributes:
        title: its name in prose.
        architecture: its name in `architectures` of config.json.
        model_type: its name in `model_type`.
        options: maps a field (such as "heads", or "moe.experts" for a field of experts) to the entries that set it.
        fixed: maps a field to the value that it has in the whole family.
        tensors: maps a parameter's path, without the position of its block ("blocks.0."), to its stored form.
        derived: maps a field to its value as a function of the other fields.
        inactive: maps an entry to the values with which it has no effect, its default first; others are refused.
        ignored_entries: entries that have no effect in this family, whatever their value.
        rope_base: default of rope_theta; None if it cannot be set.
        rope_types: maps the names of scalings of the rotary embedding to kinds of `RopeScaling`; empty if the family
            has all of them, under their own names.
        original_length: default of original_max_position_embeddings in families that have this entry outside the table
            of the scaling, where it wins over the entry in the table; None if there is no default.
        partial_rotary: default of partial_rotary_factor; None if it cannot be set.
        default_rope: the table of the scaling for files without such a table; None for no scaling.
        local_rope_base: default base of the rotary embedding of sliding layers; None if all layers have the same base.
        window: the entries that describe a sliding window; None if the family has no such layers.
        logit_scale: default of the factor of the logits; None if the family has no such factor.
        scale_embedding: whether its models multiply embedded tokens by √E.
        length: names of the entry with the longest sequence; the first is used for writing; empty if there is no such
            entry.
        agreement: entries that no `Option` reads, since they depend on others (see `Agreement`); None if there are
            none.
        root_scaled: entries that say whether logits are multiplied by 1/√E, true by default; the first one that a file
            has counts. Empty if logits are never multiplied. In written checkpoints, tied models have this factor.
        output_dropout: the entry with the share of the experts' outputs that training drops, and its default. In
            evaluation outputs are multiplied by 1 - share; here this factor is part of the experts' last matrix and
            bias. In written checkpoints the share is 0. None if the family has no such entry.
        rope_names: names of the entries rope_theta and partial_rotary_factor outside the table of the scaling.
        multipliers: maps an entry, a number that is 1 by default, to the parameters that it is multiplied into. In
            written checkpoints it is 1.
        copies: tensors that are copies of the embedding table; they are written if the logits have their own table.
        default_length: default of the entry with the longest sequence; None for no limit.
        modules: names of the entry with the number of modules, 1 by default, that follow the last layer, are numbered
            like layers, and predict further tokens. They are not read, and 0 is written. Empty if there are none.
        renamed: regular expressions for whole names of tensors in some files, each with its replacement.
        text_part: for a model that also reads images, whose config.json has the entries of the text model in a table,
            `text_config`: defaults for entries that are required in files of the text model alone. None for a model
            that reads only text.
        text_type: the `model_type` in `text_config`; empty for a model that reads only text.
        aliases: other names of the architecture, in files that were published with their own classes.

    Raises:
        ValueError: `text_part` is given without `text_type`, or the reverse.
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
    rope_types: Mapping[str, str] = field(default_factory=dict)
    original_length: int | None = None
    partial_rotary: float | None = None
    local_rope_base: float | None = None
    default_rope: Mapping[str, Any] | None = None
    window: Window | None = None
    logit_scale: float | None = None
    scale_embedding: bool = False
    length: tuple[str, ...] = ("max_position_embeddings",)
    agreement: Agreement | None = None
    root_scaled: tuple[str, ...] = ()
    output_dropout: tuple[str, float] | None = None
    rope_names: tuple[str, str] = ("rope_theta", "partial_rotary_factor")
    multipliers: Mapping[str, Multiplier] = field(default_factory=dict)
    copies: tuple[str, ...] = ()
    default_length: int | None = None
    modules: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    text_part: Mapping[str, Any] | None = None
    text_type: str = ""
    aliases: tuple[str, ...] = ()

    #: Tensors that are computed rather than learned; old files contain them.
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq", r".*\.attn\.(masked_)?bias")

    def __post_init__(self) -> None:
        if (self.text_part is None) == bool(self.text_type):  # files of a family without a type could not be read
            raise ValueError(f"{self.title}: a family with images has both text_part and text_type; set both.")

    @property
    def has_encoder(self) -> bool:
        """Whether the family's models are encoder–decoders."""
        return "encoder_layers" in self.options
