"""The keys of a layout: the dimensions, kind and meaning of every tensor, and the key that stands in for an absent one.

`Layout.check` applies this table, and `python scripts/document_layouts.py` copies it into docs/layouts.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gspmd.annotate import LayoutError, Spec
from gspmd.annotate.errors import shown, suggestion

Text = str | tuple[str, ...]
"""A spec, or alternatives of which sizes and mesh choose one."""

#: The meaning of the dimensions, in the order of docs/layouts.md.
DIMENSIONS = {
    "B": "batch", "L": "length", "E": "embed", "F": "feed-forward", "H": "query heads", "K": "key/value heads",
    "D": "head size", "V": "vocabulary", "T": "key/value length", "X": "experts", "C": "capacity", "G": "token groups",
    "N": "layers of one kind, in a stack",
}  # fmt: skip

#: The sections that describe a part of the model, in the order of the forward pass.
PARTS = ("embedding", "attention", "ffn", "moe", "output")

#: The section that splits the stacked layers into the stages of a pipeline.
PIPELINE = "pipeline"

#: Sections whose quoted keys override those of the parts: the purpose of each, and what reads it.
OVERRIDES = {
    "optimizer": (
        "the optimizer state of a parameter; as the parameter when absent. Training keeps the state there, brings "
        "gradients there before it clips and updates, and the new parameters back (`gspmd_models.optimizer_specs`)."
    ),
    "gradients": (
        "the gradient of a parameter, on its way to the optimizer; as the parameter when absent. The training step "
        "takes a gradient where its parameter lies, brings it here, and from here to where [optimizer] says "
        "(`gspmd_models.gradient_specs`). A spec that ends in `partialsum-` settles nothing on the way, see below."
    ),
    "prefill": (
        'any tensor, while a prompt is read: `Layout.phase("prefill")`, in which `gspmd_models.Generator` reads. '
        "Parameters and cache lie as [decode] has them. Training does not ask for it."
    ),
    "decode": (
        'any tensor, while tokens are generated one by one: `Layout.phase("decode")`, which `gspmd_models.Generator` '
        "stores parameters and cache in. Training does not ask for it."
    ),
    "cache": (
        "the key/value cache: `Layout.cache`, over batch, length and heads in any mix, wherever queries and keys lie."
    ),
}

#: The overriding sections that are a phase of serving.
PHASES = ("prefill", "decode")

#: The section whose keys are those of both phases.
SERVING = "serving"


@dataclass(frozen=True)
class Key:
    """One key of a layout.

    Attributes:
      name: section and key, `"ffn.w_in"`.
      dims: the dimensions of its spec, in this order; for a `via`, the keys of its two operands.
      kind: `"parameter"`, `"activation"`, `"stack"` (of layers) or `"via"`; `"tensor"` in a user-defined section.
      meaning: one line for docs/layouts.md.
      default: the key whose spec is used if this one is absent, its dimensions alone if that key has more; None if it
        is required.
      local: dimensions that must not be sharded, because the code between einsums needs them whole.
      optional: whether it may be absent, which leaves it to the planner.
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
        """The section of this key."""
        return self.name.partition(".")[0]


def _parameter(name: str, dims: str, meaning: str, **more) -> Key:
    return Key(name, dims, "parameter", meaning, **more)


def _activation(name: str, dims: str, meaning: str, **more) -> Key:
    return Key(name, dims, "activation", meaning, **more)


def _via(name: str, left: str, right: str, meaning: str, **more) -> Key:
    return Key(name, (left, right), "via", meaning, optional=True, **more)


