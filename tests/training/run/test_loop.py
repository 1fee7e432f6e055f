"""The loop: figures of every step, a stop that saves, and a resumed run that equals an unbroken one."""

import dataclasses
import io
import json
import math
import os
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from gspmd.training import Interrupted, fit, processes
from gspmd.training.checkpoints import newest
from gspmd.training.config import TrainingConfig
from gspmd.training.reporting import metrics
from gspmd.training.toml import ConfigError
from tests.training.conftest import bigram_loss

CONFIG = TrainingConfig(steps=20, batch=4, length=16, validation_every=8, validation_batches=2, save_every=6)


@pytest.fixture
def console():
    return Console(quiet=True)


def replace(config, **changes):
    return type(config)(**{**vars(config), **changes})


def test_every_step_has_its_figures(make_program, corpus, console, tmp_path):
    state = fit(CONFIG, make_program()[0], corpus, tmp_path, console)
    assert int(state.step) == 20
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, 21), 20]
    names = ["loss", "aux_loss", "bits_per_byte", "tokens_per_second", "learning_rate", "gradient_norm", "dropped"]
    assert all({*names, "load"} <= set(row) for row in rows[:-1])
    assert rows[0]["bits_per_byte"] == pytest.approx(3.0, rel=1e-5)
    assert rows[0]["loss"] == pytest.approx(math.log(8) + 0.1, rel=1e-5)
    assert rows[19]["bits_per_byte"] < 2
    assert rows[0]["load"] == [[0.25, 0.75], [0.5, 0.5]]
    assert set(rows[-1]) == {"step", "val_bits_per_byte", "gzip_bits_per_byte"}
    assert [row["step"] for row in rows if "val_bits_per_byte" in row] == [8, 16, 20]
    assert list((tmp_path / "events").iterdir())
    assert newest(tmp_path) == 20


def test_bits_per_byte_are_those_of_tokens_over_the_bytes_of_a_token(make_program, corpus, console, tmp_path):
    program, _ = make_program(steps=2)
    corpus = replace(corpus, bytes_per_token=2.5)
    config = replace(CONFIG, steps=2, final_validation_batches=0)
    state = fit(config, program, corpus, tmp_path, console)
    rows = metrics.read(tmp_path)
    for row in rows[:-1]:
        assert row["bits_per_byte"] * 2.5 == pytest.approx(row["cross_entropy"] / math.log(2), rel=1e-6)
    nats = [float(program.evaluate(state.params, program.place(each))) for each in corpus.validation_batches(4, 16)]
    assert rows[-1]["val_bits_per_byte"] * 2.5 == pytest.approx(np.mean(nats) / math.log(2), rel=1e-6)


def test_resumed_run_equals_an_unbroken_one(make_program, corpus, console, tmp_path):
    fit(CONFIG, make_program()[0], corpus, tmp_path / mkdir(tmp_path, "whole"), console)
    broken = tmp_path / mkdir(tmp_path, "broken")

    program, placed = make_program()[0], []

    def place(tokens):
        """Raises the signal of Ctrl-C when the batch after the ninth is placed; two were held-out ones."""
        placed.append(program.place(tokens))
        if len(placed) == 10 + CONFIG.validation_batches:
            signal.raise_signal(signal.SIGINT)
        return placed[-1]

    with pytest.raises(Interrupted) as stop:
        fit(CONFIG, dataclasses.replace(program, place=place), corpus, broken, console)
    assert stop.value.step == 9
    assert newest(broken) == 9
    fit(replace(CONFIG, resume=True), make_program({"x": 4, "y": 2})[0], corpus, broken, console)
    one, two = ([row for row in metrics.read(tmp_path / name) if "loss" in row] for name in ("whole", "broken"))
    assert [row["step"] for row in two] == list(range(1, 21))
    np.testing.assert_allclose([row["loss"] for row in two], [row["loss"] for row in one], rtol=1e-5)


