"""The norm of a tree of tensors, each with its own spec."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from gspmd.annotate.errors import SpecError, shown
from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import Context, context, run
from gspmd.lowerings.xla.constrained import left_to_compiler
from gspmd.ops.interface.operands import array
from gspmd.ops.interface.planned_op import Chains, float32, planned_op, read, settle, shard_index

_SCALAR = Spec((), ())


def global_norm(tree: Any, specs: Any) -> jax.Array:
    """Compute the Euclidean norm of all elements in a tree of arrays together: sqrt(Σ x²).

    Communication: one all-reduce of a single float32, over all mesh axes that shard any of the arrays. If an array is
    replicated over one of these axes, only the first device along that axis adds the squares of this array.

    Args:
        tree: a tree of arrays.
        specs: a tree of the same structure, with the spec of each array.

    Returns:
        A float32 scalar, on every device. If all arrays are zero, its gradient is zero.

    Raises:
        SpecError: the two trees have different structures, or a spec does not fit its array or the mesh.
        PlanError: an array is a partial sum.

    Example:
        >>> import gspmd
        >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        ...     weight = gspmd.annotate(jnp.full((2, 2), 2.0), "E_xF")
        ...     print(global_norm({"weight": weight, "bias": jnp.full(1, 3.0)}, {"weight": "E_xF", "bias": "F"}))
        5.0

    Source: Pascanu, Mikolov and Bengio 2013, *On the difficulty of training recurrent neural networks*
        (arXiv 1211.5063), section 3.2, on clipping by the norm of all gradients together.
    """
    leaves, structure = jax.tree.flatten(tree)
    texts, of_specs = jax.tree.flatten(specs)
    if structure != of_specs:  # type: ignore[operator]
        raise SpecError(
            f"cannot take the norm: the arrays and their specs are not the same tree\n  the arrays: {structure}\n"
            f"  the specs:  {of_specs}\n  Give one spec for each array."
        )
    ctx = context()
    doing = [f"cannot take the norm of {shown(text)}" for text in texts]
    leaves = [array(said, "what is given for it", leaf, "real numbers") for said, leaf in zip(doing, leaves)]
    specs = tuple(read(said, text, leaf, ctx) for said, text, leaf in zip(doing, texts, leaves))
    if not leaves:
        return jnp.zeros((), jnp.float32)
    if ctx.compiler_chooses:
        return left_to_compiler(ctx, _plain, specs, _SCALAR, *leaves, name="global_norm")
    return _norm(_GlobalNorm(specs), ctx, *leaves)


@dataclass(frozen=True)
class _GlobalNorm:
    specs: tuple[Spec, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that shard any of the tensors, in alphabetical order."""
        return tuple(sorted(set().union(*(spec.used for spec in self.specs))))

    def counted(self, spec: Spec) -> jax.Array | bool:
        """Return whether this device adds the squares of its part of a tensor.

        If several devices have the same part, only the first of them adds its squares.
        """
        copies = [axis for axis in self.axes if axis not in spec.used]
        return shard_index(copies) == 0


def _squares(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.sum(jnp.square(float32(leaf))) for leaf in leaves]


def _plain(*leaves: jax.Array) -> jax.Array:
    total = sum(_squares(leaves))
    # The square root has an infinite slope at zero; here the gradient of the norm at zero is defined as zero.
    return jnp.where(total > 0.0, jnp.sqrt(jnp.where(total > 0.0, total, 1.0)), 0.0)


def _forward(form: _GlobalNorm, ctx: Context, *leaves: jax.Array):
    steps, body = _value(form, ctx)
    norm = run(ctx, "global_norm", steps, body, form.specs, _SCALAR, *leaves)
    return norm, (leaves, norm)


def _backward(form: _GlobalNorm, ctx: Context, kept, g: jax.Array):
    leaves, norm = kept
    ins = (_SCALAR, _SCALAR, *form.specs)
    return run(ctx, "gradient of global_norm", (), _gradient_body, ins, form.specs, norm, g, *leaves)


_norm = planned_op(_forward, _backward, lambda form: "global_norm")


@lru_cache(maxsize=1024)
def _value(form: _GlobalNorm, ctx: Context):
    chains = Chains(ctx.mesh, total=settle(_SCALAR, form.axes, {}, ctx, name="sum of squares"))

    def body(*leaves):
        squares = zip(form.specs, _squares(leaves))
        mine = sum(jnp.where(form.counted(spec), square, 0.0) for spec, square in squares)
        return jnp.sqrt(chains.send("total", mine))

    return chains.steps, body


def _gradient_body(norm: jax.Array, g: jax.Array, *leaves: jax.Array) -> tuple[jax.Array, ...]:
    factor = jnp.where(norm > 0.0, g / jnp.where(norm > 0.0, norm, 1.0), 0.0)
    return tuple((factor * float32(leaf)).astype(leaf.dtype) for leaf in leaves)
