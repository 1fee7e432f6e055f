"""The training loop: compile, step, measure, validate, save, and stop cleanly on a signal."""

import math
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from gspmd.display.progress import Progress
from gspmd.display.units import duration
from gspmd.interruption import answering
from gspmd.training import data, processes
from gspmd.training.arrangement import move
from gspmd.training.checkpoints import Checkpoints, newest, save_settings
from gspmd.training.config import TrainingConfig
from gspmd.training.data.split import count_of
from gspmd.training.reporting import memory
from gspmd.training.reporting.display import Display
from gspmd.training.reporting.experts import IdleExperts
from gspmd.training.reporting.metrics import Metrics, best_validation, lost
from gspmd.training.reporting.speed import Speed
from gspmd.training.run.guard import Diverged, Guard
from gspmd.training.run.profile import Profile
from gspmd.training.run.program import Program
from gspmd.training.run.signals import Interrupted, Stop
from gspmd.training.state import TrainState

# Number of steps between checks for idle experts, if the run validates only at its end.
_INTERVAL = 100


def fit(
    config: TrainingConfig,
    program: Program | Mapping[int, Callable[[], Program]],
    corpus: data.Corpus,
    out: Path,
    console: Console,
    settings: Mapping[str, Any] | None = None,
    last: Callable[[TrainState, Metrics | None], None] | None = None,
) -> TrainState:
    """Train for `config.steps` updates, writing metrics and checkpoints to `out`.

    Args:
        config: the length of the run, and how often to validate and save.
        program: the functions and the initial state. For a run that changes its layout, a mapping from step to
            function. Each function makes the program that is used after its step; the step of the first program is 0.
            The state is moved to each program's shardings.
        corpus: the text to train on.
        out: the run's folder, which must exist.
        console: the console on which progress is shown.
        settings: all settings of the run, which are saved in `out`, so that the run can be resumed.
        last: a function that is called at the end with the last state and the metrics. It can add pictures and text to
            the metrics, which are None in all processes but the first.

    Returns:
        The last state.

    Raises:
        Interrupted: SIGINT, SIGTERM or SIGHUP has arrived, or the console's output was closed. The error is raised once
            a checkpoint is saved. An interrupted validation writes no result.
        Diverged: more than `config.non_finite` losses or gradients were not finite.
        ConfigError: there is no checkpoint to resume from, or it does not fit the model.
        OSError: `out` can no longer be written; complete checkpoints stay intact. A failed save is noticed at the next
            step.
    """
    if isinstance(program, Mapping):
        programs = program
    else:
        only = program
        programs = {0: lambda: only}
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    with ExitStack() as opened:
        with Stop() as stop, stop.closed(console), Checkpoints(out, keep=config.keep, tell=say) as checkpoints:
            resumed_at, position, skipped = None, None, 0
            if config.resume:
                with Progress(console, "Looking for the checkpoint"):
                    resumed_at = checkpoints.intact(config.resume_step, say)
                # Lost metrics are reported before the model is built, because building takes longer.
                figures = checkpoints.data(resumed_at).get("figures")
                if processes.first() and (fault := lost(out, resumed_at, figures)):
                    say(fault)
            profile = Profile(config.profile, out, resumed_at or 0, say, record=processes.first())
            # Checkpoints do not depend on the layout: take the layout that the run has after this step.
            program = programs[max(step for step in programs if step <= (resumed_at or 0))]()
            random = {"key": jax.random.key_data(program.key).tolist(), "rng": str(jax.random.key_impl(program.key))}
            stream, state = data.stream(corpus, config) | random, program.state
            if resumed_at is not None:
                with Progress(console, f"Restoring step {resumed_at}"):
                    state, saved = checkpoints.restore(state, resumed_at)
                data.check_stream(saved["stream"], stream)
                position, skipped = saved["position"], saved["skipped"]
                console.print(f"Resumed from step {resumed_at}.")
            # Set aside checkpoints of later steps: this run replaces them, and another resume would take the newest.
            checkpoints.continue_from(resumed_at or 0)
            metrics = best = None
            # Written only after all checks have passed, so that a refused resume leaves the folder unchanged.
            if processes.first():
                save_settings(out, settings or {})
                metrics = opened.enter_context(Metrics(out, resumed_at=resumed_at, settings=settings, log=config.log))
                best, _ = best_validation(out, of_updates=True)
            guard = Guard(config.non_finite, skipped, console)
            idle = IdleExperts(min(config.validation_every or _INTERVAL, config.steps))
            run = _Run(
                config, program, corpus, stream, out, console, checkpoints, metrics, stop, guard, position, profile,
                idle, best,
            )  # fmt: skip
            processes.meet("training")  # each has restored its own part of the state
            state = run.train(state, programs)
            with run.program.context():
                run.finish(state)
        if last is not None:
            last(state, metrics)
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
    profile: Profile
    idle: IdleExperts
    best: float | None
    evaluate: Callable | None = None

    def train(self, state: TrainState, programs: Mapping[int, Callable[[], Program]]) -> TrainState:
        """Train with one program after another; between two programs, move the state."""
        begin = int(state.step)
        if begin >= self.config.steps:
            past = f"the run is at step {begin}, past --steps {self.config.steps}: it trains no further"
            done = f"all {begin} steps are done"
            said = f"{past if begin > self.config.steps else done}; --steps {2 * begin} would train on."
            self.console.print(f"{said[0].upper()}{said[1:]}", highlight=False)
            return state
        changes = sorted(step for step in programs if begin < step < self.config.steps)
        with closing(self.profile):
            for first, last in pairwise([begin, *changes, self.config.steps]):
                if first in changes:
                    self.program, self.evaluate = programs[first](), None
                    processes.meet("the change of layout")
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
        speed = Speed(self.config.batch * self.config.length, self.program.flops, self.program.peak)
        with Display(self.console, self.config.steps, begin, self.config.log_every) as display:
            before = time.perf_counter()
            for number in range(begin + 1, end + 1):
                self.profile.before(number)
                with jax.profiler.StepTraceAnnotation("step", step_num=number):
                    state, figures = step(state, batch, self.program.key)
                counts = {"fill": _fill(batch)} if isinstance(batch, Mapping) else {}
                self.position = batches.get_state()
                if number < end:  # Transfer the next batch while the devices compute this one.
                    batch = self.program.place(next(batches))
                # device_get waits for the dispatched step, so that its time can be measured, and a signal or a
                # non-finite loss is handled before the next step begins.
                row = self._row(jax.device_get({**figures, **counts}))
                now = time.perf_counter()
                row |= speed.figures(now - before)
                if self.profile.after(number):
                    self.console.print(f"step {number}: profile written to {self.profile.folder}", soft_wrap=True)
                self.checkpoints.check()  # a save that failed in the background raises here
                if reason := self.guard.count(number, row):
                    self._wait()  # so that the message names the step that was being saved
                    raise Diverged(reason, newest(self.out), self.out)
                row["non_finite"] = self.guard.skipped
                last = number == self.config.steps
                validating = _due(number, self.config.validation_every) and not last
                saving = last or _due(number, self.config.save_every)
                if validating:
                    row |= self.validate(state, self.config.validation_batches)
                if self.metrics is not None:
                    self.metrics.write(number, row)
                display.update(number, row)
                self._tell(number, row)
                # All processes ask in every step, even processes without a signal, because all of them save together.
                if (stopping := self.stop.agreed()) or saving:
                    run = {"stream": self.stream, "position": self.position, "skipped": self.guard.skipped}
                    # The figures are written to disk before the checkpoint that stores their digest.
                    run["figures"] = self.metrics.digest() if self.metrics is not None else None
                    with Progress(self.console, f"Saving step {number}"):
                        self.checkpoints.save(state, run)
                if stopping:
                    self.interrupt(number)
                # Validations and saves are not part of a step's time.
                before = time.perf_counter() if validating or saving else now
        return state

    def _tell(self, step: int, row: Mapping[str, Any]) -> None:
        """Report the validation of a step, and the experts that became idle, if any."""
        if (score := row.get("val_bits_per_byte")) is not None:
            best = self.best is None or score < self.best
            self.best = score if best else self.best
            beside = "the best so far" if best else f"the best is {self.best:.3f}"
            self.console.print(f"step {step}: held-out text [bold green]{score:.3f}[/] bits per byte, {beside}")
        for sentence in self.idle.add(step, row.get("load")):
            self.console.print(f"step {step}: [yellow]{sentence}[/]")

    def finish(self, state: TrainState) -> None:
        """Validate on up to `last_validation` batches of held-out text; write the result as the last line of metrics.

        If a signal arrives during the last batch, the run stops after the result is written.
        """
        self._wait()  # the last step is safe before the validation, which may take long
        limit = self.config.last_validation
        what = self.config.batch, self.config.length
        count, whole = self.corpus.validation_count(*what, limit), self.corpus.validation_count(*what)
        self.console.print(f"Validating on {count} of the {whole} batches of held-out text.")
        result = self.validate(state, limit)
        if not result:
            self.interrupt(int(state.step))
        gzip = self.corpus.gzip_bits_per_byte
        if self.metrics is not None:
            self.metrics.write(int(state.step), result | {"gzip_bits_per_byte": gzip})
        figure = f"Held-out text: [bold green]{result['val_bits_per_byte']:.3f}[/] bits per byte"
        held_out = count_of(self.corpus.files[1], self.corpus.unit)
        beside = f"; gzip: {gzip:.3f} ({held_out}, each compressed by itself)" if self.corpus.predicts_texts else ""
        self.console.print(f"{figure}{beside}.")
        if self.stop.agreed():
            self.interrupt(int(state.step))

    def validate(self, state: TrainState, limit: int = 0) -> dict[str, float]:
        """Return the metrics of `limit` batches of held-out text (0 for all batches), or {} if interrupted."""
        what = self.config.batch, self.config.length, limit
        losses, weights, count = [], [], self.corpus.validation_count(*what)
        with Progress(self.console, "Compiling the validation") as progress:
            for number, batch in enumerate(self.corpus.validation_batches(*what, *self.program.part), 1):
                if self.stop.agreed():
                    return {}
                placed = self.program.place(batch)
                if self.evaluate is None:
                    self.evaluate = self.program.evaluate
                    if hasattr(self.evaluate, "lower"):
                        self.evaluate = answering(self.evaluate.lower(state.params, placed).compile)
                    processes.meet("the validation")
                losses.append(float(self.evaluate(state.params, placed)))
                # All batches have the same number of tokens, but not of predicted tokens.
                weights.append(int(_predicted(placed)) if self.corpus.weighed else 1)
                progress.say(f"Validating: batch {number} of {count}")
        # A batch without a predicted token has no loss, so its weight is 0.
        mean = float(np.average(losses, weights=weights)) if any(weights) else math.nan
        return {"val_bits_per_byte": mean / self._nats_per_token}

    def interrupt(self, step: int) -> NoReturn:
        """Stop the run once the checkpoint of this step is complete."""
        self._wait()
        raise Interrupted(step, self.out, self.stop.number or signal.SIGINT, agreed=True)

    def _wait(self) -> None:
        with Progress(self.console, "Writing the checkpoint"):
            self.checkpoints.wait()

    def _compile(self, state: TrainState, batch: jax.Array) -> Callable:
        began = time.perf_counter()
        with Progress(self.console, "Tracing the training step") as progress:
            lowered = self.program.step.lower(state, batch, self.program.key)
            progress.begin("Compiling the training step")
            step = answering(lowered.compile)
            compiled = time.perf_counter() - began
            progress.begin("Waiting for the other processes to compile it")
            # Processes compile at different speeds, and the first step opens connections that wait for 30 s only.
            processes.meet("the first step")
        self.console.print(f"Compiled the training step in {duration(compiled)}.")
        if self.program.gradients is not None:
            self.console.print(memory.table(state, self.program.gradients, step))
        return step

    def _row(self, figures: dict[str, Any]) -> dict[str, Any]:
        row = {name: value.item() if np.ndim(value) == 0 else value for name, value in figures.items()}
        return row | {"bits_per_byte": row.get("cross_entropy", row["loss"]) / self._nats_per_token}

    @property
    def _nats_per_token(self) -> float:
        """Nats per token that correspond to one bit per byte; a loss divided by this number is in bits per byte."""
        return math.log(2) * self.corpus.bytes_per_prediction(self.config.length)


@jax.jit
def _predicted(batch: jax.Array | Mapping[str, jax.Array]) -> jax.Array:
    """Return the number of predicted tokens in a batch.

    All tokens are predicted except those below 0, the first token of each row or segment, and padding.
    """
    if not isinstance(batch, Mapping):
        return jnp.sum(batch[:, 1:] >= 0)
    tokens, segments = batch["tokens"], batch["segments"]
    within = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return jnp.sum((tokens[:, 1:] >= 0) & within)


@jax.jit
def _fill(batch: Mapping[str, jax.Array]) -> jax.Array:
    """Return the fraction of a batch's positions that are not padding."""
    sides = [batch[name] for name in ("segments", "source_segments") if name in batch]
    filled = jnp.stack([jnp.sum(side > 0) for side in sides])
    return jnp.sum(filled) / sum(side.size for side in sides)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
