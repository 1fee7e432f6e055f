"""Divide a batch into microbatches; each device divides the sequences that it holds, so that nothing is sent."""

from math import prod

import jax

from gspmd.annotate.errors import SpecError
from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import mapped


def cut_batch(tokens: jax.Array, spec: str | Spec, count: int) -> jax.Array:
    """Cut tokens [B, L] into microbatches [M, B/M, L], each of which has a part of every device's sequences.

    Args:
        tokens: [B, L], or with other dimensions after B.
        spec: the spec of the tokens, such as `"B_xL"`; its first dimension is cut.
        count: M, the number of microbatches.

    Returns:
        [M, B/M, L], every microbatch sharded as `spec` says.

    Raises:
        SpecError: the number of sequences on a device is not a multiple of `count`.

    Example:
        >>> import gspmd
        >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        ...     print(cut_batch(gspmd.annotate(jax.numpy.arange(6).reshape(6, 1), "B_xL"), "B_xL", 3)[..., 0])
        [[0 1]
         [2 3]
         [4 5]]
    """
    spec, mesh = Spec.parse(spec), jax.sharding.get_abstract_mesh().shape
    devices = prod(mesh[axis] for axis in spec.axes[0])
    if tokens.shape[0] % (devices * count):
        raise SpecError(
            f"cannot split a batch of {tokens.shape[0]} sequences over {devices} devices ('{spec}') into {count} "
            "microbatches.\n  Each device splits its own sequences into microbatches, so use a batch that is a "
            f"multiple of {devices * count}."
        )
    cut = jax.P(None, *spec.partition_spec().partitions)
    return mapped(lambda x: x.reshape(count, -1, *x.shape[1:]), spec.partition_spec(), cut)(tokens)
