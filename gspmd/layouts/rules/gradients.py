"""Gradients that are partial sums.

The module derives the specs of parameters in the loss of a training step, and checks the rows over which gradients are
summed.
"""

from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache

from gspmd.annotate import Fault, Spec, parse_via
from gspmd.annotate.errors import listed
from gspmd.layouts.rules.faults import Line
from gspmd.layouts.rules.keys import KEYS
from gspmd.layouts.table import LayoutTable, parameters_of

#: The parameters that each via is for; of output.in_via's two tables, a model uses one.
WEIGHTS = {
    "attention.in_via": ("attention.w_q",),
    "attention.key_via": ("attention.w_k", "attention.w_v"),
    "attention.out_via": ("attention.w_o",),
    "cross.in_via": ("cross.w_q",),
    "cross.key_via": ("cross.w_k", "cross.w_v"),
    "cross.out_via": ("cross.w_o",),
    "ffn.in_via": ("ffn.w_in", "ffn.w_gate"),
    "ffn.out_via": ("ffn.w_out",),
    "moe.in_via": ("moe.w_in", "moe.w_gate"),
    "moe.out_via": ("moe.w_out",),
    "moe.shared_in_via": ("moe.shared_in", "moe.shared_gate"),
    "moe.shared_out_via": ("moe.shared_out",),
    "output.in_via": ("embedding.table", "output.table"),
}

#: For parameters outside einsums, the activations over whose rows the gradient is summed; of two activations, a model
#: may use one or both.
ROWS = {
    "embedding.table": ("embedding.tokens", "attention.residual"),
    "embedding.positions": ("embedding.tokens", "attention.residual"),
    "embedding.norm": ("attention.residual",),
    "embedding.norm_bias": ("attention.residual",),
    "attention.norm": ("attention.residual",),
    "attention.norm_bias": ("attention.residual",),
    "attention.b_q": ("attention.query",),
    "attention.b_k": ("attention.key",),
    "attention.b_v": ("attention.key",),
    "attention.q_norm": ("attention.query",),
    "attention.k_norm": ("attention.key",),
    "attention.q_norm_all": ("attention.query",),
    "attention.k_norm_all": ("attention.key",),
    "attention.sinks": ("attention.query",),
    "attention.q_latent_norm": ("attention.latent_query",),
    "attention.latent_norm": ("attention.latent",),
    "attention.b_o": ("attention.residual",),
    "attention.relative": ("attention.query",),
    "cross.norm": ("attention.residual",),
    "cross.norm_bias": ("attention.residual",),
    "cross.b_q": ("cross.query",),
    "cross.b_k": ("cross.key",),
    "cross.b_v": ("cross.key",),
    "cross.b_o": ("attention.residual",),
    "ffn.norm": ("ffn.residual",),
    "ffn.norm_bias": ("ffn.residual",),
    "ffn.b_in": ("ffn.hidden",),
    "ffn.b_gate": ("ffn.hidden",),
    "ffn.b_out": ("ffn.residual",),
    "moe.b_in": ("moe.hidden",),
    "moe.b_out": ("moe.expert_input",),
    "moe.shared_bias": ("moe.shared_hidden",),
    "output.norm": ("ffn.residual",),
    "output.norm_bias": ("ffn.residual",),
    "output.bias": ("output.logits",),
}

#: For each activation except the residual stream, the parameters that compute it, multiply it, or are added to it.
_BESIDE = {
    "attention.query": (
        "attention.w_q", "attention.b_q", "attention.q_norm", "attention.q_norm_all", "attention.sinks",
        "attention.relative", "attention.w_o", "attention.w_q_up", "attention.w_k_up", "attention.w_v_up",
    ),
    "attention.latent_query": ("attention.w_q_down", "attention.q_latent_norm"),
    "attention.latent": ("attention.w_k_down", "attention.latent_norm"),
    "attention.key": (
        "attention.w_k", "attention.w_v", "attention.b_k", "attention.b_v", "attention.k_norm",
        "attention.k_norm_all",
    ),
    "cross.query": ("cross.w_q", "cross.b_q", "cross.w_o"),
    "cross.key": ("cross.w_k", "cross.w_v", "cross.b_k", "cross.b_v"),
    "ffn.hidden": ("ffn.w_in", "ffn.w_gate", "ffn.b_in", "ffn.b_gate", "ffn.w_out"),
    "moe.hidden": ("moe.b_in",),
    "moe.expert_input": ("moe.b_out",),
    "moe.shared_hidden": ("moe.shared_in", "moe.shared_gate", "moe.shared_bias", "moe.shared_out", "moe.shared_mix"),
}  # fmt: skip


@lru_cache(maxsize=256)
def loss_specs(layout: LayoutTable, microbatches: int) -> Mapping[str, Spec]:
    """Return the spec of each parameter in the loss of a training step; see `Layout.for_loss`."""
    specs = {}
    for key, text in parameters_of(layout):
        own, gradient = Spec.parse(text), Spec.parse(layout.gradient(key))
        at_once = key in layout.overrides.get("gradients", {}) and gradient == own
        # A mesh axis that shards the weight cannot be an axis of the partial sum, because a spec has each axis once. If
        # the weight is gathered over this axis, its gradient is reduce-scattered in every microbatch, as in zero-3.
        summed = _axes_of_rows(layout, key) - own.used if microbatches > 1 and not at_once else ()
        specs[key] = (gradient if gradient.partial else own.with_partial(tuple(summed))).cotangent
    return specs


