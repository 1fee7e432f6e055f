"""The trace of a timeline has the structure that viewers of Chrome traces expect."""

import json

import pytest

from gspmd.audit import hlo, perfetto, timeline
from tests.audit.simulation.drawn import drawn


@pytest.fixture(scope="module")
def found():
    return drawn()


@pytest.fixture(scope="module")
def written(found, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    perfetto.write(found, path)
    return json.loads(path.read_text())


def events(written, name=None):
    drawn = [event for event in written["traceEvents"] if event["ph"] == "X"]
    return drawn if name is None else [event for event in drawn if event["name"] == name]


def threads(written):
    named = (event for event in written["traceEvents"] if event["name"] == "thread_name")
    return {event["tid"]: event["args"]["name"] for event in named}


def test_one_process_and_a_row_for_computing_each_mesh_axis_and_memory(written):
    assert {event["pid"] for event in written["traceEvents"]} == {0}
    process = [event["args"]["name"] for event in written["traceEvents"] if event["name"] == "process_name"]
    assert process == ["jit_ring on tpu-v4"]
    rows = [threads(written)[tid] for tid in sorted(threads(written))]
    assert rows == ["compute", "mesh axis x", "mesh axis x (2)", "mesh axis y", "memory"]


def test_every_event_is_complete_and_on_a_named_row(written):
    for event in events(written):
        assert set(event) == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
        assert event["tid"] in threads(written)
        assert event["ts"] >= 0
        assert event["dur"] > 0


def test_slices_of_a_row_nest_or_follow_one_another(written):
    for thread in threads(written):
        open_ends = []
        for event in (event for event in events(written) if event["tid"] == thread):
            while open_ends and open_ends[-1] <= event["ts"] + 1e-6:
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1] + 1e-6
            open_ends.append(end)


def test_a_step_of_a_plan_has_its_name_and_everything_known_of_it(written):
    (event,) = events(written, "step1.einsum")
    assert (event["cat"], event["dur"]) == ("other", 1)
    assert event["args"] == {
        "times": 118,
        "total_us": 118,
        "equation": "BLE_x -> BLE",
        "source": "model.py:7",
        "instruction": "m",
        "cycles": 1050,
        "bytes": 180_000,
    }


def test_a_loop_encloses_its_first_iteration_and_says_how_many_there_are(written):
    (loop,) = events(written, "w × 118")
    (inside,) = events(written, "step1.einsum")
    assert loop["tid"] == inside["tid"]
    assert loop["ts"] <= inside["ts"] <= inside["ts"] + inside["dur"] <= loop["ts"] + loop["dur"]
    # two permutes of 2 µs on one link, and a hop
    assert (loop["dur"], loop["args"]["times"], loop["args"]["total_us"]) == (5, 118, 590)


def test_a_collective_stands_on_each_of_its_axes(written):
    gathers = events(written, "step1.all-gather.x.y")
    assert [threads(written)[event["tid"]] for event in gathers] == ["mesh axis x", "mesh axis y"]
    assert gathers[0]["args"]["axes"] == ["x", "y"]
    assert gathers[0]["args"]["bytes"] == 630_000
    assert gathers[0]["args"]["exposed_us"] == gathers[0]["dur"]


def test_the_totals_are_those_of_the_step(found, written):
    totals = written["otherData"]
    assert (totals["chip"], totals["mesh"]) == ("tpu-v4", "x=4 y=2")
    assert totals["step_seconds"] == found.step_seconds > 118 * 5e-6
    assert totals["exposed_seconds"] + totals["compute_seconds"] == pytest.approx(totals["step_seconds"])


def test_any_number_of_transfers_at_once_have_rows_of_their_own():
    pairs, kind = "source_target_pairs={{0,2},{2,4},{4,6},{6,0}}", "(u8[900]{0}, u8[900]{0})"
    begun = [f"  %s{n} = {kind} collective-permute-start(%p), {pairs}" for n in range(70)]
    ended = [f"  %d{n} = u8[900]{{0}} collective-permute-done(%s{n})" for n in range(70)]
    gather = "  %g = u8[1800]{0} all-gather(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}"
    body = "\n".join(["  %p = u8[900]{0} parameter(0)", *begun, *ended, gather])
    module = hlo.parse(f"HloModule m, is_scheduled=true\n\nENTRY %main (p: u8[900]) -> u8[1800] {{\n{body}\n}}\n")
    named = [
        (event["tid"], event["args"]["name"])
        for event in perfetto.trace(timeline(module, "tpu-v4", {"x": 4, "y": 2}))["traceEvents"]
        if event["name"] == "thread_name"
    ]
    assert len(named) == len(dict(named)) == 71
    assert [named[0][1], named[69][1], named[70][1]] == ["mesh axis x", "mesh axis x (70)", "mesh axis y"]