# A bias, or the scales of an int8 matrix, lie by default as the tensor that they are added to or multiply, and a gate
# as the matrix beside it: vectors are then where they are used, and one move of the residual serves both matrices.
_ALL = (
    Key(
        "pipeline.layers",
        "N",
        "stack",
        "The stacked layers, split into stages along one mesh axis; whole when absent.",
        optional=True,
    ),
    _parameter("embedding.table", "VE", "The embedding table."),
    _activation("embedding.tokens", "BL", "Token ids."),
    _activation("attention.residual", "BLE", "The residual stream around attention."),
    _parameter("attention.norm", "E", "Scale of the norm before attention."),
    _parameter("attention.norm_bias", "E", "Bias of the norm before attention.", default="attention.norm"),
    _parameter("attention.w_q", "EHD", "Query projection."),
    _parameter("attention.w_k", "EKD", "Key projection."),
    _parameter("attention.w_v", "EKD", "Value projection.", default="attention.w_k"),
    _activation("attention.query", "BLHD", "Queries as the attention core takes them, and its result.", local="D"),
    _activation("attention.key", "BLKD", "Keys and values as the attention core takes them.", local="D"),
    _parameter("attention.b_q", "HD", "Bias of the queries; scales of an int8 w_q.", default="attention.query"),
    _parameter("attention.b_k", "KD", "Bias of the keys; scales of an int8 w_k.", default="attention.key"),
    _parameter("attention.b_v", "KD", "Bias of the values; scales of an int8 w_v.", default="attention.key"),
    _parameter("attention.q_norm", "D", "Scale of the norm of every head's queries.", default="attention.query"),
    _parameter("attention.k_norm", "D", "Scale of the norm of every head's keys.", default="attention.key"),
    _parameter("attention.w_o", "HDE", "Output projection."),
    _parameter(
        "attention.b_o", "E", "Bias of attention's output; scales of an int8 w_o.", default="attention.residual"
    ),
    _via("attention.in_via", "attention.residual", "attention.w_q", "Where residual and w_q meet."),
    _via(
        "attention.key_via",
        "attention.residual",
        "attention.w_k",
        "Where residual and w_k (and w_v) meet; the residual as in in_via. "
        "Absent beside an in_via: over E as w_q there, over K as attention.key.",
    ),
    _via("attention.out_via", "attention.query", "attention.w_o", "Where the core's result and w_o meet."),
    _activation("ffn.residual", "BLE", "The residual stream around the feed-forward block."),
    _parameter("ffn.norm", "E", "Scale of the norm before the feed-forward block."),
    _parameter("ffn.norm_bias", "E", "Bias of the norm before the feed-forward block.", default="ffn.norm"),
    _parameter("ffn.w_in", "EF", "First matrix."),
    _parameter("ffn.w_gate", "EF", "The gate of a gated activation.", default="ffn.w_in"),
    _activation("ffn.hidden", "BLF", "What the activation function is applied to."),
    _parameter("ffn.b_in", "F", "Bias of the product with w_in, and its scales if w_in is int8.", default="ffn.hidden"),
    _parameter(
        "ffn.b_gate", "F", "Bias of the product with w_gate, and its scales if w_gate is int8.", default="ffn.hidden"
    ),
    _parameter("ffn.w_out", "FE", "Second matrix."),
    _parameter(
        "ffn.b_out", "E", "Bias of the feed-forward block's output; scales of an int8 w_out.", default="ffn.residual"
    ),
    _via("ffn.in_via", "ffn.residual", "ffn.w_in", "Where residual and w_in (and w_gate) meet."),
    _via("ffn.out_via", "ffn.hidden", "ffn.w_out", "Where hidden and w_out meet."),
    _parameter("moe.router", "EX", "The router's matrix."),
    _parameter("moe.router_noise", "EX", "The matrix of noisy-top-k's widths of noise.", default="moe.router"),
    _activation("moe.groups", "GLE", "The residual in token groups, each group whole on a device.", local="LE"),
    _activation(
        "moe.dispatched", "GXCE", "Tokens in the capacity slots of their group, before they travel.", local="XCE"
    ),
    _activation("moe.expert_input", "GXCE", "The same slots where their experts are, and the experts' results."),
    _parameter("moe.w_in", "XEF", "First matrix of every expert."),
    _parameter("moe.w_gate", "XEF", "The gate of every expert.", default="moe.w_in"),
    _activation("moe.hidden", "GXCF", "What the experts' activation function is applied to."),
    _parameter("moe.scale_in", "XF", "Scales of w_in and of w_gate, where they are int8.", default="moe.hidden"),
    _parameter("moe.w_out", "XFE", "Second matrix of every expert."),
    _parameter("moe.scale_out", "XE", "Scales of w_out, where it is int8.", default="moe.expert_input"),
    _via("moe.in_via", "moe.expert_input", "moe.w_in", "Where expert_input and w_in (and w_gate) meet."),
    _via("moe.out_via", "moe.hidden", "moe.w_out", "Where hidden and w_out meet."),
    _parameter(
        "moe.shared_in",
        "EF",
        "First matrix of the experts that every token uses, side by side: F is their number times an expert's.",
        default="ffn.w_in",
    ),
    _parameter("moe.shared_gate", "EF", "The gate of the shared experts.", default="moe.shared_in"),
    _activation(
        "moe.shared_hidden", "BLF", "What the shared experts' activation function is applied to.", default="ffn.hidden"
    ),
    _parameter(
        "moe.shared_scale", "F", "Scales of shared_in and shared_gate, where int8.", default="moe.shared_hidden"
    ),
    _parameter("moe.shared_out", "FE", "Second matrix of the shared experts.", default="ffn.w_out"),
    _via(
        "moe.shared_in_via",
        "ffn.residual",
        "moe.shared_in",
        "Where residual and shared_in (and shared_gate) meet.",
        default="ffn.in_via",
    ),
    _via(
        "moe.shared_out_via",
        "moe.shared_hidden",
        "moe.shared_out",
        "Where shared_hidden and shared_out meet.",
        default="ffn.out_via",
    ),
    _parameter("output.norm", "E", "Scale of the last norm."),
    _parameter("output.norm_bias", "E", "Bias of the last norm.", default="output.norm"),
    _parameter("output.table", "VE", "The unembedding table, where it is not tied.", default="embedding.table"),
    _activation("output.logits", "BLV", "Logits; the loss is taken without gathering the vocabulary."),
    _parameter(
        "output.bias", "V", "Bias of the logits; scales of int8 tables, one for each row.", default="output.logits"
    ),
    _via("output.in_via", "ffn.residual", "output.table", "Where residual and table meet."),
)