def _axes_of_rows(layout: LayoutTable, key: str) -> set[str]:
    """Return the mesh axes that shard the rows (tokens or slots) over which a parameter's gradient is summed."""
    if key == "moe.choice_bias":  # this parameter has no gradient
        return set()
    beside = next((name for name, keys in _BESIDE.items() if key in keys), None)
    if beside and key in ROWS:
        # A vector is moved to its activation, whose other dimensions are all rows, including the heads for a norm.
        spec = layout.spec(beside)
        return {axis for dim in spec.dims if dim not in KEYS[key].dims for axis in spec.axes_of(dim)}
    of_section = {
        "embedding": ["embedding.tokens", "output.logits"],  # a tied table is used twice
        "output": ["output.logits"],
        "moe": ["moe.groups"] if key.startswith("moe.router") else ["moe.expert_input"],
    }
    of_blocks = ["attention.residual", "ffn.residual", *filter(None, [beside])]
    # The last norm is over the residual stream, however the logits are sharded.
    in_blocks = beside or key.startswith("output.norm")
    names = of_blocks if in_blocks else of_section.get(key.partition(".")[0], of_blocks)
    specs = [layout.spec(name) for name in names]
    axes = [{axis for dim in spec.dims if dim in "BLG" for axis in spec.axes_of(dim)} for spec in specs]
    # A mesh axis that splits the rows of only some of these tensors is left out: the product may be computed in the
    # sharding of another one, or a tied table may be used twice, and the gradient is then not a partial sum over this
    # axis.
    return set.intersection(*axes)


def partial_faults(layout: LayoutTable, mesh: Mapping[str, int], microbatches: int) -> Iterator[Fault]:
    """Yield a fault for every via under which a gradient is not the partial sum that a training step adds up.

    The gradient of a weight is summed over rows, which are the dimensions that the activation has and the weight lacks.
    The gradient is a partial sum over exactly those mesh axes that shard rows during the product. A via fixes these
    axes; without a via the planner chooses them.

    Args:
        layout: a `Layout` without alternatives or faults.
        mesh: the sizes of its mesh axes.
        microbatches: the number of microbatches of a training step.
    """
    if _in_stages(layout):
        return
    taken = loss_specs(layout, microbatches)
    for name, keys in WEIGHTS.items():
        if not isinstance(text := layout.table.get(name), str):
            continue
        activation, weight = parse_via(text).specs
        rows = [dim for dim in activation.dims if dim not in weight.dims]
        split = {axis for dim in rows for axis in activation.axes_of(dim)}
        if name == "attention.in_via" and "attention.key_via" not in layout.table:
            keys = (*keys, *WEIGHTS["attention.key_via"])  # all these weights are multiplied by one residual
        owed = {key: [a for a in taken[key].reduced if mesh[a] > 1 and a not in split] for key in keys if key in taken}
        wrong = [key for key in owed if owed[key]]
        if name == "output.in_via" and "output.table" in layout.table and len(wrong) < len(owed):
            continue  # the layout does not say which of the two tables the model uses
        if wrong:
            yield _fault(layout, Line(name, text), rows, wrong, owed[wrong[0]])


def row_faults(
    layout: LayoutTable, mesh: Mapping[str, int], microbatches: int, trained: Collection[str]
) -> Iterator[Fault]:
    """Yield a fault for every gradient that is written as a partial sum over mesh axes that shard none of its rows.

    The rows are the dimensions over which the gradient is summed. Only parameters outside einsums are checked. A
    vector, such as a bias, is moved to the mesh axes of the activation to which it is applied. A table is looked up
    with the sharding of the tokens or of the residual.

    Args:
        layout, mesh, microbatches: the same as the arguments of `partial_faults`.
        trained: keys of the parameters that have a gradient.
    """
    if _in_stages(layout):
        return
    taken = loss_specs(layout, microbatches)
    written = layout.overrides.get("gradients", {})
    for key, names in ROWS.items():
        if key not in trained or key not in written:
            continue
        specs = {name: layout.spec(name) for name in names}
        rows = {name: [dim for dim in spec.dims if dim not in taken[key].dims] for name, spec in specs.items()}
        split = {axis for name, spec in specs.items() for dim in rows[name] for axis in spec.axes_of(dim)}
        owed = [axis for axis in taken[key].reduced if mesh[axis] > 1 and axis not in split]
        if owed:
            rest = tuple(axis for axis in taken[key].reduced if axis not in owed)
            summed = " and ".join(f"{name} = {layout[name]}" for name in names)
            yield Line(key, layout.gradient(key), "gradients").at_text(
                f"the gradient of {key} is not a partial sum over {listed(owed)}: it is summed over"
                f" {listed(rows[names[0]])} of {summed}.",
                f"Write '{taken[key].cotangent.with_partial(rest)}'.",
            )


def _in_stages(layout: LayoutTable) -> bool:
    """Return whether the layout has pipeline stages, which sum gradients by rules of their own (`gspmd.pipeline`)."""
    layers = layout.get("pipeline.layers")
    return layers is not None and bool(Spec.parse(layers).used)


def _fault(layout: LayoutTable, line: Line, rows: list[str], keys: list[str], owed: list[str]) -> Fault:
    gradient = Spec.parse(layout.gradient(keys[0]))
    by = "[gradients] says so" if gradient.partial else "all microbatches add to it"
    fact = (
        f"the gradient of {keys[0]} stays a partial sum over {listed(owed)} ({by}), but the product leaves partial "
        f"sums only over mesh axes that shard {' or '.join(rows)}, the dimensions that it sums."
    )
    settled = ", ".join(f"{key} = '{layout.spec(key)}'" for key in keys)
    return line.at_text(fact, f"Shard one of them over {listed(owed)} here, or write in [gradients]: {settled}.")
