"""The loop: compile, step, measure, validate, save, and stop cleanly when asked to."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import grain
import jax
import numpy as np
from rich.console import Console

from gspmd.training import data
from gspmd.training.checkpoint import Checkpoints, save_settings
from gspmd.training.config import TrainingConfig
from gspmd.training.metrics import Display, Metrics
from gspmd.training.state import TrainState

Tree = Any
Place = Callable[[np.ndarray], jax.Array]
Evaluate = Callable[[Tree, jax.Array], jax.Array]


class Interrupted(Exception):
    """Someone asked the run to stop; what is needed to go on is saved.

    Attributes:
        step: of the checkpoint.
    """

    def __init__(self, step: int):
        self.step = step
        super().__init__(f"interrupted after step {step}")


class Diverged(Exception):
    """The loss is no longer a number."""


@dataclass(frozen=True)
class Program:
    """What the loop runs, whatever the model.

    Attributes:
        state: where training begins; on a resume, what a checkpoint is restored as.
        step: (state, batch, key) -> (state, figures), as `jit_step` gives it; `figures` has `cross_entropy`.
        evaluate: (params, batch) -> mean cross-entropy in nats.
        place: puts a batch of bytes, uint8 [B, L+1], onto the devices.
        key: random numbers of all steps are folded out of it.
    """

    state: TrainState
    step: Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Evaluate
    place: Place
    key: jax.Array


def fit(
    config: TrainingConfig,
    program: Program,
    corpus: data.Corpus,
    out: Path,
    console: Console,
    settings: Mapping[str, Any] | None = None,
) -> TrainState:
    """Trains for `config.steps` updates and leaves figures and checkpoints in `out`.

    Args:
        config: how long, and how often to validate and save.
        program: the compiled pieces.
        corpus: the text.
        out: an existing folder.
        console: where progress is shown.
        settings: all settings of the run, kept in `out` for a resume.

    Returns:
        The last state.

    Raises:
        Interrupted: after SIGINT or SIGTERM, once a checkpoint is saved.
        Diverged: the loss is not finite.
        ConfigError: there is no checkpoint to resume from, or it does not fit.
    """
    batches = data.train_batches(corpus, config.batch, config.length, config.seed)
    with Checkpoints(out) as checkpoints:
        state, resumed_at = program.state, None
        if config.resume:
            state, position = checkpoints.restore(state)
            batches.set_state(position)
            resumed_at = int(state.step)
            console.print(f"Resumed from step {resumed_at}.")
        save_settings(out, settings or {})
        with Metrics(out, resumed_at=resumed_at) as metrics, _Stop() as stop:
            run = _Run(config, program, corpus, console, checkpoints, metrics, stop)
            state = run.train(state, batches)
            run.finish(state)
    return state


@dataclass
class _Run:
    config: TrainingConfig
    program: Program
    corpus: data.Corpus
    console: Console
    checkpoints: Checkpoints
    metrics: Metrics
    stop: "_Stop"

    def train(self, state: TrainState, batches: grain.DatasetIterator) -> TrainState:
        begin = int(state.step)
        if begin >= self.config.steps:
            self.console.print(f"All {self.config.steps} steps are done.")
            return state
        position = batches.get_state()
        batch = self.program.place(next(batches))
        step = self._compile(state, batch)
        with Display(self.console, self.config.steps, begin) as display:
            before = time.perf_counter()
            for number in range(begin + 1, self.config.steps + 1):
                state, figures = step(state, batch, self.program.key)
                position = batches.get_state()
                # The next batch is placed while the devices are busy with this one.
                batch = self.program.place(next(batches))
                row = self._row(jax.device_get(figures))
                now = time.perf_counter()
                row["tokens_per_second"] = self.config.batch * self.config.length / (now - before)
                if not math.isfinite(row["loss"]):
                    remedy = "lower --learning-rate, or raise --warmup."
                    raise Diverged(f"the loss is {row['loss']} at step {number}: {remedy}")
                last = number == self.config.steps
                if _due(number, self.config.validation_every) and not last:
                    row["val_bits_per_byte"] = self.validate(state, self.config.validation_batches)
                self.metrics.write(number, row)
                display.update(number, row)
                if last or self.stop.asked or _due(number, self.config.save_every):
                    self.checkpoints.save(state, position)
                if self.stop.asked:
                    self.checkpoints.wait()
                    raise Interrupted(number)
                before = time.perf_counter() if "val_bits_per_byte" in row else now
        return state

    def finish(self, state: TrainState) -> None:
        """Reads every held-out byte, and writes the last object of metrics.jsonl."""
        bits = self.validate(state)
        self.metrics.write(
            int(state.step), {"val_bits_per_byte": bits, "gzip_bits_per_byte": self.corpus.gzip_bits_per_byte}
        )
        self.console.print(
            f"Held-out text: [bold green]{bits:.3f}[/] bits per byte; gzip: {self.corpus.gzip_bits_per_byte:.3f} "
            f"({self.corpus.files[1]} files, each compressed by itself)."
        )

    def validate(self, state: TrainState, limit: int | None = None) -> float:
        """Bits per byte of the held-out text, of all of it or of `limit` batches."""
        losses = []
        for batch in self._held_out(limit):
            losses.append(float(self.program.evaluate(state.params, self.program.place(batch))))
            if self.stop.asked:
                break
        return float(np.mean(losses)) / math.log(2)

    def _held_out(self, limit: int | None) -> Iterator[np.ndarray]:
        return data.validation_batches(self.corpus, self.config.batch, self.config.length, limit)

    def _compile(self, state: TrainState, batch: jax.Array) -> Callable:
        began = time.perf_counter()
        with self.console.status("Compiling the training step …"):
            step = self.program.step.lower(state, batch, self.program.key).compile()
        self.console.print(f"Compiled the training step in {time.perf_counter() - began:.0f} s.")
        return step

    @staticmethod
    def _row(figures: dict[str, Any]) -> dict[str, Any]:
        row = {name: value.item() if np.ndim(value) == 0 else value for name, value in figures.items()}
        return row | {"bits_per_byte": row.get("cross_entropy", row["loss"]) / math.log(2)}


class _Stop:
    """Turns SIGINT and SIGTERM into a wish that the loop grants between steps; a second one is granted at once."""

    asked = False

    def __enter__(self) -> "_Stop":
        self._before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._ask)
            except ValueError:  # not the main thread: whoever runs us handles signals
                break
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