#: Every key by name, in the order of the forward pass.
KEYS = {key.name: key for key in _ALL}

#: The only key of [cache]; its length is T.
CACHE = {
    "attention.key": Key(
        "attention.key", "BTKD", "activation", "The key/value cache; as attention.key when absent.", local="D"
    )
}

#: Lines that only feed-forward layers without experts need; norm and residual are those of the block.
DENSE = ("ffn.w_in", "ffn.hidden", "ffn.w_out")

#: Pairs of tensors whose specs must agree on some dimensions, because no equation moves one to the other: both blocks
#: add to one residual stream, a device attends within the sequences that it has, and it dispatches its own groups.
ALIKE = (
    ("attention.residual", "ffn.residual", "BLE"),
    ("attention.query", "attention.key", "B"),
    ("moe.groups", "moe.dispatched", "G"),
)


def of_part(section: str) -> tuple[Key, ...]:
    """Return the keys of one part of the model.

    >>> [key.name for key in of_part("embedding")]
    ['embedding.table', 'embedding.tokens']
    """
    return tuple(key for key in KEYS.values() if key.section == section)


def dims_of(key: str) -> str:
    """Return the dimensions of a tensor's key.

    >>> dims_of("attention.w_q")
    'EHD'
    """
    dims = KEYS[key].dims
    assert isinstance(dims, str), f"{key} is a via"
    return dims


def keys_of_override(section: str) -> dict[str, Key]:
    """Return the keys that an overriding section may have: parameters for gradients and optimizer, the cache's, or all.

    >>> list(keys_of_override("cache"))
    ['attention.key']
    """
    if section == "cache":
        return CACHE
    if section in ("gradients", "optimizer"):
        return {name: key for name, key in KEYS.items() if key.kind == "parameter"}
    return KEYS


class UnresolvedError(LayoutError):
    """A key has alternatives, and none has been chosen yet."""


def one_spec(text: Text, key: str) -> str:
    """Return the text of a key that has one spec; raise UnresolvedError where it has alternatives."""
    if isinstance(text, tuple):
        raise UnresolvedError(
            f"{key} has {len(text)} alternatives ({', '.join(text)}), and sizes and mesh decide which is taken.\n"
            "  Call layout.resolved(sizes, mesh) first, with the sizes as for layout.check."
        )
    return text


def look_up(table: Mapping[str, Text], key: str) -> str | None:
    """Return the text of a key, or that of its default in the key's own dimensions; None if absent and optional.

    Raises:
      LayoutError: no layout has such a key, the table lacks it and nothing stands in for it, or it has alternatives.
    """
    if not isinstance(key, str):
        raise LayoutError(f"no layout has a key {shown(key)}.\n  A key is a string, such as 'ffn.w_in'.")
    if key in table:
        return one_spec(table[key], key)
    known = KEYS.get(key)
    if known is None:
        near = suggestion(key, (*KEYS, *table))
        raise LayoutError(f"no layout has a key {shown(key)}.\n  {near}docs/layouts.md lists every key.")
    if known.default is not None:
        text = look_up(table, known.default)
        more = set(KEYS[known.default].dims).difference(known.dims) if known.kind != "via" else ()
        return str(Spec.parse(text).without(*more)) if text is not None and more else text
    if not known.optional:
        section, _, short = key.partition(".")
        remedy = f'Write {short} = "{known.dims}" in [{section}], with its mesh axes.'
        raise LayoutError(f"the layout does not write {key}, and nothing stands in for it.\n  {remedy}")
    return None
