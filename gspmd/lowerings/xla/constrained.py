"""Plain jax.numpy code on sharded arrays; the compiler inserts the collectives."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax

from gspmd.annotate.annotation import annotate
from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import Context, own_promotion, placed_input
from gspmd.lowerings.scopes import program_scope


def left_to_compiler(
    ctx: Context, f: Callable, in_specs: Sequence[Spec], out_specs: Any, *arrays: jax.Array, name: str = ""
) -> Any:
    """Run plain code on sharded arrays; the compiler inserts the collectives, and JAX differentiates the code.

    Args:
        ctx: the context of the call.
        f: a function of plain jax.numpy code.
        in_specs, out_specs: one Spec per array. The specs are constraints under Auto axes, and types under Explicit
            axes.
        arrays: the arrays, sharded as `in_specs` say.
        name: the computation in notation, for the ledger; empty if a surrounding scope names the computation already.

    Raises:
        PlanError: the call is in a shard_map under Auto axes.
    """
    outs = jax.tree.map(Spec.partition_spec, out_specs, is_leaf=lambda leaf: isinstance(leaf, Spec))
    with jax.named_scope(program_scope(name)) if name else nullcontext(), own_promotion():
        if ctx.explicit:
            pairs, called = enumerate(zip(in_specs, arrays, strict=True)), name or getattr(f, "__name__", "f")
            given = [placed_input(ctx, spec, x, number, called) for number, (spec, x) in pairs]
            return jax.sharding.auto_axes(f, axes=tuple(ctx.mesh), out_sharding=outs)(*given)
        if not ctx.mesh:  # arrays are not sharded here
            return f(*arrays)
        if ctx.in_shard_map:
            raise PlanError(
                "lowering 'xla' cannot run under Auto mesh axes in a shard_map, and the stages of a pipeline run in"
                " one.\n"
                "  Use 'blocking' or Explicit axes."
            )
        # Operands are placed, not constrained: outside of jit they may be on one device, which a constraint refuses.
        placed = [annotate(x, spec) for x, spec in zip(arrays, in_specs, strict=True)]
        return jax.tree.map(jax.lax.with_sharding_constraint, f(*placed), outs)
