"""A function with a planned gradient, made from a forward and a backward pass, under JAX's transformations.

JAX 0.10.2 wrongly batches a `jax.custom_vjp` with several results if only some of the results have a batch dimension.
The cotangent of a result without a batch dimension is summed over the batch before the backward pass. The backward pass
then broadcasts this sum over the batch and adds it up again, which gives N times the gradient for a batch of N. So
either all results of a planned program get the batch dimension, or none of them does.

A `jax.custom_vjp` cannot be differentiated in forward mode. JAX notices this only when it evaluates a tangent, after
the call, inside `jit`. So tangents pass through a primitive of this module, which raises an error that explains this.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gspmd.annotate.errors import PlanError
from gspmd.lowerings.transformations.passing import passing


def with_gradient(forward: Callable, backward: Callable, title: Callable[[Any], str] = str) -> Callable:
    """Return a function whose gradient JAX computes by the given backward pass.

    The passes and the returned function take a form as their first argument. The form is hashable and contains no
    arrays. It must have everything on which the two passes depend, except the mesh. The backward pass reads the mesh in
    force, but not the lowering in force.

    Args:
        forward: a function, (form, *arrays) -> (results, residuals). The results are an array or a tuple of arrays. The
            residuals are the values that the backward pass needs.
        backward: a function, (form, residuals, cotangents) -> cotangents of the arrays. It returns a tuple, with None
            for an array without a cotangent.
        title: a function that returns the name of a form for error messages.

    Returns:
        A function, (form, *arrays) -> results.

    Raises:
        PlanError: raised by the returned function, if it is differentiated in forward mode.

    Example:
        >>> scaled = with_gradient(lambda by, x: (by * x, None), lambda by, residuals, g: (by * g,))
        >>> jax.grad(lambda x: scaled(3.0, x))(2.0).item()
        3.0
    """

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def program(form, *arrays):
        return batched_together(forward(form, *arrays)[0])

    def residual_forward(form, *arrays):
        results, residuals = forward(form, *arrays)
        return batched_together(results), residuals

    program.defvjp(residual_forward, backward)

    def checked(form, *arrays):
        leaves, tree = jax.tree.flatten(arrays)  # this drops arrays that are None
        try:
            return program(form, *jax.tree.unflatten(tree, _entering.bind(*leaves, title=title(form))))
        except TypeError as error:  # JAX's own error, for a tangent that vmap batches under jit
            if "forward-mode" not in str(error):
                raise
            _refuse(title=title(form))

    return checked


# -- several results under vmap ---------------------------------------------------------------------------------------


def batched_together(results: Any) -> Any:
    """Return the results unchanged; under `jax.vmap`, all of them get the batch dimension if one of them has it."""
    return tuple(_together.bind(*results)) if isinstance(results, tuple) and len(results) > 1 else results


def _batch_of_all(axis: Any, results: Sequence[jax.Array], dims: Sequence[int | None]):
    if all(dim is None for dim in dims):
        return _together.bind(*results), dims
    # Under Explicit axes the batch may be sharded.
    whole = [batching.bdim_at_front(x, dim, axis.size, axis.explicit_mesh_axis) for x, dim in zip(results, dims)]
    return _together.bind(*whole), [0] * len(whole)


TOGETHER = "gspmd_together"
_together = passing(TOGETHER)
ad.primitive_jvps[_together] = lambda results, tangents: (_together.bind(*results), tangents)
batching.fancy_primitive_batchers[_together] = _batch_of_all


# -- forward mode -----------------------------------------------------------------------------------------------------


_tangent = Primitive("gspmd_tangent")
"""The primitive through which tangents pass; it can only be batched and transposed.

Reverse mode transposes the primitive before it would run.
"""

ENTERING = "gspmd_entering"
_entering = passing(ENTERING)  # One primitive takes all arrays of a program; one for each array would slow down JAX.
ad.primitive_jvps[_entering] = lambda arrays, tangents, *, title: (
    list(arrays),  # Without `_entering`: the derivative of this derivative may be in forward mode.
    [t if isinstance(t, ad.Zero) else _tangent.bind(t, title=title) for t in tangents],
)
batching.primitive_batchers[_entering] = lambda arrays, dims, *, title: (_entering.bind(*arrays, title=title), dims)


def _refuse(*_: Any, title: str, **__: Any):
    raise PlanError(
        f"cannot differentiate '{title}' forward: its lowering plans reverse mode only.\n"
        "  Use lowering='xla', or jax.vjp and jax.jacrev."
    ) from None


_tangent.def_abstract_eval(lambda tangent, *, title: tangent)
_tangent.def_impl(_refuse)
mlir.register_lowering(_tangent, _refuse)
ad.primitive_jvps[_tangent] = _refuse
ad.primitive_transposes[_tangent] = lambda cotangent, _, *, title: [cotangent]
batching.primitive_batchers[_tangent] = lambda xs, dims, *, title: (_tangent.bind(*xs, title=title), dims[0])
