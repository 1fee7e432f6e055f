"""The training loop: compile, step, measure, validate, save, and stop cleanly on a signal."""

import math
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from rich.console import Console

from gspmd.training import data, processes
from gspmd.training.checkpoints import Checkpoints, newest, save_settings
from gspmd.training.config import TrainingConfig
from gspmd.training.data.split import count_of
from gspmd.training.reporting.metrics import Display, Metrics
from gspmd.training.run.guard import Diverged, Guard
from gspmd.training.run.relayout import move
from gspmd.training.run.signals import Interrupted, Stop
from gspmd.training.state import TrainState

Tree = Any
Place = Callable[[np.ndarray], jax.Array]
Evaluate = Callable[[Tree, jax.Array], jax.Array]


class Unwritable(Exception):
    """The run's folder can no longer be written; `step` is the newest checkpoint to resume from.

    Attributes:
        reason: the message of the operating system.
        step: of the newest checkpoint; None if there is none.
        out: the run's folder.
    """

    def __init__(self, reason: str, step: int | None, out: Path):
        self.reason, self.step, self.out = reason, step, out
        saved = "no step is saved" if step is None else f"step {step} is saved"
        super().__init__(f"cannot write to {str(out)!r}: {reason}; {saved}.")


@dataclass(frozen=True)
class Program:
    """The functions and the initial state of a run, independent of the model.

    Attributes:
        state: the initial state; on a resume, the shapes and shardings of the restored one.
        step: (state, batch, key) -> (state, figures), as of `jit_step`; `figures` has `cross_entropy` and `non_finite`.
        evaluate: (params, batch) -> mean cross-entropy in nats.
        place: puts a batch of tokens, integers [B, L+1], onto the devices: the rows of it that this process reads.
        key: the random key that the key of every step is folded from, so that nothing random depends on a resume.
        part: which part of a batch, of how many, has these rows, as of `processes.part_of`.
        context: entered wherever the other functions are called, such as that of an `Arrangement`.
    """

    state: TrainState
    step: Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Evaluate
    place: Place
    key: jax.Array
    part: tuple[int, int] = (0, 1)
    context: Callable[[], AbstractContextManager] = nullcontext


def fit(
    config: TrainingConfig,
    program: Program | Mapping[int, Callable[[], Program]],
    corpus: data.Corpus,
    out: Path,
    console: Console,
    settings: Mapping[str, Any] | None = None,
) -> TrainState:
    """Train for `config.steps` updates, writing figures and checkpoints to `out`.

    Args:
        config: how long, and how often to validate and save.
        program: the functions and the initial state. For a run that changes its layout, what makes them, by the step
            after which they are in force, 0 for the first: there the state is moved to the shardings of the next one.
        corpus: the text.
        out: an existing folder.
        console: where progress is shown.
        settings: all settings of the run, kept in `out` for a resume.

    Returns:
        The last state.

    Raises:
        Interrupted: after SIGINT or SIGTERM, once a checkpoint is saved. An interrupted validation writes no figure.
        Diverged: more than `config.non_finite` losses or gradients were not finite.
        ConfigError: there is no checkpoint to resume from, or it does not fit.
        OSError: `out` can no longer be written; complete checkpoints stay intact. A save that fails is noticed at the
            next step.
    """
    programs = program if isinstance(program, Mapping) else {0: lambda: program}
    with Stop() as stop, Checkpoints(out, keep=config.keep) as checkpoints:
        resumed_at, position, skipped = None, None, 0
        if config.resume:
            tell = partial(console.print, markup=False, soft_wrap=True)
            resumed_at = checkpoints.intact(config.resume_step, tell)
        program = programs[max(step for step in programs if step <= (resumed_at or 0))]()
        random = {"key": jax.random.key_data(program.key).tolist(), "rng": str(jax.random.key_impl(program.key))}
        stream, state = data.stream(corpus, config) | random, program.state
        if resumed_at is not None:
            state, saved = checkpoints.restore(state, resumed_at)
            data.check_stream(saved["stream"], stream)
            position, skipped = saved["position"], saved["skipped"]
            console.print(f"Resumed from step {resumed_at}.")
        checkpoints.continue_from(resumed_at or 0)
        if processes.first():
            save_settings(out, settings or {})
        with Metrics(out, resumed_at=resumed_at) if processes.first() else nullcontext() as metrics:
            guard = Guard(config.non_finite, skipped, console)
            run = _Run(config, program, corpus, stream, out, console, checkpoints, metrics, stop, guard, position)
            state = run.train(state, programs)
            with run.program.context():
                run.finish(state)
    return state


