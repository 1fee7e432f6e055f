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
    """The functions and the initial state of a run, for any model.

    Attributes:
        state: the initial state; for a resumed run, the shapes and shardings of the state to be restored.
        step: a function (state, batch, key) -> (state, metrics), from `jit_step`; the metrics include `cross_entropy`
            and `non_finite`.
        evaluate: a function (params, batch) -> mean cross-entropy in nats. A jitted function is compiled once, before
            its first use.
        place: a function that puts a batch, integers [B, L+1] or a dictionary of such arrays, onto the devices. It gets
            only the rows that this process reads.
        key: the random key from which the key of each step is derived, so that a resumed run draws the same numbers.
        part: the part of every batch that this process reads, as (index, number of parts), from `processes.part_of`.
        context: a function that makes the context in which all other functions are called, such as
            `Arrangement.context`.
        gradients: the shapes and shardings of all gradients before the optimizer's update; None if unknown.
        flops: the model's FLOPs in a step, as in `Speed`.
        peak: the FLOP/s of all devices. MFU is computed from `flops` and `peak`.
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
