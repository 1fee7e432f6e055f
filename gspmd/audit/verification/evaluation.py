"""Evaluation of a function and its gradients on a mesh, and comparison of the results with those on one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd.annotate.errors import PlanError
from gspmd.audit.verification.result import Parting

TOLERANCE = {"float64": 1e-11, "float32": 5e-5, "float16": 1e-2, "bfloat16": 4e-2}
"""Largest allowed difference from the result on one device, divided by the largest absolute value of that result. For
floating-point dtypes that are not listed, such as float8, it is 0.5. All other arrays have to be equal."""


def partition_of(leaf: Any) -> jax.P:
    """Return the partition spec of an array; the spec is empty if the array has no mesh."""
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, jax.NamedSharding) else jax.P()


def random_array(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Return an array of normally distributed values, or of random 0s and 1s if the dtype is integer or boolean."""
    rng = np.random.default_rng([seed, *shape])
    if jnp.issubdtype(dtype, jnp.inexact):
        return rng.normal(size=shape).astype(dtype)
    return rng.integers(0, 2, size=shape).astype(dtype)


def values_and_gradients(
    fn: Callable, args: Any, mesh: jax.sharding.Mesh, gradients: bool, seed: int
) -> dict[str, jax.Array]:
    """Return the results of a function and the gradients of its floating-point arguments, indexed by path.

    For the gradients, the cotangents of the results are random. There are no gradients if `gradients` is false, or if
    no argument or no result is floating-point.

    Raises:
        PlanError: a result is a partial sum.
    """
    leaves, tree = jax.tree.flatten(args)
    floating = [n for n, x in enumerate(leaves) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)]
    with jax.set_mesh(mesh):
        value = jax.jit(lambda leaves: fn(*jax.tree.unflatten(tree, leaves)))(leaves)
        results = {f"value{jax.tree_util.keystr(path)}": x for path, x in jax.tree_util.tree_leaves_with_path(value)}
        if any(partition_of(x).unreduced for x in results.values()):
            raise PlanError("a result is a partial sum.\n  Reduce it in the function, with gspmd.reshard.")
        inexact = [n for n, x in enumerate(results.values()) if jnp.issubdtype(x.dtype, jnp.inexact)]
        if not (gradients and floating and inexact):
            return results

        def floating_results(some: list[jax.Array], leaves: list) -> list[jax.Array]:
            whole = [some[floating.index(n)] if n in floating else x for n, x in enumerate(leaves)]
            values = jax.tree.leaves(fn(*jax.tree.unflatten(tree, whole)))
            return [values[n] for n in inexact]

        def pullback(some: list[jax.Array], leaves: list, cotangents: list) -> list[jax.Array]:
            return jax.vjp(lambda some: floating_results(some, leaves), some)[1](cotangents)[0]

        outputs = [x for n, x in enumerate(results.values()) if n in inexact]
        cotangents = [jax.device_put(random_array(y.shape, y.dtype, seed + 1), y.sharding) for y in outputs]
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(args)]
        gradient = jax.jit(pullback)([leaves[n] for n in floating], leaves, cotangents)
        return results | {f"gradient of argument{paths[n]}": x for n, x in zip(floating, gradient)}


def difference(name: str, where: str, got: jax.Array | None, wanted: jax.Array) -> Parting | None:
    """Return the largest difference between any copy of an array and the array on one device.

    The result is None if all copies agree, within `TOLERANCE`, with the array on one device.

    Args:
        name: the name of the lowering.
        where: the path of the array in the results.
        got: the array on the mesh, or None if there is none.
        wanted: the array on one device.
    """
    if got is None or got.shape != wanted.shape or got.dtype != wanted.dtype:
        kind = "nothing" if got is None else f"{got.dtype}{list(got.shape)}"
        return Parting(name, where, error=f"nothing, but {where} is {kind}, not {wanted.dtype}{list(wanted.shape)}")
    if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
        got, wanted = jax.random.key_data(got), jax.random.key_data(wanted)
    wide = np.complex128 if jnp.issubdtype(got.dtype, jnp.complexfloating) else np.float64
    exact = not jnp.issubdtype(got.dtype, jnp.inexact)
    right = np.asarray(wanted) if exact else np.asarray(wanted).astype(wide)
    tolerance = 0.0 if exact else TOLERANCE.get(str(jnp.finfo(got.dtype).dtype), 0.5)
    finite = np.abs(right[np.isfinite(right)].astype(np.float64 if exact else wide))
    largest = float(finite.max()) if finite.size else 0.0
    worst = None
    for shard in got.addressable_shards:
        mine, theirs = np.asarray(shard.data), right[shard.index]
        off = np.where(mine == theirs, 0.0, np.abs(mine.astype(wide) - theirs.astype(wide)))
        off = np.where(np.isnan(off) & ~(np.isnan(mine.astype(wide)) & np.isnan(theirs.astype(wide))), np.inf, off)
        wrong = np.argwhere(np.nan_to_num(off, nan=0.0, posinf=np.inf) > tolerance * largest)
        if len(wrong) and (worst is None or np.nanmax(off) > worst[0]):
            start = [each.start or 0 for each in shard.index]
            worst = float(np.nanmax(off)), tuple(int(n) + at for n, at in zip(wrong[0], start))
    if worst:
        return Parting(name, where, worst[0], worst[0] / largest if largest else np.inf, tolerance, worst[1])
    return None