class Stopped:
    """A program's validation that someone interrupts at its first batch."""

    def __init__(self, evaluate):
        self.evaluate = evaluate

    def __call__(self, params, batch):
        signal.raise_signal(signal.SIGINT)
        return self.evaluate(params, batch)


@pytest.mark.parametrize(("every", "step"), [(8, 8), (0, 20)])
def test_a_validation_cut_short_leaves_no_figure(make_program, corpus, console, tmp_path, every, step):
    program = make_program()[0]
    stopping = dataclasses.replace(program, evaluate=Stopped(program.evaluate))
    config = replace(CONFIG, validation_every=every)
    with pytest.raises(Interrupted) as stop:
        fit(config, stopping, corpus, tmp_path, console)
    assert (stop.value.step, stop.value.out) == (step, tmp_path)
    assert newest(tmp_path) == step
    rows = metrics.read(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, step + 1))
    assert not any("val_bits_per_byte" in row for row in rows)
    fit(replace(config, resume=True), make_program()[0], corpus, tmp_path, console)
    assert "val_bits_per_byte" in metrics.read(tmp_path)[-1]


def test_the_last_validation_has_a_limit_and_says_so(make_program, corpus, tmp_path):
    program, read, console = make_program()[0], [], Console(file=io.StringIO(), width=120)

    def counting(params, batch):
        read.append(batch.shape)
        return program.evaluate(params, batch)

    config = replace(CONFIG, steps=1, final_validation_batches=3)
    fit(config, dataclasses.replace(program, evaluate=counting), corpus, tmp_path, console)
    assert read == [(4, 17)] * 3
    assert "Validating on 3 of the 32 batches of held-out text." in console.file.getvalue()


def test_a_resume_refuses_other_batches(make_program, corpus, console, tmp_path):
    fit(replace(CONFIG, steps=2), make_program()[0], corpus, tmp_path, console)
    before = (tmp_path / "metrics.jsonl").read_text()
    other = dataclasses.replace(corpus, train=corpus.train[1:])
    with pytest.raises(ConfigError) as error:
        fit(replace(CONFIG, resume=True, seed=5), make_program()[0], other, tmp_path, console)
    assert "the text differs" in str(error.value)
    assert "seed was 0, but is 5." in str(error.value)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def _without(*steps):
    return lambda lines: [line for number, line in enumerate(lines, 1) if number not in steps]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda lines: lines, ""),
        (lambda lines: [*lines, '{"step": 7, "lo'], ""),  # of a step that was not saved
        (_without(4, 5, 6), "has no figures of steps 4 to 6: they are lost, and the run goes on without them."),
        (_without(6), "has no figures of step 6: they are lost"),
        (_without(2, 5), "has no figures for 2 steps in steps 2 to 5: they are lost"),
        (lambda lines: [*lines[:5], lines[5][:40]], "has no figures of step 6: they are lost"),
        (lambda lines: [], "has no figures of steps 1 to 6: they are lost"),
        (None, "has no figures of steps 1 to 6: they are lost"),
        (
            lambda lines: [lines[0].replace('"loss": 2', '"loss": 3'), *lines[1:]],
            "up to step 6 it does not have the figures",
        ),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "up to step 6 it does not have the figures that were written"),
    ],
    ids=["none", "killed", "truncated", "last", "two", "cut", "empty", "gone", "flipped", "swapped"],
)
def test_figures_that_are_lost_are_told_and_once(make_program, corpus, tmp_path, damage, said):
    fit(replace(CONFIG, steps=6), make_program()[0], corpus, tmp_path, Console(quiet=True))
    path, shown = tmp_path / "metrics.jsonl", io.StringIO()
    lines = path.read_text().splitlines()[:6]  # without the last validation
    path.unlink() if damage is None else path.write_text("\n".join(damage(lines)))
    again = replace(CONFIG, steps=7, save_every=1, resume=True)
    fit(again, make_program()[0], corpus, tmp_path, Console(file=shown, width=500))
    assert said in shown.getvalue()
    assert ("metrics.jsonl' " in shown.getvalue()) == bool(said)
    shown = io.StringIO()
    fit(replace(again, steps=8), make_program()[0], corpus, tmp_path, Console(file=shown, width=500))
    assert "metrics.jsonl' " not in shown.getvalue()


