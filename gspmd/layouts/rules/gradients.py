"""Check that gradients which stay partial sums until the end of a step are sums over the mesh axes of their rows."""

from collections.abc import Collection, Iterator, Mapping

from gspmd.annotate import Fault, Spec, parse_via
from gspmd.annotate.errors import listed
from gspmd.layouts.keyed import KeyedTable
from gspmd.layouts.rules.line import Line
from gspmd.layouts.rules.stages import LAYERS
from gspmd.layouts.storage import loss_specs

WEIGHTS = {
    "attention.in_via": ("attention.w_q",),
    "attention.key_via": ("attention.w_k", "attention.w_v"),
    "attention.out_via": ("attention.w_o",),
    "ffn.in_via": ("ffn.w_in", "ffn.w_gate"),
    "ffn.out_via": ("ffn.w_out",),
    "moe.in_via": ("moe.w_in", "moe.w_gate"),
    "moe.out_via": ("moe.w_out",),
    "moe.shared_in_via": ("moe.shared_in", "moe.shared_gate"),
    "moe.shared_out_via": ("moe.shared_out",),
    "output.in_via": ("embedding.table", "output.table"),
}
"""The parameters that meet an activation where a via says; of the tables, a model has tied ones or an own one."""

ROWS = {
    "embedding.table": ("embedding.tokens", "attention.residual"),
    "attention.norm": ("attention.residual",),
    "attention.norm_bias": ("attention.residual",),
    "attention.b_q": ("attention.query",),
    "attention.b_k": ("attention.key",),
    "attention.b_v": ("attention.key",),
    "attention.q_norm": ("attention.query",),
    "attention.k_norm": ("attention.key",),
    "attention.b_o": ("attention.residual",),
    "ffn.norm": ("ffn.residual",),
    "ffn.norm_bias": ("ffn.residual",),
    "ffn.b_in": ("ffn.hidden",),
    "ffn.b_gate": ("ffn.hidden",),
    "ffn.b_out": ("ffn.residual",),
    "output.norm": ("ffn.residual",),
    "output.norm_bias": ("ffn.residual",),
    "output.bias": ("output.logits",),
}
"""For the parameters that no einsum takes: the activations over whose rows, of either or both, gradients are summed."""


def partial_faults(layout: KeyedTable, mesh: Mapping[str, int], microbatches: int) -> Iterator[Fault]:
    """Yield a fault for every via that keeps a gradient from being the partial sum that a training step adds up.

    The gradient of a weight is summed over the dimensions that only the activation has, its rows. It is a
    partial sum over the mesh axes that shard rows where the two meet, and over no other axis. A weight meets its
    activation where a via says; without one the planner finds a place.

    Args:
        layout: a `Layout` without alternatives or faults.
        mesh: sizes of its axes.
        microbatches: of a training step.
    """
    if LAYERS in layout.table and layout.spec(LAYERS).used:  # settled by the stages: see `gspmd.pipeline`
        return
    taken = loss_specs(layout, microbatches)
    for name, keys in WEIGHTS.items():
        if not isinstance(text := layout.table.get(name), str):
            continue
        activation, weight = parse_via(text).specs
        rows = [dim for dim in activation.dims if dim not in weight.dims]
        split = {axis for dim in rows for axis in activation.axes_of(dim)}
        if name == "attention.in_via" and "attention.key_via" not in layout.table:
            keys = (*keys, *WEIGHTS["attention.key_via"])  # they meet the same residual
        owed = {key: [a for a in taken[key].reduced if mesh[a] > 1 and a not in split] for key in keys if key in taken}
        wrong = [key for key in owed if owed[key]]
        if name == "output.in_via" and "output.table" in layout.table and len(wrong) < len(owed):
            continue  # which of the two tables the model uses is not known here
        if wrong:
            yield _fault(layout, Line(name, text), rows, wrong, owed[wrong[0]])


def faults_of_rows(
    layout: KeyedTable, mesh: Mapping[str, int], microbatches: int, trained: Collection[str]
) -> Iterator[Fault]:
    """Yield a fault for every gradient that is written as a sum over mesh axes which shard none of its rows.

    Vectors are brought to their activation, and a table is looked up where its tokens or the residual stream lie.

    Args:
        layout, mesh, microbatches: as of `partial_faults`.
        trained: keys of the parameters that have a gradient.
    """
    if LAYERS in layout.table and layout.spec(LAYERS).used:
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
                f"the gradient of {key} is no partial sum over {listed(owed)}: it is summed over"
                f" {listed(rows[names[0]])} of {summed}.",
                f"Write '{taken[key].cotangent.with_partial(rest)}'.",
            )


def _fault(layout: KeyedTable, line: Line, rows: list[str], keys: list[str], owed: list[str]) -> Fault:
    gradient = Spec.parse(layout.gradient(keys[0]))
    by = "[gradients] says so" if gradient.partial else "all microbatches add to it"
    fact = (
        f"the gradient of {keys[0]} stays a partial sum over {listed(owed)} ({by}), which a product gives only over "
        f"mesh axes that shard {' or '.join(rows)}, the dimensions that it sums."
    )
    settled = ", ".join(f"{key} = '{layout.spec(key)}'" for key in keys)
    return line.at_text(fact, f"Shard one of them over {listed(owed)} here, or write in [gradients]: {settled}.")
