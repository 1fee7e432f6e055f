"""Text generation with a custom model: all rows advance together, one token per step, through prompts and texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import gspmd
from gspmd import ops
from gspmd.annotate import LayoutError, Spec
from gspmd.annotate.equation import Equation
from gspmd.interruption import answering
from gspmd.layouts import Layout
from gspmd.training.model import Own

from .batch import coarse
from .generator import Burst
from .loop import NOTHING, PLAIN, UNDEFINED, Sampling
from .serving import GenerationError

_WHOLE = Spec(("B",), ((),))
Arrays = Mapping[str, jax.Array]


def fewest_rows(model: Own, layout: Layout, mesh: Any, texts: int, room: int) -> tuple[int, Layout]:
    """Return the smallest number of rows for these texts, and the resolved layout for it, in which L is unsharded.

    Args:
        model: a custom model.
        layout: the layout of the model.
        mesh: a mesh with the mesh axes of the layout.
        texts: number of texts.
        room: the largest number of tokens in a text.

    Raises:
        LayoutError: the mesh axes do not divide the model's sizes.
    """
    faults = []
    # Every product of mesh axes divides the number of devices, so it divides one of that many consecutive numbers.
    for rows in range(texts, texts + mesh.size):
        sizes = {**model.sizes(rows, 1), "T": room}
        try:
            return rows, layout.resolved(sizes, mesh).one_position().check(sizes, mesh)
        except LayoutError as error:
            faults.append(error)
    raise faults[0]


@dataclass(frozen=True)
class Stepwise:
    """A generator that continues prompts with a custom model; call and iterate under `jax.set_mesh`.

    No row is ever padded, so the model need not handle padding. Prompts are read in chunks up to the length of the
    shortest prompt. From there on every row reads one token per step, from its prompt or from its own text.

    Attributes:
        model: a model with the methods of `gspmd.training.model.Decoder`.
        layout: the layout from `fewest_rows`.
        rows: the number of rows from `fewest_rows`.
        room: the largest number of tokens in a text.
        chunk: number of tokens of the prompts that are read in one step.
        burst: number of tokens of each text that are copied to the host together.
    """

    model: Own
    layout: Layout
    rows: int
    room: int
    chunk: int = 128
    burst: int = 8

    def stream(
        self,
        params: Arrays,
        prompts: Sequence[np.ndarray],
        tokens: int,
        *,
        samples: int = 1,
        sampling: Sampling = PLAIN,
        seed: int = 0,
        stop: Sequence[int] = (),
        ended: Collection[int] = (),
    ) -> Iterator[Burst]:
        """Continue prompts, yielding burst by burst.

        Args:
            params: the parameters by path, sharded by the layout.
            prompts, tokens, samples, sampling, seed, stop, ended: see `Generator.stream`.

        Raises:
            GenerationError: while iterating, the logits of a text are NaN. The burst with the tokens before the NaN is
                yielded first.
        """
        mesh = jax.sharding.get_mesh()
        put = lambda values, dtype=np.int32: jax.device_put(  # noqa: E731
            np.asarray(values, dtype), NamedSharding(mesh, jax.P())
        )
        texts, numbers = samples * len(prompts), np.arange(self.rows)
        of_rows = [prompts[number // samples if number < texts else 0] for number in range(self.rows)]
        lengths = np.array([len(ids) for ids in of_rows])
        written = np.zeros((self.rows, coarse(int(lengths.max()))), np.int32)
        for row, ids in zip(written, of_rows):
            row[: len(ids)] = ids
        kept, at = self._zeros(), 0
        loop = self._compiled(self.loop(sampling, tuple(stop)), params, kept, written.shape[1])
        read = None
        if lengths.min() - 1 >= self.chunk:
            reading = jax.jit(self._read, donate_argnums=1)
            read = answering(reading.lower(params, kept, put(written[:, : self.chunk]), put(0)).compile)
        began = time.monotonic()
        while read is not None and lengths.min() - 1 - at >= self.chunk:
            kept, at = read(params, kept, put(written[:, at : at + self.chunk]), put(at)), at + self.chunk
        state = kept, put(written[:, at]), put(np.where(numbers < texts, tokens, 0)), put(at)
        seeds = put(np.where(numbers < texts, seed + numbers, 0), np.uint32)
        given, counts, done = put(written), np.zeros(texts, int), np.zeros(texts, bool)
        found: list[list[int]] = [[] for _ in range(texts)]
        while not done.all():
            left = int(lengths.max()) - at
            steps = min(self.burst, left) if left > 0 else self.burst
            alive = np.array([number not in ended for number in numbers])
            state, made = loop(params, state, given, put(lengths), seeds, put(alive, bool), put(steps))
            (_, _, still, position), shown = state, np.asarray(made)[:texts]
            at, done = int(position), np.asarray(still)[:texts] == 0
            for number, row in enumerate(shown):
                found[number] += [int(token) for token in row if token >= 0]
            undefined = [number for number, row in enumerate(shown) if UNDEFINED in row]
            if at >= lengths.max() or done.all() or undefined:  # before that, some text has no new token
                yield Burst(found, [*map(bool, done)], time.monotonic() - began)
                counts += [len(each) for each in found]
                found = [[] for _ in range(texts)]
            for number in undefined:
                raise GenerationError(
                    f"cannot continue text {number + 1} after {counts[number]} new tokens: the model's logits are "
                    "NaN.\n  Check its parameters, and what it computes from them."
                )

    # -- programs -----------------------------------------------------------------------------------------------------

    def step(self, params: Arrays, kept: Arrays, tokens: jax.Array, position: jax.Array) -> tuple[jax.Array, Arrays]:
        """Return the logits after reading tokens [B, L], which are not sharded, and the updated state of the model."""
        whole = Spec(("B", "L"), ((), ()))
        placed = gspmd.reshard(tokens, Equation.move(whole, self.model.batch_spec(self.layout)))
        return self.model.step(self.layout, params, placed, position, kept)

    def _read(self, params: Arrays, kept: Arrays, tokens: jax.Array, position: jax.Array) -> Arrays:
        return self.step(params, kept, tokens, position)[1]

    @cached_property
    def abstract_kept(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The state that the model keeps between steps, as shapes, dtypes and shardings."""
        mesh = jax.sharding.get_mesh()
        return {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec.partition_spec()))
            for name, (spec, shape, dtype) in self.model.kept(self.layout, self.rows, self.room).items()
        }

    def _zeros(self) -> Arrays:
        like = self.abstract_kept
        made = lambda: {name: jnp.zeros(each.shape, each.dtype) for name, each in like.items()}  # noqa: E731
        return jax.jit(made, out_shardings={name: each.sharding for name, each in like.items()})()

    def loop(self, sampling: Sampling, stop: tuple[int, ...]) -> Callable[..., Any]:
        """Build the loop for a burst: (params, state, prompts, lengths, seeds, alive, limit) -> (state, tokens).

        The state consists of the model's own state, the tokens [B] to read next, the number of tokens [B] that each
        text may still add, and the position. The shape of prompts is [B, P], and the shape of lengths, seeds and alive
        is [B]. limit is the number of steps. The shape of the returned tokens is [B, burst].
        """
        line = self.layout.spec(self.model.logits_line).without("L")
        options = {"temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p}

        def run(params, state, prompts, lengths, seeds, alive, limit):
            def unfinished(carry) -> jax.Array:
                step, (_, _, left, _), _ = carry
                return (step < limit) & jnp.any(left > 0)

            def one_step(carry):
                step, (kept, tokens, left, position), written = carry
                logits, kept = self.step(params, kept, tokens[:, None], position)
                at = jnp.full_like(tokens, position + 1)
                drawn = ops.sample(logits[:, 0], line, "V", seeds=seeds, positions=at, top_k=sampling.top_k, **options)
                drawn = gspmd.reshard(drawn, Equation.move(line.without("V"), _WHOLE))
                reading, active = position + 1 < lengths, left > 0
                following = jax.lax.dynamic_index_in_dim(prompts, position + 1, 1, keepdims=False)
                ends = jnp.isin(drawn, jnp.asarray(stop, jnp.int32)) if stop else jnp.zeros_like(active)
                writes = active & ~ends & ~reading
                shown = jnp.where(writes, jnp.where(drawn < 0, UNDEFINED, drawn), NOTHING)
                written = jax.lax.dynamic_update_slice_in_dim(written, shown[:, None], step, axis=1)
                left = jnp.where(reading, left, jnp.where(writes & (drawn >= 0), left - 1, 0))
                tokens = jnp.where(reading, following, jnp.where(writes & (drawn >= 0), drawn, tokens))
                return step + 1, (kept, tokens, left, position + 1), written

            kept, tokens, left, position = state
            state = kept, tokens, jnp.where(alive, left, 0), position
            nothing = jnp.full((self.rows, self.burst), NOTHING, jnp.int32)
            _, state, written = jax.lax.while_loop(unfinished, one_step, (jnp.int32(0), state, nothing))
            return state, written

        return run

    def _compiled(self, loop: Callable[..., Any], params: Arrays, kept: Arrays, width: int) -> Any:
        everywhere = NamedSharding(jax.sharding.get_mesh(), jax.P())
        like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)  # noqa: E731
        count, number = like(jnp.int32, self.rows), like(jnp.int32)
        state = kept, count, count, number
        rest = like(jnp.int32, self.rows, width), count, like(jnp.uint32, self.rows), like(jnp.bool_, self.rows), number
        return answering(jax.jit(loop, donate_argnums=1).lower(params, state, *rest).compile)
