"""The functions of a model that a run needs, the initial state, and the model's FLOPs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
from jax.stages import Wrapped

from gspmd.training.state import TrainState

Tree = Any
Place = Callable[[Any], Tree]
Evaluate = Callable[[Tree, Tree], jax.Array]


@dataclass(frozen=True)
class Program:
    """The functions and the initial state of a run, independent of the model.

    Attributes:
        state: the initial state; if a run is resumed, the shapes and shardings of the restored state.
        step: (state, batch, key) -> (state, figures), as `jit_step` returns it; `figures` has `cross_entropy` and
            `non_finite`.
        evaluate: (params, batch) -> mean cross-entropy in nats; compiled ahead of its run if it is jitted.
        place: puts a batch, of integers [B, L+1] or a dictionary of them, onto the devices; it gets the rows that this
            process reads.
        key: the random key from which each step's key is derived, so that a resumed run draws the same random numbers.
        part: the part of a batch that this process reads, as (number, number of parts) from `processes.part_of`.
        context: a context in which all other functions are called, such as `Arrangement.context`.
        gradients: shapes with shardings of all gradients as the optimizer reads them; None if unknown.
        flops: model FLOPs of a step, and `peak` the FLOP/s of all devices, as in `Speed`, for the MFU.
    """

    state: TrainState
    step: Wrapped
    evaluate: Evaluate
    place: Place
    key: jax.Array
    part: tuple[int, int] = (0, 1)
    context: Callable[[], AbstractContextManager] = nullcontext
    gradients: Tree = None
    flops: float = 0.0
    peak: float | None = None
