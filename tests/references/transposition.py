"""JAX's own transposition of a plan: its steps written out in a shard_map, and differentiated through."""

from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from gspmd.planner.plan import Plan

VARIANTS = {
    "check_vma=False": (False, "varying"),
    "check_vma=True": (True, "varying"),
    "all_gather(to='reduced')": (True, "reduced"),
    "all_gather(to='invarying')": (True, "invarying"),
}


def program(plan: Plan, variant: str):
    """Return a function of operands and cotangents -> the results, and the gradients by plain transposition."""
    check, to = VARIANTS[variant]
    routine = plan.routine
    ins = tuple(spec.partition_spec() for spec in routine.inputs)
    outs = tuple(output.spec.partition_spec() for output in routine.outputs)

    def body(*pieces):
        moved = [_send(move.steps, pieces[move.source], plan.mesh, to) for move in routine.moves]
        values = [_send(p.steps, _product(p, moved), plan.mesh, to) for p in routine.products]
        return tuple(_output(output, routine, values, plan.mesh, to) for output in routine.outputs)

    mapped = jax.shard_map(body, in_specs=ins, out_specs=outs, check_vma=check)

    def both(operands, cotangents):
        results, transpose = jax.vjp(mapped, *operands)
        return results, transpose(cotangents)

    return both


def _product(product, moved):
    arrays = [moved[n] for n in (product.left, product.right) if n is not None]
    dims = [spec.dims for spec in (product.einsum.before, product.einsum.other) if spec is not None]
    return jnp.einsum(",".join(map("".join, dims)) + "->" + "".join(product.einsum.after.dims), *arrays)


def _output(output, routine, values, mesh, to):
    first, *rest = output.products
    total = sum((values[n] for n in rest), values[first])
    total = _send(output.steps, total, mesh, to)
    return jnp.einsum("".join(routine.products[first].spec.dims) + "->" + "".join(output.spec.dims), total)


def _send(steps, x, mesh, to):
    for step in steps:
        x = _step(step, x, mesh, to)
    return x


def _step(step, x, mesh, to):
    changed = [d for d, (old, new) in enumerate(zip(step.before.axes, step.after.axes)) if old != new]
    if step.kind == "all-gather":
        return lax.all_gather(x, step.axes, axis=changed[0], tiled=True, to=to)
    if step.kind == "reduce-scatter":
        return lax.psum_scatter(x, step.axes, scatter_dimension=changed[0], tiled=True)
    if step.kind == "all-reduce":
        return lax.psum(x, step.axes)
    if step.kind == "slice":
        size = x.shape[changed[0]] // prod(mesh[axis] for axis in step.axes)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(step.axes) * size, size, axis=changed[0])
    assert step.kind == "all-to-all", step.kind
    split = next(d for d in changed if len(step.after.axes[d]) > len(step.before.axes[d]))
    return lax.all_to_all(x, step.axes, split, next(d for d in changed if d != split), tiled=True)