def test_a_damaged_line_is_told_before_the_model_is_built(make_program, corpus, console, tmp_path):
    fit(replace(CONFIG, steps=2), make_program()[0], corpus, tmp_path, console)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('{"step": 1', '"step": 1', 1))
    with pytest.raises(ConfigError, match="line 1 is not a JSON object with a step"):
        fit(replace(CONFIG, resume=True), {0: lambda: pytest.fail("it was built")}, corpus, tmp_path, console)


def test_figures_after_the_checkpoint_are_dropped_on_resume(make_program, corpus, console, tmp_path):
    fit(replace(CONFIG, steps=6), make_program()[0], corpus, tmp_path, console)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0}\n{"step": 8, "lo')
    fit(replace(CONFIG, resume=True), make_program()[0], corpus, tmp_path, console)
    assert [row["step"] for row in metrics.read(tmp_path)] == [*range(1, 7), 6, *range(7, 21), 20]


@pytest.mark.parametrize(("steps", "said"), [
    (4, "All 4 steps are done; --steps 8 would train on."),
    (3, "The run is at step 4, past --steps 3: it trains no further; --steps 8 would train on."),
])  # fmt: skip
def test_a_resume_that_has_no_steps_left_says_so(make_program, corpus, console, tmp_path, steps, said):
    fit(replace(CONFIG, steps=4), make_program()[0], corpus, tmp_path, console)
    shown = Console(file=io.StringIO(), width=200)
    state = fit(replace(CONFIG, steps=steps, resume=True), make_program()[0], corpus, tmp_path, shown)
    assert said in shown.file.getvalue()
    assert int(state.step) == 4


def test_resume_of_a_finished_run_validates_again(make_program, corpus, console, tmp_path):
    fit(CONFIG, make_program()[0], corpus, tmp_path, console)
    before = metrics.read(tmp_path)
    again, program = replace(CONFIG, resume=True), make_program()[0]

    def interrupting(params, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        return program.evaluate(params, batch)

    with pytest.raises(Interrupted):
        fit(again, dataclasses.replace(program, evaluate=interrupting), corpus, tmp_path, console)
    assert metrics.read(tmp_path) == before
    fit(replace(again, final_validation_batches=2), program, corpus, tmp_path, console)
    assert metrics.read(tmp_path)[:20] == before[:20]
    assert metrics.read(tmp_path)[20]["val_bits_per_byte"] != before[20]["val_bits_per_byte"]
    assert len(metrics.read(tmp_path)) == 21


def test_the_validation_at_the_end_stays_when_a_run_goes_on(make_program, corpus, console, tmp_path):
    """With its step, between the updates: a curve of `val_bits_per_byte` over `step` keeps its points, in order."""
    fit(replace(CONFIG, steps=6), make_program()[0], corpus, tmp_path, console)
    path = tmp_path / "metrics.jsonl"
    path.write_text(re.sub('"val_bits_per_byte": [0-9.]+', '"val_bits_per_byte": 0.5', path.read_text()))
    before = metrics.read(tmp_path)
    shown, again = io.StringIO(), replace(CONFIG, steps=10, save_every=2, resume=True)
    fit(again, make_program()[0], corpus, tmp_path, Console(file=shown, width=500))
    rows = metrics.read(tmp_path)
    assert rows[:7] == before
    scored = [row["step"] for row in rows if "loss" not in row]
    assert ([row["step"] for row in rows], scored) == ([*range(1, 7), 6, *range(7, 11), 10], [6, 10])
    # What a checkpoint of the second start says of the figures is of both.
    fit(replace(again, steps=12), make_program()[0], corpus, tmp_path, Console(file=shown, width=500))
    assert "metrics.jsonl' " not in shown.getvalue()
    # The score of step 8 is held against others between updates, and that of the end is none of them.
    assert "bits per byte, the best so far" in shown.getvalue()
    # The figures of steps that are done again are not kept.
    fit(replace(again, steps=12, resume_step=10), make_program()[0], corpus, tmp_path, console)
    assert [row["step"] for row in metrics.read(tmp_path) if "loss" not in row] == [6, 10, 12]


def dead_expert_loss(params, tokens, key):
    """`bigram_loss`, but from step 9 on no token goes to the second expert of the first layer."""
    loss, figures = bigram_loss(params, tokens, key)
    late = jnp.linalg.norm(params["table"]) > 1.0
    return loss, figures | {"load": jnp.where(late, jnp.array([[1.0, 0.0], [0.5, 0.5]]), figures["load"])}


def test_what_happens_is_said_as_it_happens(make_program, corpus, tmp_path):
    console, closed = Console(file=io.StringIO(), width=120), []
    program = make_program(loss=dead_expert_loss)[0]
    gradients = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
                             program.state.params)  # fmt: skip
    program = dataclasses.replace(program, gradients=gradients, flops=1e6, peak=1e9)
    config = replace(CONFIG, steps=32, profile="3:4")

    def last(state, metrics):
        metrics.text(int(state.step), "sample", "some text")
        closed.append(int(state.step))

    fit(config, program, corpus, tmp_path, console, {"steps": 32}, last)
    said = console.file.getvalue().splitlines()
    scores = [line for line in said if line.startswith("step ") and "held-out text " in line]
    assert [line.split(":")[0] for line in scores] == ["step 8", "step 16", "step 24"]
    rows = metrics.read(tmp_path)
    best = math.inf
    for line in scores:
        score = rows[int(line.split()[1].rstrip(":")) - 1]["val_bits_per_byte"]
        assert f"held-out text {score:.3f} bits per byte, " in line
        assert line.endswith("the best so far" if score < best else f"the best is {best:.3f}")
        best = min(best, score)
    saved = [line for line in said if "checkpoint saved in" in line]
    assert [line.split(":")[0] for line in saved] == [f"step {step}" for step in (6, 12, 18, 24, 30, 32)]
    dead = [line for line in said if "expert layer" in line]
    assert len(dead) == 1
    assert re.match(r"step \d+: expert layer 1: expert 1 has had no token in steps \d+ to \d+$", dead[0])
    assert "step 4: profile written to " + str(tmp_path / "profile") in said
    assert len([*tmp_path.glob("profile/plugins/profile/*/*.xplane.pb")]) == 1
    held = {cells[1]: cells[-2] for line in said if len(cells := [cell.strip() for cell in line.split("│")]) > 2}
    # [8, 8] in halves and [8]; the two moments of both, and two counts
    assert (held["parameters"], held["gradients"], held["optimizer state"]) == ("160 B", "160 B", "328 B")
    for row in rows[:-1]:
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] / 64 * 1e6 / 1e9, rel=1e-6)
    assert re.search(
        r"step 1/32  loss 2\.\d+  3\.000 bits/byte  [\d,]+ tokens/s  \d+\.\d% MFU  .* left", "\n".join(said)
    )
    assert closed == [32]