@dataclass
class _Run:
    config: TrainingConfig
    program: Program
    corpus: data.Corpus
    stream: Mapping[str, Any]
    out: Path
    console: Console
    checkpoints: Checkpoints
    metrics: Metrics | None
    stop: Stop
    guard: Guard
    position: dict[str, Any] | None

    def train(self, state: TrainState, programs: Mapping[int, Callable[[], Program]]) -> TrainState:
        """Train in one program after another, and move the state between them."""
        begin = int(state.step)
        if begin >= self.config.steps:
            self.console.print(f"All {self.config.steps} steps are done.")
            return state
        changes = sorted(step for step in programs if begin < step < self.config.steps)
        for first, last in pairwise([begin, *changes, self.config.steps]):
            if first in changes:
                self.program = programs[first]()
                state = move(state, self.program.state)
            with self.program.context():
                state = self._train(state, first, last)
        return state

    def _train(self, state: TrainState, begin: int, end: int) -> TrainState:
        batches = self.corpus.batches(self.config.batch, self.config.length, self.config.seed, *self.program.part)
        if self.position is not None:
            batches.set_state(self.position)
        batch = self.program.place(next(batches))
        step = self._compile(state, batch)
        with Display(self.console, self.config.steps, begin) as display:
            before = time.perf_counter()
            for number in range(begin + 1, end + 1):
                state, figures = step(state, batch, self.program.key)
                self.position = batches.get_state()
                if number < end:  # Transfer the next batch while the devices compute this one.
                    batch = self.program.place(next(batches))
                row = self._row(jax.device_get(figures))
                now = time.perf_counter()
                row["tokens_per_second"] = self.config.batch * self.config.length / (now - before)
                self.checkpoints.check()
                if reason := self.guard.count(number, row):
                    self.checkpoints.wait()
                    raise Diverged(reason, newest(self.out), self.out)
                row["non_finite"] = self.guard.skipped
                last = number == self.config.steps
                if _due(number, self.config.validation_every) and not last:
                    row |= self.validate(state, self.config.validation_batches)
                if self.metrics is not None:
                    self.metrics.write(number, row)
                display.update(number, row)
                if (stopping := self.stop.agreed()) or last or _due(number, self.config.save_every):
                    run = {"stream": self.stream, "position": self.position, "skipped": self.guard.skipped}
                    self.checkpoints.save(state, run)
                if stopping:
                    self.interrupt(number)
                before = time.perf_counter() if "val_bits_per_byte" in row else now
        return state

    def finish(self, state: TrainState) -> None:
        """Validate on up to `final_validation_batches` of held-out text, and write the last object of metrics.jsonl."""
        self.checkpoints.wait()
        limit = self.config.final_validation_batches
        what = self.config.batch, self.config.length
        count, whole = self.corpus.validation_count(*what, limit), self.corpus.validation_count(*what)
        self.console.print(f"Validating on {count} of the {whole} batches of held-out text.")
        result = self.validate(state, limit)
        if not result:
            self.interrupt(int(state.step))
        gzip = self.corpus.gzip_bits_per_byte
        if self.metrics is not None:
            self.metrics.write(int(state.step), result | {"gzip_bits_per_byte": gzip})
        self.console.print(
            f"Held-out text: [bold green]{result['val_bits_per_byte']:.3f}[/] bits per byte; gzip: {gzip:.3f} "
            f"({count_of(self.corpus.files[1], self.corpus.unit)}, each compressed by itself)."
        )

    def validate(self, state: TrainState, limit: int = 0) -> dict[str, float]:
        """Bits per byte of `limit` batches of held-out text, or of all; empty if interrupted."""
        what = self.config.batch, self.config.length, limit
        losses, count = [], self.corpus.validation_count(*what)
        with self.console.status("Validating …") as status:
            for number, batch in enumerate(self.corpus.validation_batches(*what, *self.program.part), 1):
                if self.stop.agreed():
                    return {}
                losses.append(float(self.program.evaluate(state.params, self.program.place(batch))))
                status.update(f"Validating: batch {number} of {count}")
        return {"val_bits_per_byte": float(np.mean(losses)) / self._nats_per_token}

    def interrupt(self, step: int) -> NoReturn:
        """Stop the run once the checkpoint of `step` is complete."""
        self.checkpoints.wait()
        raise Interrupted(step, self.out, self.stop.number or signal.SIGINT, agreed=True)

    def _compile(self, state: TrainState, batch: jax.Array) -> Callable:
        began = time.perf_counter()
        with self.console.status("Compiling the training step …"):
            step = self.program.step.lower(state, batch, self.program.key).compile()
        self.console.print(f"Compiled the training step in {time.perf_counter() - began:.0f} s.")
        return step

    def _row(self, figures: dict[str, Any]) -> dict[str, Any]:
        row = {name: value.item() if np.ndim(value) == 0 else value for name, value in figures.items()}
        return row | {"bits_per_byte": row.get("cross_entropy", row["loss"]) / self._nats_per_token}

    @property
    def _nats_per_token(self) -> float:
        """Nats of a token that has a bit for each of its bytes."""
        return math.log(2) * self.corpus.bytes_per_token


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
