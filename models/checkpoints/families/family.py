"""A family of public models: the tensors in its checkpoints, and the entries of its config.json."""

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
    """An entry of config.json that sets one field of `ModelConfig`.

    Attributes:
        key: the name of the entry, or several alternative names. The first of these names is written.
        default: the value if the entry is absent: a constant, a function of the fields of other entries, or REQUIRED.
        names: a mapping from values in the file to values of the field; None if both values are the same.
        null: the value that null stands for, in the same form as `default`, or WRONG if null is not allowed.
    """

    key: str | tuple[str, ...]
    default: Any = REQUIRED
    names: Mapping[Any, Any] | None = None
    null: Any = WRONG

    @property
    def keys(self) -> tuple[str, ...]:
        """All names that the entry may have."""
        return (self.key,) if isinstance(self.key, str) else self.key

    def entries(self, json: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entry's names that a file has, with their values.

        If the file has none of these names, the first name is returned with the default.
        """
        found = {key: json[key] for key in self.keys if key in json} or {self.keys[0]: self.default}
        return {key: self.null if value is None and self.null is not WRONG else value for key, value in found.items()}


@dataclass(frozen=True)
class Stored:
    """The form in which a checkpoint stores a parameter.

    Attributes:
        name: the name of the tensor, in which {N} is the index of the layer and {X} the index of the expert.
        dims: the dimensions of the tensor, in letters of the parameter. Dimensions in parentheses are merged into one,
            as in "(HD)E", and 1 is a dimension of size 1. If the tensor holds several parameters, bars separate them
            along the dimension in which they follow each other. For example, "(HD|KD|KD)E" has all queries, then all
            keys, then all values. "(K(QD|D|D))E" has, for each key head, its Q queries, the key and the value.
            "E(F(1|1))" has two matrices whose columns alternate.
        part: the index of the parameter among the parameters that the tensor holds.
        paired: the name of the tensor in a parallel block with two norms, if it differs from `name`.
        offset: a constant that the model adds to the stored values, such as 1 for norms that scale by 1 + w.
        gated: the name of the tensor in a feed-forward layer with a gate, if it differs from `name`.
    """

    name: str
    dims: str
    offset: float = 0.0
    gated: str = ""
    part: int = 0
    paired: str = ""


def fused(name: str, dims: str, *paths: str) -> dict[str, Stored]:
    """Return the stored forms of several parameters that one tensor holds, given the paths in the tensor's order.

    Example:
        >>> fused("mlp.gate_up_proj", "(F|F)E", "ffn.w_gate", "ffn.w_in")["ffn.w_in"].part
        1
    """
    return {path: Stored(name, dims, part=part) for part, path in enumerate(paths)}


@dataclass(frozen=True)
class Agreement:
    """Entries of config.json that no `Option` reads, because they depend on each other or must agree.

    Attributes:
        keys: the names of the entries.
        read: a function that returns the fields that these entries set. Its arguments are the contents of config.json,
            the fields set by options, and a list to which the function appends faults.
        write: a function from a model configuration to the entries.
        fields: the names of the fields that `read` returns.
        write_scaling: a function from a model configuration to entries of the table about the model's rotary scaling.
        reasons: a function from a model configuration to the reasons why the family cannot express the model.
    """

    keys: tuple[str, ...]
    read: Callable[[Mapping[str, Any], Mapping[str, Any], list[str]], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    fields: tuple[str, ...] = ()
    write_scaling: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    reasons: Callable[[ModelConfig], list[str]] = lambda config: []


@dataclass(frozen=True)
class Multiplier:
    """An entry by which a family's models multiply or divide activations; here, parameters are scaled instead.

    Attributes:
        multiplied: paths of the parameters that are multiplied by the entry's value.
        divided: paths of the parameters that are divided by the entry's value.
        divided_if_tied: paths of the parameters that are divided by the entry's value if the logits use the embedding
            table.
    """

    multiplied: tuple[str, ...] = ()
    divided: tuple[str, ...] = ()
    divided_if_tied: tuple[str, ...] = ()

    def factors(self, value: float, *, tied: bool) -> dict[str, float]:
        """Return, by path, the factors of the parameters that the entry scales if it has this value."""
        divided = self.divided + (self.divided_if_tied if tied else ())
        return {**dict.fromkeys(self.multiplied, value), **dict.fromkeys(divided, 1 / value)}


@dataclass(frozen=True)
class Family:
    """An architecture of public models, as a table that serves both loading and saving.

    Every field of `ModelConfig` is in `options`, `fixed` or `derived`, belongs to the rotary embedding, or does not
    affect the contents of a checkpoint.

    Attributes:
        title: the name of the family in prose.
        architecture: the family's name in the entry `architectures` of config.json.
        model_type: the family's name in the entry `model_type`.
        options: a mapping from a field, such as "heads", or "moe.experts" for a field of experts, to the entry that
            sets the field.
        fixed: a mapping from a field to the value that the field has in the whole family.
        tensors: a mapping from a parameter's path, without the position of its block ("blocks.0."), to the form in
            which the parameter is stored.
        derived: a mapping from a field to the function that computes its value from the other fields.
        inactive: a mapping from an entry to the values with which the entry has no effect. The first value is the
            default. Other values are refused.
        ignored_entries: entries that have no effect in this family, whatever their value.
        rope_base: default of rope_theta, or None if it cannot be set.
        rope_types: a mapping from the family's name of a scaling of the rotary embedding to the kind of `RopeScaling`;
            empty if the family has all kinds, under the names of `RopeScaling`.
        original_length: default of original_max_position_embeddings in families that have this entry outside the table
            of the scaling. There it takes precedence over the same entry in the table. None if there is no default.
        partial_rotary: default of partial_rotary_factor, or None if it cannot be set.
        default_rope: the table of the rotary scaling for files without one; None for no scaling.
        local_rope_base: default base of the rotary embedding of sliding layers, or None if all layers have one base.
        window: the entries about a sliding window, or None if the family has no sliding layers.
        logit_scale: default of the factor of the logits, or None if the family has no such factor.
        scale_embedding: whether the family's models multiply embedded tokens by √E.
        length: the names of the entry with the length of the longest sequence. The first name is written. Empty if
            there is no such entry.
        agreement: entries that no `Option` reads, because they depend on each other (see `Agreement`), or None.
        root_scaled: the entries that say whether logits are multiplied by 1/√E. If a file has several of these entries,
            the first one is used. If a file has none, the value is true. Empty if logits are never multiplied. In
            written checkpoints, tied models have this factor.
        output_dropout: the entry with the fraction of the experts' outputs that training drops, and its default. In
            evaluation outputs are multiplied by 1 - fraction. Here this factor is part of the experts' last matrix and
            bias. In written checkpoints the fraction is 0. None if the family has no such entry.
        rope_names: the names of the entries rope_theta and partial_rotary_factor outside the table of the scaling.
        multipliers: a mapping from an entry to the parameters that are scaled by its value. The value is a number, 1 by
            default. In written checkpoints it is 1.
        copies: names of tensors that are copies of the embedding table. They are written if the logits have a table of
            their own.
        default_length: default of the entry with the length of the longest sequence, or None for no limit.
        modules: the names of the entry with the number of multi-token prediction modules, 1 by default. The tensors of
            these modules are numbered like layers that follow the last layer. They are not read, and in written
            checkpoints the number is 0. Empty if the family has no such entry.
        renamed: pairs of a regular expression for the whole name of a tensor in some files and the name that replaces
            it.
        text_part: for a model that also reads images, defaults for entries that files of the text model alone must
            have. The config.json of such a model has the entries about the text model in a table, `text_config`. None
            for a model that reads only text.
        text_type: the `model_type` in `text_config`, or empty for a model that reads only text.
        aliases: other names of the architecture, in files published with classes of their own.

    Raises:
        ValueError: only one of `text_part` and `text_type` is given.
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

    #: Tensors that are computed and not learned, which old files contain.
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq", r".*\.attn\.(masked_)?bias")

    def __post_init__(self) -> None:
        if (self.text_part is None) == bool(self.text_type):  # without a type, files could not be read
            raise ValueError(f"{self.title}: a family with images has both text_part and text_type; set both.")

    @property
    def has_encoder(self) -> bool:
        """Whether the family's models are encoder–decoders."""
        return "encoder_layers" in self.options
