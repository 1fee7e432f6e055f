"""Functions of token groups that run on the devices that hold the groups, without communication in any pass."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp

from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import context, run
from gspmd.lowerings.transformations.gradient import with_gradient
from gspmd.lowerings.xla.constrained import left_to_compiler

Body = Callable[..., tuple[jax.Array, ...]]


def run_local(
    name: str, body: Body, in_specs: Sequence[Spec], out_specs: Sequence[Spec], *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Run `body` on each device's groups in a shard_map without collectives; the gradient is a second shard_map.

    The gradient is the transpose of the body. This is correct under two conditions. A result may depend only on groups
    of its own device, and an input that has a gradient must not be replicated over devices with different groups.

    Args:
        name: the name of the computation, with its specs in notation.
        body: a function from arrays to a tuple of arrays. It must be the same object in every call, because it is a
            cache key.
        in_specs, out_specs: one spec for each input and one for each result. All specs with G shard it in the same way.
        arrays: the inputs; integers and booleans have no gradient.

    Returns:
        The results of `body`, sharded as `out_specs`.
    """
    in_specs, out_specs = tuple(in_specs), tuple(out_specs)
    ctx = context()
    if ctx.lowering == "xla":
        return left_to_compiler(ctx, body, in_specs, out_specs, *arrays, name=name)
    return _local((ctx, name, body, in_specs, out_specs), *arrays)


def _forward(form, *arrays):
    ctx, name, body, in_specs, out_specs = form
    return run(ctx, name, (), body, in_specs, out_specs, *arrays), arrays


def _backward(form, arrays, cotangents):
    ctx, name, body, in_specs, out_specs = form
    real = tuple(_is_real(x) for x in arrays)
    answered = tuple(_is_real(x) for x in cotangents)  # integers have cotangents of dtype float0
    given = [(c, s) for c, s, yes in zip(cotangents, out_specs, answered) if yes]
    cotangents_in = run(
        ctx,
        f"gradient of {name}",
        (),
        _pullback(body, real, answered),
        (*in_specs, *(spec for _, spec in given)),
        tuple(spec for spec, yes in zip(in_specs, real) if yes),
        *arrays,
        *(cotangent for cotangent, _ in given),
    )
    cotangents_in = iter(cotangents_in)
    return tuple(next(cotangents_in) if yes else None for yes in real)


_local = with_gradient(_forward, _backward, title=lambda form: form[1])


def _is_real(x: jax.Array) -> bool:
    return x.dtype != jax.dtypes.float0 and jnp.issubdtype(x.dtype, jnp.floating)


@lru_cache(maxsize=1024)
def _pullback(body: Body, real: tuple[bool, ...], answered: tuple[bool, ...]) -> Body:
    """Return the pullback of `body`, a function that computes cotangents of inputs from cotangents of outputs.

    Only floating-point arrays have cotangents. `real` says which inputs are floating-point, and `answered` says which
    outputs are. The arguments of the pullback are all inputs, followed by the cotangents of the floating-point outputs.
    """

    def pullback(*pieces):
        arrays, cotangents = pieces[: len(real)], pieces[len(real) :]

        def of_real(*reals):
            reals = iter(reals)
            results = body(*(next(reals) if yes else x for x, yes in zip(arrays, real)))
            return tuple(y for y, yes in zip(results, answered) if yes)

        _, transpose = jax.vjp(of_real, *(x for x, yes in zip(arrays, real) if yes))
        return transpose(cotangents)

    return pullback
