"""The keys of a layout: dimensions, kind and meaning of every tensor, and the default if a key is left out.

`Layout.check` applies this table, and `python scripts/document_layouts.py` copies it into docs/layouts.md.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from gspmd.annotate import LayoutError, Spec
from gspmd.annotate.errors import listed, shown, suggestion

# Largest number of alternatives that an error lists.
_NAMED = 4

Text = str | tuple[str, ...]
"""A spec as text, or a tuple of alternatives, one of which is chosen for the sizes and the mesh."""

#: The meaning of the dimensions, in the order of docs/layouts.md.
DIMENSIONS = {
    "B": "batch", "L": "length", "E": "embed", "F": "feed-forward", "H": "query heads", "K": "key/value heads",
    "D": "head size", "V": "vocabulary", "T": "key/value length", "X": "experts", "C": "capacity", "G": "token groups",
    "N": "layers of one kind, in a stack", "R": "buckets of relative positions",
    "P": "learned positions", "Z": "latent of keys and values, with the rotated key", "U": "latent of queries",
}  # fmt: skip

#: The sections that describe a part of the model, in the order of the forward pass.
PARTS = ("embedding", "attention", "cross", "ffn", "moe", "output")

#: The section that splits the stacked layers into the stages of a pipeline.
PIPELINE = "pipeline"

#: Overriding sections, whose quoted keys override lines of the parts: purpose, and the function that reads each.
OVERRIDES = {
    "optimizer": (
        "the optimizer state of a parameter. Without a line, it is sharded like the parameter. Training stores the "
        "state in this spec, moves gradients to it before it clips and updates, and moves new parameters back "
        "(`gspmd_models.optimizer_specs`)."
    ),
    "gradients": (
        "the gradient of a parameter, on its way to the optimizer. Without a line, it is sharded like the parameter. "
        "The training step moves a gradient from its parameter's spec to this spec, then to the spec in [optimizer] "
        "(`gspmd_models.gradient_specs`). A gradient with `partialsum-` in this spec is reduced only by the second "
        "move; see below."
    ),
    "encoder": (
        "any tensor of the encoder of an encoder–decoder, except the tables, which both stacks share: "
        '`Layout.stack("encoder")`. A decoder-only model ignores it.'
    ),
    "prefill": (
        'any tensor, while `gspmd_models.Generator` reads a prompt: `Layout.phase("prefill")`. '
        "Parameters and cache are stored as [decode] says. Training ignores it."
    ),
    "decode": (
        "any tensor, while `gspmd_models.Generator` generates tokens one by one; also the stored parameters and the "
        'cache: `Layout.phase("decode")`. Training ignores it.'
    ),
    "cache": (
        "the key/value cache, sharded over any mix of batch, length and heads, however queries and keys are sharded: "
        "`Layout.cache`. The cache of cross-attention holds the keys of the encoded source."
    ),
}

#: The overriding section for the encoder, a second stack of blocks.
ENCODER = "encoder"

#: The overriding sections for the phases of serving.
PHASES = ("prefill", "decode")

#: The overriding section whose keys apply to both phases of serving.
SERVING = "serving"


@dataclass(frozen=True)
class Key:
    """A key that a layout may have, with the properties of its line.

    Attributes:
      name: section and key, such as `"ffn.w_in"`.
      dims: the dimensions of the spec, in their order; for a via, the keys of the two operands.
      kind: `"parameter"`, `"activation"`, `"stack"` (of layers) or `"via"`; `"tensor"` in a user-defined section.
      meaning: the description of the key in docs/layouts.md, on one line.
      default: another key. If this key is absent, the spec of `default` is used, restricted to the dimensions of this
        key. None if there is no default.
      local: dimensions that must not be sharded, because the code between einsums needs the whole of these dimensions
        on each device.
      optional: whether the key may be absent although it has no default. If a via is absent, the planner chooses.
    """

    name: str
    dims: str | tuple[str, ...]
    kind: str
    meaning: str
    default: str | None = None
    local: str = ""
    optional: bool = False

    @property
    def section(self) -> str:
        """The section to which this key belongs."""
        return self.name.partition(".")[0]


def _parameter(name: str, dims: str, meaning: str, **more) -> Key:
    return Key(name, dims, "parameter", meaning, **more)


def _activation(name: str, dims: str, meaning: str, **more) -> Key:
    return Key(name, dims, "activation", meaning, **more)


def _via(name: str, left: str, right: str, meaning: str, **more) -> Key:
    return Key(name, (left, right), "via", meaning, optional=True, **more)


# By default biases and the scales of int8 matrices are sharded like the tensor to which they are applied, so that they
# need not be moved. A gate is sharded like w_in, so that one move of the residual serves both matrices.
_ALL = (
    Key(
        "pipeline.layers",
        "N",
        "stack",
        "The stacked layers, split into stages along one mesh axis; without this line they are not split.",
        optional=True,
    ),
    _parameter("embedding.table", "VE", "The embedding table."),
    _parameter("embedding.positions", "PE", "Vectors of learned positions.", default="embedding.table"),
    _parameter("embedding.norm", "E", "Scale of a norm of embedded tokens.", default="attention.norm"),
    _parameter("embedding.norm_bias", "E", "Bias of this norm.", default="embedding.norm"),
    _activation("embedding.tokens", "BL", "Token ids."),
    _activation("attention.residual", "BLE", "The residual stream around attention."),
    _parameter("attention.norm", "E", "Scale of the norm before attention, and of one after it."),
    _parameter("attention.norm_bias", "E", "Biases of these norms.", default="attention.norm"),
    _parameter("attention.w_q", "EHD", "Query projection."),
    _parameter("attention.w_k", "EKD", "Key projection."),
    _parameter("attention.w_v", "EKD", "Value projection.", default="attention.w_k"),
    _activation("attention.query", "BLHD", "Queries, as the attention core reads them, and its result.", local="D"),
    _activation("attention.key", "BLKD", "Keys and values, as the attention core reads them.", local="D"),
    _parameter("attention.b_q", "HD", "Bias of the queries; scales of an int8 w_q.", default="attention.query"),
    _parameter("attention.b_k", "KD", "Bias of the keys; scales of an int8 w_k.", default="attention.key"),
    _parameter("attention.b_v", "KD", "Bias of the values; scales of an int8 w_v.", default="attention.key"),
    _parameter("attention.q_norm", "D", "Scale of the norm of every head's queries.", default="attention.query"),
    _parameter("attention.k_norm", "D", "Scale of the norm of every head's keys.", default="attention.key"),
    _parameter(
        "attention.q_norm_all",
        "HD",
        "Scale of the norm of all heads' queries together.",
        default="attention.query",
    ),
    _parameter("attention.k_norm_all", "KD", "Scale of the norm of all heads' keys together.", default="attention.key"),
    _parameter("attention.w_q_down", "EU", "Projection to the latent of queries.", default="attention.w_q"),
    _activation("attention.latent_query", "BLU", "The latent of queries.", default="attention.query", local="U"),
    _parameter("attention.b_q_down", "U", "Scales of an int8 w_q_down.", default="attention.latent_query"),
    _parameter("attention.q_latent_norm", "U", "Scale of the norm of this latent.", default="attention.latent_query"),
    _parameter("attention.w_q_up", "UHD", "Query projection of this latent.", default="attention.w_q"),
    _parameter("attention.b_q_up", "HD", "Scales of an int8 w_q_up.", default="attention.query"),
    _parameter("attention.w_k_down", "EZ", "Projection to latent and rotated key.", default="attention.w_k"),
    _activation(
        "attention.latent",
        "BLZ",
        "The latent of keys and values, and the rotated key.",
        default="attention.key",
        local="Z",
    ),
    _parameter("attention.b_k_down", "Z", "Scales of an int8 w_k_down.", default="attention.latent"),
    _parameter("attention.latent_norm", "Z", "Scale of the latent's norm.", default="attention.latent"),
    _parameter("attention.w_k_up", "ZHD", "Keys of the latent.", default="attention.w_q"),
    _parameter("attention.b_k_up", "HD", "Scales of an int8 w_k_up.", default="attention.query"),
    _parameter("attention.w_v_up", "ZHD", "Values of the latent.", default="attention.w_k_up"),
    _parameter("attention.b_v_up", "HD", "Scales of an int8 w_v_up.", default="attention.query"),
    _activation(
        "attention.absorbed",
        "BLHZ",
        "Queries for cached latents, and the weighted sums of latents.",
        default="attention.query",
        local="Z",
    ),
    _parameter(
        "attention.sinks", "H", "Logit of every query head without a value (a sink).", default="attention.query"
    ),
    _parameter("attention.w_o", "HDE", "Output projection."),
    _parameter(
        "attention.b_o", "E", "Bias of attention's output; scales of an int8 w_o.", default="attention.residual"
    ),
    _via("attention.in_via", "attention.residual", "attention.w_q", "Specs in which residual and w_q are multiplied."),
    _via(
        "attention.key_via",
        "attention.residual",
        "attention.w_k",
        "Specs in which residual and w_k (and w_v) are multiplied; the residual must be sharded as in in_via. "
        "If only in_via is given, E is sharded as in its w_q, and K as in attention.key.",
    ),
    _via(
        "attention.out_via",
        "attention.query",
        "attention.w_o",
        "Specs in which the core's result and w_o are multiplied.",
    ),
    _parameter(
        "attention.relative", "RH", "Table of the relative position bias of every head.", default="attention.query"
    ),
    _parameter("cross.norm", "E", "Scale of the norm before cross-attention.", default="attention.norm"),
    _parameter("cross.norm_bias", "E", "Bias of the norm before cross-attention.", default="attention.norm_bias"),
    _activation("cross.memory", "BTE", "The encoder's output, T tokens.", default="attention.residual"),
    _parameter("cross.w_q", "EHD", "Query projection of the decoder.", default="attention.w_q"),
    _parameter("cross.w_k", "EKD", "Key projection of the encoder's output.", default="attention.w_k"),
    _parameter("cross.w_v", "EKD", "Value projection of the encoder's output.", default="attention.w_v"),
    _activation(
        "cross.query",
        "BLHD",
        "Queries, as the core of cross-attention reads them, and its result.",
        default="attention.query",
        local="D",
    ),
    _activation(
        "cross.key",
        "BTKD",
        "Keys and values of the encoder's output, as the core of cross-attention reads them.",
        default="attention.key",
        local="D",
    ),
    _parameter("cross.b_q", "HD", "Bias of the queries; scales of an int8 w_q.", default="cross.query"),
    _parameter("cross.b_k", "KD", "Bias of the keys; scales of an int8 w_k.", default="cross.key"),
    _parameter("cross.b_v", "KD", "Bias of the values; scales of an int8 w_v.", default="cross.key"),
    _parameter("cross.w_o", "HDE", "Output projection of cross-attention.", default="attention.w_o"),
    _parameter(
        "cross.b_o", "E", "Bias of cross-attention's output; scales of an int8 w_o.", default="attention.residual"
    ),
    _via(
        "cross.in_via",
        "attention.residual",
        "cross.w_q",
        "Specs in which residual and w_q are multiplied.",
        default="attention.in_via",
    ),
    _via("cross.key_via", "cross.memory", "cross.w_k", "Specs in which memory and w_k (and w_v) are multiplied."),
    _via(
        "cross.out_via",
        "cross.query",
        "cross.w_o",
        "Specs in which the core's result and w_o are multiplied.",
        default="attention.out_via",
    ),
    _activation("ffn.residual", "BLE", "The residual stream around the feed-forward block."),
    _parameter("ffn.norm", "E", "Scale of the norm before the feed-forward block, and of one after it."),
    _parameter("ffn.norm_bias", "E", "Biases of these norms.", default="ffn.norm"),
    _parameter("ffn.w_in", "EF", "First matrix."),
    _parameter("ffn.w_gate", "EF", "The gate of a gated activation.", default="ffn.w_in"),
    _activation("ffn.hidden", "BLF", "The input of the activation function."),
    _parameter("ffn.b_in", "F", "Bias of the product with w_in, and its scales if w_in is int8.", default="ffn.hidden"),
    _parameter(
        "ffn.b_gate", "F", "Bias of the product with w_gate, and its scales if w_gate is int8.", default="ffn.hidden"
    ),
    _parameter("ffn.w_out", "FE", "Second matrix."),
    _parameter(
        "ffn.b_out", "E", "Bias of the feed-forward block's output; scales of an int8 w_out.", default="ffn.residual"
    ),
    _via("ffn.in_via", "ffn.residual", "ffn.w_in", "Specs in which residual and w_in (and w_gate) are multiplied."),
    _via("ffn.out_via", "ffn.hidden", "ffn.w_out", "Specs in which hidden and w_out are multiplied."),
    _parameter("moe.router", "EX", "The router's matrix."),
    _parameter("moe.router_noise", "EX", "The matrix of noisy-top-k's noise widths.", default="moe.router"),
    _parameter("moe.router_bias", "X", "Bias of the router's logits.", default="moe.router"),
    _parameter(
        "moe.choice_bias",
        "X",
        "Bias of the scores by which experts are chosen, which has no gradient.",
        default="moe.router",
    ),
    _activation("moe.groups", "GLE", "The residual in token groups; all of a group is on one device.", local="LE"),
    _activation(
        "moe.dispatched", "GXCE", "Tokens in the capacity slots of their group, before they are sent.", local="XCE"
    ),
    _activation("moe.expert_input", "GXCE", "The same slots on their experts' devices, and the experts' results."),
    _parameter("moe.w_in", "XEF", "First matrix of every expert."),
    _parameter("moe.w_gate", "XEF", "The gate of every expert.", default="moe.w_in"),
    _activation("moe.hidden", "GXCF", "The input of the experts' activation function."),
    _parameter(
        "moe.b_in",
        "XF",
        "Biases of the products with w_in and with w_gate, and their scales if they are int8.",
        default="moe.hidden",
    ),
    _parameter("moe.w_out", "XFE", "Second matrix of every expert."),
    _parameter(
        "moe.b_out", "XE", "Bias of every expert's output; scales of an int8 w_out.", default="moe.expert_input"
    ),
    _via(
        "moe.in_via",
        "moe.expert_input",
        "moe.w_in",
        "Specs in which expert_input and w_in (and w_gate) are multiplied.",
    ),
    _via("moe.out_via", "moe.hidden", "moe.w_out", "Specs in which hidden and w_out are multiplied."),
    _parameter(
        "moe.shared_in",
        "EF",
        "First matrix of the experts that every token uses: F is their number times an expert's width.",
        default="ffn.w_in",
    ),
    _parameter("moe.shared_gate", "EF", "The gate of the shared experts.", default="moe.shared_in"),
    _activation(
        "moe.shared_hidden", "BLF", "The input of the shared experts' activation function.", default="ffn.hidden"
    ),
    _parameter(
        "moe.shared_bias",
        "F",
        "Biases of the products with shared_in and shared_gate, and their scales if they are int8.",
        default="moe.shared_hidden",
    ),
    _parameter("moe.shared_out", "FE", "Second matrix of the shared experts.", default="ffn.w_out"),
    _parameter(
        "moe.shared_mix",
        "E",
        "Weights of the sigmoid that multiplies the shared experts' output.",
        default="ffn.residual",
    ),
    _via(
        "moe.shared_in_via",
        "ffn.residual",
        "moe.shared_in",
        "Specs in which residual and shared_in (and shared_gate) are multiplied.",
        default="ffn.in_via",
    ),
    _via(
        "moe.shared_out_via",
        "moe.shared_hidden",
        "moe.shared_out",
        "Specs in which shared_hidden and shared_out are multiplied.",
        default="ffn.out_via",
    ),
    _parameter("output.norm", "E", "Scale of the last norm."),
    _parameter("output.norm_bias", "E", "Bias of the last norm.", default="output.norm"),
    _parameter("output.table", "VE", "The unembedding table, if it is not tied.", default="embedding.table"),
    _activation("output.logits", "BLV", "Logits; the loss is taken without gathering the vocabulary."),
    _parameter(
        "output.bias", "V", "Bias of the logits; scales of int8 tables, one for each row.", default="output.logits"
    ),
    _via("output.in_via", "ffn.residual", "output.table", "Specs in which residual and table are multiplied."),
)

#: Every key by name, in the order of the forward pass.
KEYS = {key.name: key for key in _ALL}

#: The keys of [cache], in whose specs the length is T.
CACHE = {
    "attention.key": Key(
        "attention.key", "BTKD", "activation", "The key/value cache; by default as attention.key.", local="D"
    ),
    "cross.key": Key(
        "cross.key", "BTKD", "activation", "Keys and values of the source; by default as cross.key.", local="D"
    ),
}

#: Keys of earlier releases, and their names now.
RENAMED = {"moe.scale_in": "moe.b_in", "moe.scale_out": "moe.b_out", "moe.shared_scale": "moe.shared_bias"}

#: Lines that only feed-forward layers without experts need; those with experts need norm and residual of [ffn] too.
DENSE = ("ffn.w_in", "ffn.hidden", "ffn.w_out")

#: Lines that every layout has, whatever its model.
ALWAYS = tuple(
    key.name
    for key in _ALL
    if key.default is None and not key.optional and key.section != "moe" and key.name not in DENSE
)

#: Pairs of tensors whose specs must agree on some dimensions, because no equation moves one to the other: both blocks
#: add to one residual stream, a device attends only within its own sequences, and dispatches only its own groups.
ALIKE = (
    ("attention.residual", "ffn.residual", "BLE"),
    ("attention.query", "attention.key", "B"),
    ("attention.latent", "attention.key", "BL"),
    ("attention.absorbed", "attention.query", "BLH"),
    ("cross.query", "cross.key", "B"),
    ("moe.groups", "moe.dispatched", "G"),
)


def of_part(section: str) -> tuple[Key, ...]:
    """Return the keys of the section that describes one part of the model.

    >>> [key.name for key in of_part("embedding")][:2]
    ['embedding.table', 'embedding.positions']
    """
    return tuple(key for key in KEYS.values() if key.section == section)


def dims_of(key: str) -> str:
    """Return the dimensions of the tensor with this key.

    >>> dims_of("attention.w_q")
    'EHD'
    """
    dims = KEYS[key].dims
    assert isinstance(dims, str), f"{key} is a via"
    return dims


def keys_of_override(section: str) -> dict[str, Key]:
    """Return the keys that an overriding section may have.

    [gradients] and [optimizer] may have the keys of parameters, and [cache] may have the keys of the cache. [encoder]
    may have all keys except those of cross-attention and those of tensors that encoder and decoder share. Any other
    section may have all keys.

    >>> list(keys_of_override("cache"))
    ['attention.key', 'cross.key']
    """
    if section == "cache":
        return CACHE
    if section == ENCODER:  # an encoder has no cross-attention, and shares the decoder's tables
        shared = (
            "embedding.table",
            "embedding.positions",
            "embedding.norm",
            "embedding.norm_bias",
            "output.table",
            "output.logits",
            "output.bias",
            "output.in_via",
        )
        return {name: key for name, key in KEYS.items() if key.section != "cross" and name not in shared}
    if section in ("gradients", "optimizer"):
        return {name: key for name, key in KEYS.items() if key.kind == "parameter"}
    return KEYS


def is_override(name: str) -> bool:
    """Return whether a line overrides another line, as `optimizer.ffn.w_in` overrides `ffn.w_in`.

    `name` begins with the section of the line.

    >>> is_override("encoder.ffn.w_in"), is_override("encoder.stream")  # the latter is a custom model's
    (True, False)
    """
    section, _, key = name.partition(".")
    return section in OVERRIDES and "." in key


class UnresolvedError(LayoutError):
    """The error for a key with alternatives from which none has been chosen yet."""


def one_spec(text: Text, key: str) -> str:
    """Return the text of a key after checking that it has only one spec.

    Raises:
      UnresolvedError: the key has alternatives.
    """
    if isinstance(text, tuple):
        first, more = [*dict.fromkeys(text)][:_NAMED], len({*text}) > _NAMED
        raise UnresolvedError(
            f"cannot read {key}: sizes and mesh choose one of its {len(text)} alternatives "
            f"({', '.join([*first, *['...'] * more])}).\n"
            "  Call layout.resolved(sizes, mesh) first, with the sizes that you pass to layout.check."
        )
    return text


def unknown_key(key: str, known: Iterable[str]) -> tuple[str, str]:
    """Return the fact and the remedy that an error states if a layout does not have a key.

    Args:
      key: the key.
      known: the keys that could be meant.

    Example:
      >>> unknown_key("mixer.w_im", ["ffn.w_in", "mixer.taps", "mixer.w_in"])
      ("the layout has no line 'mixer.w_im'.", "Did you mean 'mixer.w_in'? [mixer] has taps and w_in.")
      >>> unknown_key("attention.w_gate", ["attention.w_q", "ffn.w_gate"])[1]
      "Did you mean 'ffn.w_gate'? `gspmd layouts keys` lists every key."
    """
    if key in RENAMED:
        return (
            f"no layout has a key {shown(key)}.",
            f"Write {RENAMED[key]!r}, its name after release 0.2.0.",
        )
    known = list(known)
    section, dot, name = key.partition(".")
    is_custom = dot and section not in (*PARTS, PIPELINE)
    lines = [each.partition(".")[2] for each in known if each.startswith(f"{section}.")] if is_custom else []
    likely = [each for each in known if each not in KEYS] if lines else known
    near = _same_name(section, name, likely) or suggestion(key, likely)
    if not is_custom:
        return f"no layout has a key {shown(key)}.", f"{near}`gspmd layouts keys` lists every key."
    has = f"[{section}] has {listed(lines)}." if lines else f"It has no section [{section}]."
    return f"the layout has no line {shown(key)}.", f"{near}{has}"


def _same_name(section: str, name: str, known: Iterable[str]) -> str:
    """Return a sentence that proposes a key with this name in another section; empty if there is no such key.

    If several sections have such a key, the section with the most similar name is proposed, or the first section if no
    name is similar.
    """
    sections = [each.partition(".")[0] for each in known if name and each.partition(".")[2] == name]
    near = get_close_matches(section, sections, n=1) or sections[:1]
    return f"Did you mean {f'{near[0]}.{name}'!r}? " if near else ""


def look_up(table: Mapping[str, Text], key: str) -> str | None:
    """Return the text of a key, or of its default if the table lacks the key.

    The spec of the default is restricted to the dimensions of the key; a via is returned unchanged. The result is None
    if the table lacks the key, and the key is optional and has no default.

    Raises:
      LayoutError: the key is unknown, or has alternatives, or is required but absent.
    """
    if not isinstance(key, str):
        raise LayoutError(f"no layout has a key {shown(key)}.\n  A key is a string, such as 'ffn.w_in'.")
    if key in table:
        return one_spec(table[key], key)
    known = KEYS.get(key)
    if known is None:
        raise LayoutError("\n  ".join(unknown_key(key, (*KEYS, *table))))
    if known.default is not None:
        text = look_up(table, known.default)
        return text if text is None or known.kind == "via" else str(in_dims(Spec.parse(text), known.dims))
    if not known.optional:
        section, _, short = key.partition(".")
        remedy = f'Write {short} = "{known.dims}" in [{section}], with its mesh axes.'
        raise LayoutError(f"the layout does not write {key}, which has no default.\n  {remedy}")
    return None


def in_dims(spec: Spec, dims: str | tuple[str, ...]) -> Spec:
    """Return a spec with the dimensions `dims`, each of which is sharded as in `spec`.

    If `spec` lacks T, then T is sharded like L. Any other dimension that `spec` lacks is not sharded.
    """
    held = dict(zip(spec.dims, spec.axes))
    held.setdefault("T", held.get("L", ()))
    return Spec(tuple(dims), tuple(held.get(dim, ()) for dim in dims), spec.partial, spec.reduced)
