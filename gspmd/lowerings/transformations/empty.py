"""The shard_map of arrays of which some have no elements."""

from collections.abc import Callable
from typing import Any

import jax


def shard_map(body: Callable, *, in_specs: Any, **options: Any) -> Callable:
    """A shard_map of pieces without elements, whose results depend on one input, and so on none that XLA throws away.

    XLA replaces what has no elements by a constant, and cannot read the body of a shard_map that is left without any
    input ("expected at least one operand ... GlobalToLocalShape", jaxlib 0.10.2).
    """

    def held(zero, *pieces):
        return jax.tree.map(lambda x: x + zero.astype(x.dtype), body(*pieces))

    def run(*arrays):
        ins = (in_specs,) * len(arrays) if isinstance(in_specs, jax.P) else in_specs
        whole = jax.shard_map(held, in_specs=(jax.P(), *ins), **options)
        return whole(jax.numpy.zeros((), "int8"), *arrays)

    return run