@pytest.mark.parametrize(
    ("steps", "rest", "traces"),
    [("2:6", "nothing is profiled", 0), ("6:7", "the profile begins with step 7", 1)],
)
def test_a_profile_of_steps_that_are_done_is_no_reason_not_to_resume(
    make_program, corpus, tmp_path, steps, rest, traces
):
    """The flags that began a run resume it."""
    fit(replace(CONFIG, steps=6), make_program()[0], corpus, tmp_path, Console(quiet=True))
    said = io.StringIO()
    again = Console(file=said, width=200)
    fit(replace(CONFIG, steps=8, resume=True, profile=steps), make_program()[0], corpus, tmp_path, again)
    assert f"profile is '{steps}', but step 6 is done: {rest}.\n" in said.getvalue()
    assert len([*tmp_path.glob("profile/plugins/profile/*/*.xplane.pb")]) == traces


def test_a_signal_in_the_last_batch_of_validation_stops_the_run_with_its_figure(
    make_program, corpus, console, tmp_path
):
    """Pictures and a sample, which has to be compiled, are not begun."""
    program, config = make_program()[0], replace(CONFIG, steps=2, validation_every=0, final_validation_batches=1)
    stopping, called = dataclasses.replace(program, evaluate=Stopped(program.evaluate)), []
    with pytest.raises(Interrupted) as stop:
        fit(config, stopping, corpus, tmp_path, console, last=lambda *_: called.append(1))
    assert (stop.value.step, called) == (2, [])
    assert "val_bits_per_byte" in metrics.read(tmp_path)[-1]


