"""The tables of schedules: who computes what when, what waiting costs, and what is held meanwhile."""

import pytest

from gspmd.annotate import PlanError
from gspmd.pipeline import Schedule, Work

SHAPES = [(s, m, 1) for s in range(1, 6) for m in range(1, 8)]
SHAPES += [(s, m * s, r) for s in range(1, 5) for m in range(1, 4) for r in (2, 3)]
NAMES = ("gpipe", "1f1b", "zero-bubble")


def ticks_of(schedule, kind):
    """Chunk and microbatch to the tick in which the stage of the chunk computes it."""
    found = {}
    for number, tick in enumerate(schedule.ticks):
        for stage, work in enumerate(tick.get(kind, ())):
            if work:
                key = work.round * schedule.stages + stage, work.microbatch
                assert key not in found, "computed twice"
                found[key] = number
    return found


@pytest.mark.parametrize("name", NAMES[:2])
def test_the_bubble_is_that_of_the_formula(name):
    """The formulas are those of Huang et al. 2019, §2.3, and with rounds of Narayanan et al. 2021, §2.2."""
    for stages, microbatches, rounds in SHAPES:
        wanted = (stages - 1) / (rounds * microbatches + stages - 1)
        assert Schedule.of(name, stages, microbatches, rounds).bubble == pytest.approx(wanted)


def test_in_zero_bubble_no_stage_waits_for_gradients_of_weights():
    for stages, microbatches, rounds in SHAPES:
        schedule, trips = Schedule.of("zero-bubble", stages, microbatches, rounds), microbatches * rounds
        assert schedule.bubble == pytest.approx(2 * (stages - 1) / (3 * trips + 2 * (stages - 1)))
        slots = [tick["weights"] for tick in schedule.ticks if "weights" in tick]
        assert len(slots) == trips
        assert None not in {work for slot in slots for work in slot}
        weights, backward = ticks_of(schedule, "weights"), ticks_of(schedule, "backward")
        assert all(weights[key] >= backward[key] for key in backward)
        assert weights.keys() == backward.keys()
        assert max(schedule.residuals.values()) + 1 == min(stages, trips)


@pytest.mark.parametrize("name", [*NAMES, "forward"])
def test_what_a_stage_takes_was_sent_in_the_tick_before(name):
    """All that the executor rests on: a stage keeps what has arrived for one tick only."""
    for stages, microbatches, rounds in SHAPES:
        schedule = Schedule.of(name, stages, microbatches, rounds)
        chunks, every = range(stages * rounds), range(microbatches)
        forward, backward = ticks_of(schedule, "forward"), ticks_of(schedule, "backward")
        assert set(forward) == {(chunk, m) for chunk in chunks for m in every}
        assert set(backward) == (set() if name == "forward" else set(forward))
        for chunk, m in forward:
            assert chunk == 0 or forward[chunk, m] == forward[chunk - 1, m] + 1
            assert not backward or chunk == chunks[-1] or backward[chunk, m] == backward[chunk + 1, m] + 1
        for m in every if backward else ():  # within a tick, forward passes come first
            assert backward[chunks[-1], m] >= forward[chunks[-1], m]


@pytest.mark.parametrize("name", NAMES)
def test_an_input_is_kept_until_its_backward_pass(name):
    for stages, microbatches, rounds in SHAPES:
        schedule = Schedule.of(name, stages, microbatches, rounds)
        for stage in range(stages):
            memory = {}
            for number, tick in enumerate(schedule.ticks):
                if work := tick.get("forward", {stage: None})[stage]:
                    memory[schedule.inputs["forward", number, stage]] = work
                if work := tick.get("backward", {stage: None})[stage]:
                    assert memory[schedule.inputs["backward", number, stage]] == work


def test_1f1b_holds_as_many_microbatches_as_there_are_stages_and_gpipe_all():
    for stages, microbatches, _ in SHAPES[: 5 * 7]:
        assert Schedule.of("gpipe", stages, microbatches).in_flight == microbatches
        for name in ("1f1b", "zero-bubble"):
            assert Schedule.of(name, stages, microbatches).in_flight == min(microbatches, 2 * stages - 1)


def test_a_schedule_shows_itself():
    assert str(Schedule.of("1f1b", 2, 2, 2)) == (
        "1f1b of 2 microbatches 2 times through 2 stages, bubble 20%\n"
        "stage 0 │ F0a │ F1a │ F0b │ F1b .   │ .   B0b │ B1b │ B0a │ B1a\n"
        "stage 1 │ .   │ F0a │ F1a │ F0b B0b │ F1b B1b │ B0a │ B1a │ ."
    )


def test_the_picture_has_a_bar_for_every_slot(tmp_path):
    schedule = Schedule.of("1f1b", 2, 3)
    bars = schedule.figure().axes[0].patches
    slots = [slot for tick in schedule.ticks for slot in tick.values()]
    assert len(bars) == 2 * len(slots)
    schedule.save(tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1b1f", 2, 2), "no schedule is called '1b1f'.\n  Schedules: gpipe, 1f1b, zero-bubble."),
        (("gpipe", 2, 0), "a pipeline of 0 microbatches has no schedule.\n  Give 1 or more."),
        (
            ("1f1b", 4, 6, 2),
            "6 microbatches cannot go 2 times round 4 stages: they go in groups of 4.\n"
            "  Give a multiple of 4 microbatches, or one round.",
        ),
    ],
)
def test_what_has_no_schedule(arguments, message):
    with pytest.raises(PlanError) as error:
        Schedule.of(*arguments)
    assert str(error.value) == message


def test_equal_schedules_are_one():
    one, same = Schedule.of("1f1b", 2, 4), Schedule.of("1f1b", 2, 4)
    assert one == same
    assert hash(one) == hash(same)
    assert one.ticks[1]["forward"] == (Work(1, 0), Work(0, 0))