def test_handlers_are_put_back(make_program, corpus, console, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    fit(replace(CONFIG, steps=1), make_program()[0], corpus, tmp_path, console)
    assert signal.getsignal(signal.SIGINT) is before


def mkdir(path, name):
    (path / name).mkdir()
    return name


class Watched:
    """A jitted function whose compilations and runs are written down."""

    def __init__(self, name, function, told):
        self._name, self._function, self._told = name, function, told

    def lower(self, *given):
        self._function = self._function.lower(*given)
        return self

    def compile(self):
        self._function = self._function.compile()
        self._told.append(f"{self._name} is compiled")
        return self

    def __call__(self, *given):
        self._told.append(f"{self._name} runs")
        return self._function(*given)


def test_processes_meet_between_compiling_a_program_and_its_first_run(
    make_program, corpus, console, tmp_path, monkeypatch
):
    told = []
    monkeypatch.setattr(processes, "meet", lambda before: told.append(f"all meet before {before}"))
    program, _ = make_program(steps=3)
    step, evaluate = Watched("step", program.step, told), Watched("evaluation", program.evaluate, told)
    config = replace(CONFIG, steps=3, validation_every=2)
    fit(config, dataclasses.replace(program, step=step, evaluate=evaluate), corpus, tmp_path, console)
    runs = ["all meet before training", "step is compiled", "all meet before the first step", "step runs"]
    runs += ["step runs", "evaluation is compiled", "all meet before the validation", "evaluation runs"]
    assert told[: len(runs)] == runs
    assert set(told[len(runs) :]) == {"step runs", "evaluation runs"}


@pytest.mark.parametrize(("every", "steps"), [(10, [1, 10, 20, 25]), (7, [1, 7, 14, 21, 25])])
def test_the_loss_is_told_every_few_steps(make_program, corpus, tmp_path, every, steps):
    out = io.StringIO()
    config = replace(CONFIG, steps=25, log_every=every, validation_every=0, save_every=0)
    fit(config, make_program(steps=25)[0], corpus, tmp_path, Console(file=out, width=120))
    said = re.findall(r"^step (\d+)/25  loss \d\.\d+  .* bits/byte  [\d,]+ tokens/s", out.getvalue(), re.MULTILINE)
    assert [*map(int, said)] == steps


def test_a_terminal_keeps_a_line_every_few_steps_above_its_bar(make_program, corpus, tmp_path):
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    config = replace(CONFIG, steps=25, validation_every=0, save_every=0)
    fit(config, make_program(steps=25)[0], corpus, tmp_path, console)
    assert re.findall(r"step (\d+)/25  loss \d\.\d+  .* tokens/s *\n", out.getvalue()) == ["10", "20"]


def test_a_trial_of_a_few_steps_ends_with_a_short_validation_and_no_sample():
    short, long = (TrainingConfig(steps=steps) for steps in (49, 50))
    assert (short.last_validation, short.sampled) == (16, 0)
    assert (long.last_validation, long.sampled) == (500, 256)
    given = TrainingConfig(steps=3, final_validation_batches=0, sample_bytes=9)
    assert (given.last_validation, given.sampled) == (0, 9)
