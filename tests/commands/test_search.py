"""`gspmd search`: what it prints and writes, its exit codes, and one message for bad input."""

import gc
import importlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from gspmd.annotate import Spec
from gspmd.commands import generate_settings, runner
from gspmd.commands import settings as train_settings
from gspmd.commands.arguments import without
from gspmd.commands.search import settings as search_settings
from gspmd.commands.search import written
from gspmd.commands.search.slice import Slice
from gspmd.hardware.chips import CHIPS
from gspmd.interruption import HungUp, Terminated
from gspmd.layouts import Layout, presets
from gspmd.moe import MoEConfig
from gspmd.search import Search
from gspmd.search.answers import Candidate, SearchResult, Space, errors
from gspmd.search.answers.errors import expected_error
from gspmd.search.answers.frontier import frontier
from gspmd.search.answers.options import Options
from gspmd.search.answers.presets import Placed, placed_presets
from gspmd_models import ModelConfig
from gspmd_models.parameters import parameters
from gspmd_models.search.phases import problem_of
from gspmd_models.search.workload import Workload

ROOT = Path(__file__).parents[2]
MODEL = """
[model]
vocabulary = 64
embed = 32
layers = 2
heads = 8
kv_heads = 4
head_size = 8
feed_forward = 64
tied = false
"""
WIDE = (
    MODEL.replace("= 32", "= 1024")
    .replace("feed_forward = 64", "feed_forward = 4096")
    .replace("size = 8", "size = 128")
)
SIZES = {"B": 8, "L": 16, "E": 32, "F": 64, "H": 8, "K": 4, "D": 8, "V": 64, "N": 2, "T": 16}
needs_libtpu = pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("gspmd.commands.search.command")


@pytest.fixture
def run(script, capfd, monkeypatch, tmp_path):
    """A function of flags that returns the exit code, stdout, and stderr without box drawing and line breaks."""
    config = tmp_path / "tiny.toml"
    config.write_text(MODEL)
    # Presets outside of the space are traced on devices of a slice, which only the compiler knows.
    monkeypatch.setattr(script.compiling, "traced", lambda settings, presets: presets)
    flags_of_all = ["--config", str(config), "--topology", "tpu-v5p:2x2x1", "--batch", "8", "--length", "16"]

    def call(*flags):
        try:
            code = runner.guarded(script.main, [*flags_of_all, *flags])
        except SystemExit as stop:
            code = stop.code
        out, err = capfd.readouterr()
        return code, out, " ".join(re.sub("[│╭╮╰╯─]", " ", err).split())

    return call


def test_a_layout_is_written_with_its_reasons(run, tmp_path):
    files = {name: tmp_path / f"found.{suffix}" for name, suffix in
             {"out": "toml", "json": "json", "frontier": "png"}.items()}  # fmt: skip
    flags = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    code, out, _ = run(*flags, "--why", "ffn.w_in=EF_x", "--mesh", "x=4")
    assert code == 0
    text, figures = files["out"].read_text(), json.loads(files["json"].read_text())
    Layout.load(files["out"]).check(SIZES, {"x": 4})
    assert "# mesh       x=4: 4 devices" in text
    proof = (
        "this mesh, with 5 choices of remat, is more than 0.05% faster by the plan; "
        "in 2 to 8 microbatches, none is more than 2.00% faster"
    )
    assert f"# proved     no layout on {proof}" in text
    assert "; next " in text
    assert files["frontier"].read_bytes().startswith(b"\x89PNG")
    assert "ffn.w_in = EF_x: " in out
    assert "Planned, not compiled: --compile 3 asks the compiler." in " ".join(out.split())
    assert figures["complete"] is True
    assert figures["bound"] == figures["seconds"] == pytest.approx(sum(figures["terms"].values()))
    assert figures["why"][0]["lines"]["ffn.w_in"] == "EF_x"
    assert figures["why"][0]["seconds"] >= figures["seconds"]
    priced = {each["name"]: each["seconds"] for each in figures["presets"] if each["seconds"]}
    assert priced
    assert all(seconds >= figures["seconds"] for seconds in priced.values())
    assert all(name in out for name in priced)


def test_hash_seeds_change_no_figure_nor_their_order(tmp_path):
    config, found = tmp_path / "tiny.toml", [tmp_path / f"{seed}.json" for seed in (1, 2)]
    config.write_text(MODEL)
    flags = ["--config", str(config), "--topology", "tpu-v5p:2x2x1", "--mesh", "x=2,y=2", "--remat", "full"]
    flags += ["--batch", "8", "--length", "16", "--microbatches", "1"]
    for seed, path in enumerate(found, 1):
        command = [sys.executable, "-m", "gspmd", "search", *flags, "--json", str(path)]
        env = {**os.environ, "PYTHONHASHSEED": str(seed)}
        subprocess.run(command, env=env, capture_output=True, check=True)
    first, second = (path.read_text() for path in found)
    assert first == second


def test_a_layout_of_one_s_own_is_priced_beside_the_presets(run, tmp_path):
    """A copy of a preset costs what the preset does, and a layout that was found costs what the search found."""
    found, copied, odd = (tmp_path / f"{name}.toml" for name in ("found", "copied", "odd"))
    where = ["--mesh", "x=4", "--phase", "decode"]
    assert run(*where, "--out", str(found))[0] == 0
    copied.write_text('base = "megatron-1d"\n')
    odd.write_text('base = "megatron-1d"\n[ffn]\nhidden = "BL_xF_yz"\n')
    figures = tmp_path / "figures.json"
    beside = [part for path in (found, copied, odd) for part in ("--beside", str(path))]
    code, out, _ = run(*where, *beside, "--out", str(found), "--json", str(figures))
    assert code == 0
    figures = json.loads(figures.read_text())
    assert {each["name"] for each in figures["beside"]} == {str(found), str(copied), str(odd)}
    assert {each["name"] for each in figures["presets"]} == {*presets()}
    seconds = {each["name"]: each["seconds"] for each in (*figures["presets"], *figures["beside"])}
    assert seconds[str(copied)] == seconds["megatron-1d"] >= figures["seconds"]
    assert seconds[str(found)] == pytest.approx(figures["seconds"])
    assert seconds[str(odd)] > seconds["megatron-1d"]
    assert str(odd) in out


def test_beside_changes_no_letter_of_the_file(run, tmp_path):
    mine, out, texts = tmp_path / "mine.toml", tmp_path / "found.toml", set()
    mine.write_text('base = "megatron-1d"\n')
    for beside in ([], ["--beside", str(mine)]):
        assert run("--mesh", "x=4", "--phase", "decode", *beside, "--out", str(out))[0] == 0
        texts.add(out.read_bytes())
    assert len(texts) == 1


def test_a_layout_of_one_s_own_has_its_mark_in_the_picture(run, script, monkeypatch, tmp_path):
    seen, figure, mine = [], script.picture.figure, tmp_path / "mine.toml"
    mine.write_text('base = "megatron-1d"\n')
    monkeypatch.setattr(script.picture, "figure", lambda *asked: seen.append(asked) or figure(*asked))
    where = ["--mesh", "x=4", "--phase", "decode", "--beside", str(mine)]
    assert run(*where, "--frontier", str(tmp_path / "front.png"))[0] == 0
    ((finding, _, placed, _),) = seen
    assert placed.count(own := next(each for each in placed if each.name == str(mine))) == 1
    assert own.answer == next(each.answer for each in placed if each.name == "megatron-1d")
    assert {id(each.candidate) for each in placed} == {id(finding.best)}


def test_a_layout_that_was_found_has_no_lines_of_tensors_that_the_model_lacks(run, tmp_path):
    found = tmp_path / "found.toml"
    assert run("--mesh", "x=4", "--phase", "decode", "--out", str(found))[0] == 0
    assert not {*Layout.load(found).table} & {"attention.latent", "attention.latent_query", "attention.relative"}


def test_planned_seconds_have_the_error_to_expect_where_it_was_measured(run, tmp_path, monkeypatch):
    found = tmp_path / "found.toml"
    measured = {"decode": {"tpu-v5p": 0.123}}
    monkeypatch.setattr("gspmd.search.answers.errors._measured", lambda: measured)
    for topology, shown in (("tpu-v5p:2x2x1", True), ("tpu-v5e:2x2", False)):
        flags = ["--phase", "decode", "--mesh", "x=4", "--topology", topology, "--json", str(tmp_path / "found.json")]
        code, out, _ = run(*flags, "--out", str(found))
        assert code == 0
        assert bool(re.search(r"# predicted  [\d.]+ µs ± 12%; lower bound", found.read_text())) is shown
        assert bool(re.search(r"mesh x=4: [\d.]+ µs ± 12% a step", " ".join(out.split()))) is shown
        assert json.loads((tmp_path / "found.json").read_text())["expected_error"] == (0.123 if shown else None)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("tpu-v4:2x2x4", (2, 2, 4)), ("tpu-v5e:4x4", (4, 4)), ("tpu-v4:2x2x1", (2, 2)), ("tpu-v4:2x2x4*2", ()),
     ("tpu-v3:4x4", ()), ("h100:8", ())],
)  # fmt: skip
def test_a_slice_tells_the_planner_its_shape(name, shape):
    """Several slices, and chips of two devices, have more axes than the torus."""
    assert Slice.named(name).chip.slice_shape == shape


def test_a_mesh_axis_over_the_whole_torus_is_priced_with_all_its_links():
    """As compiled, the same layout takes the same time on one axis over 2x2x4 chips as on three."""
    target = Slice.named("tpu-v4:2x2x4")
    config = ModelConfig(vocabulary=256, embed=4096, layers=2, heads=32, head_size=128, feed_forward=16384)
    known = Workload(config, target.chip, 64, 256, phase="decode")
    costs = {}
    for case in (known, replace(known, chip=CHIPS["tpu-v4"])):
        of = Candidate(problem_of(case, {"z": 16}), 1e12)
        placed = {each.name: each for each in placed_presets([of])}
        costs[bool(case.chip.slice_shape)] = placed["megatron-1d"].answer.seconds
    assert costs[True] < 0.95 * costs[False]


def test_errors_to_expect_are_of_phases_and_chips():
    measured = errors._measured()
    assert measured.keys() <= {"train", "prefill", "decode", "encode"}
    every = [(phase, chip, error) for phase, chips in measured.items() for chip, error in chips.items()]
    assert every
    for phase, chip, error in every:
        assert chip in CHIPS
        assert 0 < error < 1
        assert expected_error(phase, chip) == error
    assert expected_error("decode", "no such chip") is None


def test_a_given_number_of_microbatches_is_the_only_one(run, tmp_path):
    files = ["--out", str(tmp_path / "found.toml"), "--json", str(tmp_path / "found.json")]
    code, out, _ = run("--mesh", "x=4", "--remat", "full", "--microbatches", "4", *files)
    figures, text = json.loads((tmp_path / "found.json").read_text()), (tmp_path / "found.toml").read_text()
    assert code == 0
    assert (figures["microbatches"], figures["searched_microbatches"]) == (4, [4])
    assert {each["microbatches"] for each in figures["presets"]} == {4}
    assert "# step       batch 8, length 16 in 4 microbatches, bfloat16\n" in text
    config, found = tmp_path / "tiny.toml", tmp_path / "found.toml"
    assert text.partition("to be used")[2].startswith(
        f"    gspmd train --config {config} --layout {found} --mesh x=4 --model.remat full --batch 8 --length 16 "
        "--microbatches 4 --dtype bfloat16\n"
    )
    assert "microbatches" in out
    assert "mesh x=4, remat full, in 4 microbatches: " in out


@pytest.mark.slow
def test_microbatches_are_found_where_the_whole_batch_does_not_fit(run, tmp_path):
    """The microbatches of [training] are no limit of the search."""
    fixed = ["--mesh", "x=4", "--remat", "full", "--batch", "64", "--length", "64"]
    code, _, one = run(*fixed, "--microbatches", "1", "--memory", "1e-9")
    assert code == 1
    amount, unit = re.search(r"holds (\S+) ([kM])B", one).groups()
    least = float(amount) * {"k": 1e3, "M": 1e6}[unit]
    assert one.endswith(" Leave --mesh out, or use a larger slice, or a larger --memory.")  # No batch is that small.
    path = tmp_path / "found.json"
    limit = str(0.95 * least / Slice.named("tpu-v5p:2x2x1").chip.hbm_bytes)
    code, _, one = run(*fixed, "--microbatches", "1", "--memory", limit)
    assert code == 1
    assert one.endswith(" or a larger --memory, or a smaller --batch, or more --microbatches.")
    code, out, _ = run(*fixed, "--memory", limit, "--json", str(path))
    figures = json.loads(path.read_text())
    assert code == 0
    assert figures["microbatches"] > 1
    assert figures["bytes"] <= figures["limit"]
    assert f"--microbatches {figures['microbatches']} --dtype " in out


@pytest.mark.slow
def test_searching_again_writes_the_same(run, tmp_path):
    texts = set()
    for _ in range(2):
        code, _, _ = run("--out", str(tmp_path / "found.toml"))
        assert code == 0
        texts.add((tmp_path / "found.toml").read_text())
    assert len(texts) == 1
    assert "--out" not in next(iter(texts))


@pytest.mark.slow
def test_int8_weights_and_cache_are_searched_as_they_are_served(run, tmp_path):
    found = {}
    for flags in ([], ["--weights", "int8"], ["--weights", "int8", "--cache", "int8"]):
        out, figures = tmp_path / "found.toml", tmp_path / "found.json"
        code, _, _ = run("--phase", "decode", *flags, "--out", str(out), "--json", str(figures))
        assert code == 0
        said = " and ".join(f"int8 {flag.removeprefix('--')}" for flag in flags[::2])
        assert (f"bfloat16, {said}\n" if said else "bfloat16\n") in out.read_text()
        found[len(flags)] = json.loads(figures.read_text())["bytes"]
    assert found[0] > found[2] > found[4]


@pytest.mark.slow
def test_without_a_file_the_layout_is_printed(run, tmp_path):
    code, out, _ = run("--mesh", "x=2,y=2")
    assert code == 0
    path = tmp_path / "printed.toml"
    path.write_text(out[: out.index("\n\nthe layout that was found")])
    Layout.load(path).check(SIZES, {"x": 2, "y": 2})


def test_nothing_fits_says_what_is_nearest_and_what_would_do(run, tmp_path):
    code, out, err = run("--memory", "1.2e-6", "--out", str(tmp_path / "found.toml"))
    assert (code, out) == (1, "")
    said = re.search(
        r"No layout fits tpu-v5p:2x2x1: .* holds (\S+) kB on each device, (\S+) kB more than the (\S+) kB", err
    )
    assert float(said[1]) - float(said[2]) == pytest.approx(float(said[3]), abs=1.1)
    assert float(said[3]) == pytest.approx(1.2e-6 * Slice.named("tpu-v5p:2x2x1").chip.hbm_bytes / 1e3, rel=0.01)
    assert re.search(
        r"It would fit on tpu-v5p:2x2x2\. Otherwise use a larger --memory\.", err
    )  # Parameters alone do not fit.
    assert not (tmp_path / "found.toml").exists()


def test_a_smaller_batch_is_a_remedy_only_where_it_fits(run):
    """A cache of one sequence fits where that of 64 does not; weights alone do not fit anywhere."""
    decode = ["--phase", "decode", "--batch", "64", "--length", "256", "--mesh", "x=4"]
    for memory, remedy in {
        "1e-6": "or a larger --memory, or a smaller --batch.",
        "1e-8": "or a larger --memory.",
    }.items():
        code, _, err = run(*decode, "--memory", memory)
        assert code == 1
        assert err.endswith(f"Leave --mesh out, or use a larger slice, {remedy}")


def test_a_smaller_batch_is_a_remedy_where_one_sequence_has_no_layout(run):
    """A batch of 4 does fit."""
    fixed = ["--phase", "decode", "--length", "256", "--mesh", "x=4", "--fixed", "cache.attention.key=B_xTKD"]
    for batch, code in ((64, 1), (4, 0)):
        found, _, err = run(*fixed, "--batch", str(batch), "--memory", "1.3e-6")
        assert found == code
        assert ("or a smaller --batch." in err) is (code == 1)


def test_a_layout_within_the_proved_tolerance_is_called_equal():
    """No ratio below 1 without the reason for which the layout is not the answer."""
    from gspmd.commands.search import shown

    config = ModelConfig(layers=2, embed=256, feed_forward=1024, heads=8, head_size=32, remat="full")
    phase = problem_of(Workload(config, Slice.named("tpu-v5p:2x2x2").chip, 64, 512), {"x": 2, "y": 4})
    best = Candidate(phase, 1e9)
    answer = best.free
    finding = SearchResult(best, answer, (best,), answer.bound)

    def told(ratio, held, microbatches=1):
        other = replace(answer, seconds=answer.seconds * ratio, bytes=answer.bytes * held)
        of = SimpleNamespace(
            limit=answer.bytes * 2, microbatches=microbatches, remat="full", unlimited=best.unlimited, named="x=2,y=4"
        )
        sheet = shown.comparison(finding, [Placed("mine", of, {"x": 2, "y": 4}, other)])
        at = [column.name for column in sheet.columns].index("of found")
        (first, _), (second, _) = sheet.rows
        return re.sub(r"\[.*?\]", "", first[at]), re.sub(r"\[.*?\]", "", second[at])

    assert told(0.9996, 0.5) == ("1.000", "equal within 0.05%, less memory")
    assert told(1.0004, 1.5) == ("1.000", "equal within 0.05%")
    assert told(1.0, 1.0)[1] == "equal within 0.05%"
    assert told(1.0006, 0.5)[1] == "1.001"
    assert told(0.9, 2.5)[1] == "0.900, does not fit"
    assert told(0.985, 1.0, microbatches=4)[1] == "0.985, in 4 microbatches"
    assert told(0.9, 1.0)[1] == "0.900, as planned"


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.5, 0.15])
def test_the_picture_has_the_presets_of_its_mesh_and_no_label_on_another(script, share):
    config = ModelConfig(layers=8, embed=256, feed_forward=1024, heads=8, head_size=32, remat="full")
    phase = problem_of(Workload(config, Slice.named("tpu-v5p:2x2x2").chip, 64, 512), {"x": 2, "y": 4})
    least, most = (each.bytes for each in (Candidate(phase, 1e9).least, Candidate(phase, 1e9).free))
    best = Candidate(phase, least + share * (most - least))
    finding = SearchResult(best, best.solve(), (best,), best.solve().bound)
    presets, front = placed_presets([best]), frontier(best, 4)
    fitting = next(each for each in presets if each.fits)
    for number in range(1, 6):  # a row of marks that are nearer than their names are long
        place = replace(fitting.answer, bytes=fitting.answer.bytes * (1 + number * 0.01))
        presets.append(replace(fitting, name=f"{fitting.name}-{number}", answer=place))
    drawn = script.picture.figure(finding, front, presets, "a title")
    FigureCanvasAgg(drawn).draw()
    axes = drawn.axes[0]
    marks = {(*line.get_xdata(), *line.get_ydata()) for line in axes.lines if line.get_marker() == "D"}
    units = script.picture._frame(finding, front, presets)
    assert marks <= {(each.answer.bytes / units.bytes[0], each.answer.seconds / units.seconds[0])
                     for each in presets if each.fits}  # fmt: skip
    labels = [text for text in axes.texts if "may be used" not in text.get_text() and "shade" not in text.get_text()]
    assert len(marks) > 2
    assert len(labels) > 2
    for one, other in itertools.combinations(labels, 2):
        assert not one.get_window_extent().overlaps(other.get_window_extent()), (one, other)
    whole = drawn.bbox
    assert all(whole.containsx(x) for each in labels for x in each.get_window_extent().intervalx)


@pytest.mark.slow
def test_the_picture_is_of_one_mesh(run, script, monkeypatch, tmp_path):
    """The table gives each preset with the mesh and the remat that are best for it."""
    seen, figure, placed = [], script.picture.figure, {}

    def places(candidates, ranges=(), names=None):
        found = placed_presets(candidates, ranges, names)
        placed[id(found)] = [*candidates]
        return found

    monkeypatch.setattr(script, "placed_presets", places)
    monkeypatch.setattr(script.picture, "figure", lambda *asked: seen.append(asked) or figure(*asked))
    code, _, _ = run("--frontier", str(tmp_path / "front.png"), "--microbatches", "1")
    finding, _, presets, _ = seen[0]
    assert code == 0
    assert len(finding.candidates) > 1
    assert placed[id(presets)] == [finding.best]
    assert {id(each.candidate) for each in presets} == {id(finding.best)}


@pytest.mark.slow
def test_nothing_fits_a_given_mesh(run):
    code, _, err = run("--memory", "1e-6", "--mesh", "x=4")
    assert code == 1
    assert "that may be used, 0.0001% of " in err
    assert err.endswith("Leave --mesh out, or use a larger slice, or a larger --memory.")


def test_the_smallest_slice_is_the_first_on_which_something_fits(script, monkeypatch):
    missing = importlib.import_module("gspmd.commands.search.missing")
    monkeypatch.setattr(
        missing, "Candidate", lambda size, limit: SimpleNamespace(least=SimpleNamespace(bytes=1 / size))
    )
    spaces = lambda target: [Space(lambda: target.devices)]  # noqa: E731
    target = Slice.named("tpu-v4:2x2x1")
    assert missing.next_slice(target, 1 / 20, spaces, print).name == "tpu-v4:2x4x4"
    assert missing.next_slice(target, 1 / 4096, spaces, print).devices == 4096
    assert missing.next_slice(target, 1 / 9999, spaces, print) is None


def test_the_command_of_a_layout_for_serving_has_the_stored_dtypes(run, tmp_path):
    path = tmp_path / "found.toml"
    serving = ["--phase", "decode", "--mesh", "x=4", "--weights", "int8", "--cache", "int8"]
    assert run(*serving, "--out", str(path))[0] == 0
    command = shlex.split(path.read_text().partition("# to be used")[2].partition("\n")[0])
    stored = ["--weights", "int8", "--cache", "int8"]
    assert command[:4] == ["gspmd", "generate", "--checkpoint", "DIR"]
    assert command[4:] == ["--layout", str(path), "--mesh", "x=4", "--dtype", "bfloat16", *stored]
    generate_settings.parse(command[2:])


def test_the_command_of_a_layout_for_training_is_one_that_train_reads():
    asked = ["--remat", "full", "--stages", "--memory=0.5", "--model.layers", "3", "--topology", "tpu-v5p:2x2x1"]
    settings = search_settings.parse([*asked, "--out", "a b.toml"])
    words = shlex.split(written._train(settings, [*asked, "--out", "a b.toml"], "a b.toml", "x=4", "full", 4))
    read = train_settings.parse(words[2:])
    other = ["--model.layers", "3", "--no_stages", "--compiler_options", "a=1"]
    assert shlex.split(written._train(settings, other, "a b.toml", "x=4", "full", 4)) == words
    assert words[:4] == ["gspmd", "train", "--config", "llama-2-70b"]
    assert (read.sharding.layout, read.sharding.mesh, read.model.layers) == ("a b.toml", "x=4", 3)
    assert (read.model.remat, read.training.microbatches, read.training.batch) == ("full", 4, settings.batch)


@pytest.mark.parametrize(("interrupt", "number"), [(KeyboardInterrupt, 130), (Terminated, 143), (HungUp, 129)])
def test_an_interrupt_of_the_search_writes_the_best_so_far(run, script, monkeypatch, tmp_path, interrupt, number):
    original, calls = Search.best, []

    def best(search, *asked):
        calls.append(search)
        if len(calls) > 2:  # of the first mesh without its limit, without the norm of gradients and with it
            raise interrupt
        return original(search, *asked)

    monkeypatch.setattr(Search, "best", best)
    path, figures = tmp_path / "found.toml", tmp_path / "found.json"
    code, out, err = run("--out", str(path), "--json", str(figures))
    assert code == number
    assert "costs less than" not in out
    assert json.loads(figures.read_text())["bound"] is None
    assert err.endswith(f"Interrupted. The best layout so far is written to {path}; there may be a better one.")
    assert "# found      the best so far: the search was interrupted, and there may be a better one" in path.read_text()
    assert "; next" not in path.read_text()
    Layout.load(path).check(SIZES, {"x": 4})


@pytest.mark.parametrize(("interrupt", "number"), [(KeyboardInterrupt, 130), (Terminated, 143), (HungUp, 129)])
def test_an_interrupt_after_the_search_leaves_the_answer(run, script, monkeypatch, tmp_path, interrupt, number):
    def interrupted(*_, **__):
        raise interrupt

    monkeypatch.setattr(script, "placed_presets", interrupted)
    code, _, err = run("--out", str(tmp_path / "found.toml"))
    assert code == number
    assert "Interrupted. The best layout is written to" in err
    assert "# proved     no layout on " in (tmp_path / "found.toml").read_text()


@pytest.mark.parametrize("flags", [["--config", "none.toml"], ["--config", "tiny", "--topology", "tpu-v5p:2x2x1"]])
def test_the_caller_s_garbage_collection_is_as_before(script, monkeypatch, flags):
    def interrupted(*_):
        seen.append(gc.get_threshold()[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "find", interrupted)
    seen, usual = [], gc.get_threshold()
    gc.set_threshold(700, 10, 9)
    before = gc.get_threshold()
    try:
        assert script.run(flags) == (130 if seen else 2)
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*usual)
    assert seen == [400_000] * ("tiny" in flags)


def test_an_interrupt_before_anything_is_found_speaks_of_the_search(script, monkeypatch, capfd):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "find", interrupted)
    assert script.run(["--config", "tiny", "--topology", "tpu-v5p:2x2x1"]) == 130
    assert capfd.readouterr().err.endswith("\nInterrupted before a layout was found that fits.\n")


@pytest.mark.parametrize(
    ("table", "flags", "said"),
    [
        ("[model.moe]\nexperts = 8\nrouter = 'expert-choice'", ["--phase", "decode"],
         "cannot search layouts to serve this model: the experts of router expert-choice choose among tokens that "
         "do not exist yet. gspmd generate uses"),
        ("[model.moe]\nexperts = 8\ngroups = 4", ["--stages"],
         "cannot search stages of this model: it has experts and 4 groups of tokens. Leave --stages out: "),
        ("[lora]\nrank = 4", ["--stages"],
         "cannot search stages of this model: some of its parameters are frozen. Leave --stages out: without "
         "stages it is"),
    ],
)  # fmt: skip
def test_what_is_not_searched_names_what_helps_here(run, tmp_path, table, flags, said):
    """`gspmd search` has no --layout of its own."""
    config = tmp_path / "odd.toml"
    config.write_text(f"{MODEL}{table}\n")
    code, out, err = run("--config", str(config), *flags)
    assert (code, out) == (2, "")
    assert said in err
    assert "mesh x=" not in err  # nothing was searched before


@pytest.mark.slow
def test_a_real_interrupt_writes_the_best_so_far(tmp_path):
    """A model and a slice whose search takes minutes, for its memory is tight."""
    path = tmp_path / "found.toml"
    flags = ["--config", "llama-2-70b", "--batch", "1024", "--length", "4096", "--out", str(path)]
    running = subprocess.Popen(
        [sys.executable, "-m", "gspmd", "search", *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    seen = ""
    while "the cost of each line" not in seen and running.poll() is None:
        seen += running.stderr.readline()
    time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=600)
    assert running.returncode == 130, seen + err
    assert "Interrupted. The best layout" in err
    Layout.load(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "table",
    ["[model.moe]\nexperts = 4\nrouter = 'noisy-top-k'", "[lora]\nrank = 4", "[optimizer]\nmoments = 'int8'",
     "[training]\nparameter_dtype = 'bfloat16'\nfrozen = ['embedding.*']"],
)  # fmt: skip
def test_what_has_no_tables_of_its_own_is_read_from_the_program(run, tmp_path, table):
    config = tmp_path / "odd.toml"
    config.write_text(f"{MODEL}{table}\n")
    path = tmp_path / "found.toml"
    fixed = ["--mesh", "x=4", "--remat", "full", "--microbatches", "1"]
    code, _, err = run("--config", str(config), *fixed, "--out", str(path))
    assert code == 0, err
    assert "no layout on this mesh is more than 0.05% faster by the plan" in path.read_text()
    assert Layout.load(path).axes == ("x",)


@pytest.mark.slow
@needs_libtpu
def test_presets_that_are_not_in_the_space_are_traced_after_a_program_was_read(tmp_path):
    """On devices of the slice, for which JAX has to be started before."""
    config = tmp_path / "odd.toml"
    config.write_text(f"{MODEL}[optimizer]\nmoments = 'int8'\n")
    flags = ["--config", config, "--topology", "tpu-v5e:2x2", "--batch", "8", "--length", "16", "--mesh", "x=2,y=2"]
    command = [sys.executable, "-m", "gspmd", "search", *map(str, flags), "--remat", "full", "--microbatches", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "context-parallel on x=2,y=2: " in done.stdout
    assert "by gspmd.trace" in done.stdout
    # Its state's blocks lie over four devices: a step that refuses a preset is no reason to lose the answer.
    assert "zero-1: not possible, moments in int8 have blocks of 32 values, but a device has 8" in done.stdout


@pytest.mark.turns(1)
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("ffn.w_in=EF_q", "ffn.w_in cannot be 'EF_q': the mesh has no axis q."),
        ("ffn.winn=EF", "no line of the search is called 'ffn.winn'."),
    ],
)
def test_a_line_that_is_none_does_not_lose_the_answer(run, asked, said, tmp_path):
    code, _, err = run("--why", asked, "--mesh", "x=4", "--out", str(tmp_path / "found.toml"))
    assert code == 2
    assert f"--why {asked}: " in err
    assert said in err
    Layout.load(tmp_path / "found.toml").check(SIZES, {"x": 4})


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_figures_that_cannot_be_written_do_not_lose_the_answer(run, tmp_path):
    code, _, err = run("--mesh", "x=4", "--json", "/dev/full", "--out", str(tmp_path / "found.toml"))
    assert code == 2
    assert err.endswith("cannot write --json /dev/full: No space left on device.")
    Layout.load(tmp_path / "found.toml").check(SIZES, {"x": 4})


def test_groups_that_do_not_divide_the_tokens_are_refused_before_anything_is_searched(run, tmp_path):
    (tmp_path / "groups.toml").write_text(f"{MODEL}[model.moe]\nexperts = 4\ngroups = 3\n")
    code, _, err = run("--config", str(tmp_path / "groups.toml"))
    assert code == 2
    assert "model.moe.groups must divide the tokens of a batch, 8 × 16 = 128, but is 3." in err


def test_all_lines_that_are_none_are_named_at_once(run, tmp_path):
    lines = ["ffn.w_in=EF_q", "ffn.w_in=E_xF_x", "ffn.w_in=FE_q", "ffn.w_in=Q_xE"]
    flags = [part for line in lines for part in ("--why", line)]
    code, _, err = run(*flags, "--why", "ffn.hidden=BLF_x", "--mesh", "x=4", "--remat", "full", "--microbatches", "1")
    assert code == 2
    assert [err.count(f"--why {line}: ") for line in lines] == [1] * len(lines)
    assert "needs EF; the mesh has no axis q." in err
    assert "'Q_xE' has dimensions QE, but needs EF. The options are" in err
    code, _, err = run("--why", "ffn.winn=EF", "--fixed", "fnn.w_in=EF")
    assert code == 2
    assert "--why ffn.winn=EF: no layout has a key 'ffn.winn'. Did you mean 'ffn.w_in'?" in err
    assert "--fixed fnn.w_in=EF: " in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--memory", "1.5"], "--memory is the fraction of memory that may be used, above 0 and at most 1, not 1.5."),
        (["--compile", "-1"], "--compile is a number of layouts, 0 or more, not -1."),
        (["--why", "ffn.w_in"], "--why reads KEY=SPEC, such as ffn.w_in=EF_x, not 'ffn.w_in'."),
        (["--fixed", "ffn.w_in=EFF_x"], "--fixed ffn.w_in=EFF_x: cannot read the spec 'EFF_x'"),
        (["--fixed", "ffn.w_in=EQ_x"], "--fixed ffn.w_in=EQ_x: ffn.w_in has the dimensions EF, not EQ."),
        (["--fixed", "ffn.w_in=EF_q"], "--fixed ffn.w_in=EF_q: no mesh of this search has an axis q; write x, y or z."),
        (["--mesh", "x=4", "--fixed", "ffn.in_via=BLE, EF_y"], "no mesh of this search has an axis y; write x."),
        (["--out", "found.txt"], "--out writes a TOML file, whose name ends in .toml, not 'found.txt'."),
        (["--frontier", "f.jpg"], "--frontier writes a PNG file, whose name ends in .png, not 'f.jpg'."),
        (["--json", "nowhere/f.json"], "--json nowhere/f.json: there is no folder 'nowhere'."),
        (["--json", "."], "--json .: it is a folder; give a file."),
        (["--frontier", f"{'a' * 300}.png"], f"--frontier {'a' * 40}...: File name too long."),
        (["--mesh", "X=4"], "mesh axes are named by a lowercase letter and then letters, digits or _, not 'X'."),
        (
            ["--mesh", "x=2,y=4"],
            "--mesh x=2,y=4 has 8 devices, and tpu-v5p:2x2x1 has 4; --topology names another slice.",
        ),
        (["--mesh", "x"], "cannot read mesh 'x'"),
        (["--beside", "nowhere.toml"], "--beside nowhere.toml: "),
        (["--batch", "0"], "batch must be"),
        (["--batch", "8", "--microbatches", "3"], "cannot cut a batch of 8 into 3 microbatches."),
        (["--topology", "tpu-v5p:2x2"], "there is no topology 'tpu-v5p:2x2'"),
        (["--microbatches", "0"], "microbatches must be"),
        (["--weights", "int8"], "--weights int8 is for --phase encode, prefill and decode, not train."),
        (["--phase", "decode", "--microbatches", "1"], "--phase decode trains nothing; leave --microbatches out."),
        (["--phase", "trian"], "train"),
        (["--phase", "encode"], "--phase encode is for an encoder–decoder, and this model has no encoder."),
        (
            ["--model.moe.experts", "4"],
            "this configuration has no experts; write [model.moe] in a TOML file, and name it",
        ),
        (["--model.lora.rank", "4"], "this configuration has no adapters; write [lora] in a TOML file, and name it"),
        (["--source-length", "8"], "--source-length is for an encoder–decoder, and this model has no encoder."),
        (["--source-length", "-8"], "source_length must not be negative, but is -8."),
        (
            ["--model.encoder-layers", "2", "--stages"],
            "--stages searches pipelines of a decoder-only model, and this one has an encoder; leave out --stages.",
        ),
    ],
)
def test_bad_input_is_one_message(run, flags, said):
    code, out, err = run(*flags)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("table", "flags", "said"),
    [
        ("int8 = true", [], "[model] int8 is for weights that are stored in int8; leave"),
        ("int8 = true", ["--phase", "decode"], "[model] int8 is for weights that are stored in int8: --weights int8"),
        (
            "stacked = false",
            ["--phase", "decode"],
            "[model] stacked is off, and only stacked blocks have a price; leave",
        ),
        ("offload = true", [], "[model] offload is set, and copies of activations to host memory"),
        (
            "[lora]\nrank = 8",
            ["--phase", "decode"],
            "[lora] has adapters of rank 8, which have no price (merged adapters",
        ),
    ],
)
def test_what_would_be_counted_wrong_is_refused(run, tmp_path, table, flags, said):
    config = tmp_path / "odd.toml"
    config.write_text(f"{MODEL}{table}\n")
    code, out, err = run("--config", str(config), *flags)
    assert (code, out) == (2, "")
    assert said in err


def test_the_command_that_found_it_is_without_its_files():
    written = importlib.import_module("gspmd.commands.search.written")
    argv = ["--config", "a", "--out", "--json", "--json=f", "--why", "a=b", "--batch", "8", "--frontier", "f.png",
            "--beside", "mine.toml"]  # fmt: skip
    assert without(argv, written._OF_NOTHING) == ["--config", "a", "--batch", "8"]
    own = ["--compiler_options", "a=1", "--source_length", "3", "--source_length=3", "--learning_rate", "1", "--seed=4"]
    assert without(own, written._OF_SEARCH) == ["--learning_rate", "1", "--seed=4"]


def test_a_slice_has_as_many_devices_as_the_compiler_says():
    names = importlib.import_module("gspmd.audit.offline.names")
    assert Slice.named("tpu-v3:4x4").devices == 32
    assert Slice.named("tpu7x:2x2x1").torus == (2, 2, 1, 2)
    assert all(len(Slice.named(f"{chip}:{'x'.join('2' * names.CHIPS[chip].torus)}").shape) for chip in names.POD_CHIPS)


@needs_libtpu
@pytest.mark.parametrize(
    "name", ["tpu-v3:4x4", "tpu-v4:2x2x1", "tpu-v5e:4x4", "tpu-v5p:2x2x2", "tpu-v6e:2x2", "tpu7x:2x2x1"]
)
def test_the_compiler_has_the_devices_of_a_slice(name):
    from gspmd.audit import slices, topology

    assert topology(name).num_devices == Slice.named(name).devices
    chip = Slice.named(name).chip
    least = next(iter(slices(chip)))
    assert {each.name for each in Slice.named(least.name).larger()} < {each.name for each in slices(chip)}


# -- the compiler's order ----------------------------------------------------------------------------------------------


@pytest.fixture
def shortlist():
    return importlib.import_module("gspmd.commands.search.shortlist")


@pytest.fixture
def compiler(script, monkeypatch):
    """Takes the place of the compiler: seconds by name, infinite for what does not fit."""
    seconds = {}

    def compiled(settings, listed, both=True):
        done = []
        looped = [
            replace(each, lowering="auto") for each in listed if both and f"{each.name}, lowering auto" in seconds
        ]
        for each in (*listed, *looped):
            took = seconds.get(each.called, 9.0)
            line = SimpleNamespace(step_seconds=took, parts=(), warnings=()) if took < float("inf") else None
            report = SimpleNamespace(timeline=line, fits=line is not None, bytes_per_device=1000, compile_seconds=1.0)
            done.append(replace(each, report=report))
        return sorted(done, key=lambda each: (each.seconds, each.answer.seconds))

    monkeypatch.setattr(script, "topology", lambda name: None)
    monkeypatch.setattr(script.compiling, "compiled", compiled)
    return seconds


def test_what_cannot_be_compiled_is_refused_before_the_search(run, script, monkeypatch):
    monkeypatch.setattr(script, "find", lambda *_: pytest.fail("searched what cannot be compiled"))
    code, out, err = run("--topology", "mi300x:8", "--compile", "1")
    assert (code, out) == (2, "")
    assert "cannot compile for 'mi300x:8'" in err


@pytest.mark.slow
def test_the_fastest_program_is_the_answer(run, compiler, tmp_path):
    files = ["--out", str(tmp_path / "found.toml"), "--json", str(tmp_path / "found.json")]
    code, out, _ = run("--compile", "4", *files)
    assert code == 0
    listed = json.loads((tmp_path / "found.json").read_text())["compiled"]
    assert len(listed) == 5
    assert sum(each["preset"] for each in listed) == 1
    other = next(each["name"] for each in listed if each["name"].startswith(("another", "mesh")))
    first = (tmp_path / "found.toml").read_text()

    compiler |= {other: 1.0, "found": float("inf")}
    code, out, _ = run("--compile", "4", *files)
    assert code == 0
    figures, text = json.loads((tmp_path / "found.json").read_text()), (tmp_path / "found.toml").read_text()
    names = [each["name"] for each in figures["compiled"]]
    assert (names[0], names[-1]) == (other, "found")
    assert "# compiled   1 s, 1 kB on each device: the fastest of the programs that were compiled\n" in text
    assert text != first
    assert "Planned, not compiled" not in out
    assert text.count("; next ") > 5


def test_a_program_that_does_not_fit_is_no_fast_one(script):
    """Compilers for GPUs refuse nothing: what does not fit has a timeline too."""

    def listed(seconds, fits):
        report = SimpleNamespace(timeline=SimpleNamespace(step_seconds=seconds, warnings=()), fits=fits)
        return script.compiling.Listed(f"{seconds} s", None, SimpleNamespace(seconds=1.0), {}, report=report)

    large, small = listed(1.0, False), listed(2.0, True)
    assert (large.seconds, small.seconds) == (float("inf"), 2.0)
    assert script.compiling.fastest([large, small]) == [small, large]


def test_what_a_program_does_in_vain_is_said_with_its_name():
    shown = importlib.import_module("gspmd.commands.search.shown")
    slow, fast = (
        SimpleNamespace(called=name, report=SimpleNamespace(timeline=SimpleNamespace(warnings=warnings)))
        for name, warnings in (("found", ("copy.1 copies",)), ("another", ()))
    )
    assert shown.warnings([slow, fast, SimpleNamespace(report=None)]) == ["warning: found: copy.1 copies"]


@pytest.mark.slow
def test_a_preset_whose_program_is_the_fastest_is_the_answer(run, compiler, tmp_path):
    compiler |= dict.fromkeys(presets(), 1.0)
    code, _, _ = run("--compile", "2", "--out", str(tmp_path / "found.toml"), "--json", str(tmp_path / "found.json"))
    assert code == 0
    preset = json.loads((tmp_path / "found.json").read_text())["compiled"][0]
    assert preset["preset"]
    assert f"that of preset {preset['name']}" in (tmp_path / "found.toml").read_text()


def test_layouts_of_one_s_own_are_compiled_beside_the_others_and_never_the_answer(run, compiler, tmp_path):
    mine, odd, files = tmp_path / "mine.toml", tmp_path / "odd.toml", [tmp_path / "found.toml", tmp_path / "found.json"]
    mine.write_text('base = "megatron-1d"\n')
    odd.write_text('base = "zero-3"\n[attention]\nw_q = "EHD_xyz"\n')
    compiler[str(mine)] = 1.0  # faster than all others
    where = ["--mesh", "x=4", "--remat", "none", "--microbatches", "1", "--compile", "1"]
    where += ["--out", str(files[0]), "--json", str(files[1])]
    assert run(*where)[0] == 0
    alone = files[0].read_bytes()
    code, out, _ = run(*where, "--beside", str(mine), "--beside", str(odd))
    assert code == 0
    assert f"{odd} is not compiled: gspmd compile --layout {odd} does." in " ".join(out.split())
    first, *others = json.loads(files[1].read_text())["compiled"]
    assert (first["name"], first["seconds"], first["beside"], first["preset"]) == (str(mine), 1.0, True, False)
    assert not any(each["beside"] for each in others)
    assert files[0].read_bytes() == alone


@pytest.mark.slow
def test_a_program_that_loops_is_asked_for_where_it_is_the_fastest(run, compiler, tmp_path):
    path, looped = tmp_path / "found.toml", "found, lowering auto"
    for seconds, lowering, said in ((10.0, "blocking", "9 s, "), (8.0, "auto", "8 s, ")):
        compiler[looped] = seconds
        code, out, _ = run("--compile", "1", "--out", str(path))
        assert code == 0
        assert looped in out
        assert Layout.load(path).lowering == lowering
        [line] = [line for line in path.read_text().splitlines() if line.startswith("# compiled")]
        assert said in line
        assert line.endswith("under lowering auto") == (lowering == "auto")


@pytest.fixture
def improve(run, compiler, tmp_path):
    """A function of seconds by name that returns what was compiled, and the layout file, of one that gains by lines."""
    config, files = (
        tmp_path / "wide.toml",
        ["--out", str(tmp_path / "found.toml"), "--json", str(tmp_path / "found.json")],
    )
    config.write_text(WIDE)
    flags = ["--config", str(config), "--batch", "8", "--length", "128", "--mesh", "x=4", "--remat", "none"]

    def compiled(seconds, code=0):
        compiler.clear()
        compiler.update(seconds)
        assert run(*flags, "--microbatches", "1", "--compile", "3", *files)[0] == code
        return json.loads((tmp_path / "found.json").read_text())["compiled"], (tmp_path / "found.toml").read_text()

    return compiled


@pytest.mark.slow
def test_a_preset_that_is_the_fastest_is_improved(improve, tmp_path):
    """Try the single lines that gain most in the plan, then the faster of them together."""
    preset = next(each["name"] for each in improve({})[0] if each["preset"])
    listed, text = improve({preset: 1.0})
    ours = [each for each in listed if each["name"].startswith(f"{preset}, with ")]
    of_preset = next(each["planned_seconds"] for each in listed if each["preset"])
    assert len(ours) == 2
    assert all(each["planned_seconds"] < of_preset and not each["preset"] for each in ours)
    assert f"that of preset {preset}" in text
    assert not any("embedding.tokens" in each["name"] for each in ours)  # small, and where the residual is

    names = [each["name"] for each in sorted(ours, key=lambda each: each["planned_seconds"])]
    faster, every = {preset: 1.0, names[0]: 0.9, names[1]: 0.95}, f"{preset}, with all that is faster"
    listed, text = improve({**faster, every: 0.8})
    assert [each["name"] for each in listed][:4] == [every, names[0], names[1], preset]
    assert "# compiled   800 ms, 1 kB on each device: the fastest of the programs that were compiled\n" in text
    lines = json.loads((tmp_path / "found.json").read_text())["lines"]
    key_and_spec = [name.removeprefix(f"{preset}, with ").split(" ", 1) for name in names]
    assert all(lines[key] == spec for key, spec in key_and_spec)

    assert every not in [each["name"] for each in improve({preset: 1.0, names[0]: 0.9, names[1]: 1.1})[0]]
    listed, _ = improve({f"{preset}, lowering auto": 0.9, f"{names[0]}, lowering auto": 0.8})
    assert [each["lowering"] for each in listed if each["name"] in names] == ["auto"] * 2
    assert listed[0]["name"] == names[0]


@pytest.mark.slow
def test_an_interrupt_while_compiling_keeps_what_is_compiled(run, script, monkeypatch, compiler, tmp_path):
    every = script.compiling.compiled

    def compiled(settings, listed, both=True):
        yield from [each for each in every(settings, listed) if each.name == "found"]
        raise KeyboardInterrupt

    monkeypatch.setattr(script.compiling, "compiled", compiled)
    path, figures = tmp_path / "found.toml", tmp_path / "found.json"
    compiler |= {"found, lowering auto": 8.0}
    code, out, _ = run("--compile", "2", "--mesh", "x=4", "--out", str(path), "--json", str(figures))
    assert code == 130
    assert "# compiled   8 s, 1 kB on each device: the fastest of the programs that were compiled" in path.read_text()
    listed = json.loads(figures.read_text())["compiled"]
    assert [each["lowering"] for each in listed] == ["auto", "blocking"]
    assert listed[0]["lines"] == json.loads(figures.read_text())["lines"]
    assert "compiled for the slice, the fastest first" in out


@pytest.mark.slow
def test_an_interrupt_while_a_preset_is_improved_keeps_the_fastest(improve, shortlist, monkeypatch):
    preset = next(each["name"] for each in improve({})[0] if each["preset"])
    names = [each["name"] for each in improve({preset: 1.0})[0] if ", with " in each["name"]]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shortlist, "together", interrupted)
    listed, text = improve({preset: 1.0, names[1]: 0.9}, 130)
    assert listed[0]["name"] == names[1]
    assert "# compiled   900 ms, 1 kB on each device: the fastest of the programs that were compiled\n" in text


@pytest.mark.slow
@pytest.mark.parametrize("experts", [0, 4])
def test_every_line_that_improves_a_preset_has_a_name(shortlist, experts):
    """Also one that is left out: of a parameter whose optimizer state lies otherwise."""
    moe = MoEConfig(experts=experts, router="gshard") if experts else None
    config = ModelConfig(vocabulary=64, embed=32, layers=2, heads=8, kv_heads=4, head_size=8, feed_forward=64, moe=moe)
    phase = problem_of(Workload(config, Slice.named("tpu-v5p:2x2x1").chip, 8, 16), {"x": 4})
    settings, improved = SimpleNamespace(phase="train"), 0
    for each in placed_presets([Candidate(phase, 1e12)]):
        if each.answer:
            preset = shortlist.Listed(each.name, each.candidate, each.answer, each.mesh, preset=True)
            names = [listed.name for listed in shortlist.improved(settings, preset, 99)]
            assert len({*names}) == len(names)
            assert all(re.fullmatch(rf"{each.name}, with [a-z_.]+ [A-Za-z_, -]+", name) for name in names)
            improved += len(names)
    assert improved > 20


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--mesh", "x=4", "--remat", "none", "--microbatches", "1"], ["--remat", "full"]])
def test_layouts_of_the_shortlist_differ_in_substance(run, script, compiler, monkeypatch, flags):
    listed = []
    monkeypatch.setattr(script.compiling, "compiled", lambda settings, found, both=True: listed.extend(found) or [])
    assert run("--compile", "4", *flags)[0] == 0
    found = [each for each in listed if not each.preset]
    spent = [each.candidate.unlimited.seconds_of(each.answer.picks) for each in found]
    assert len(found) == 4
    assert [each.answer.seconds for each in found] == sorted(each.answer.seconds for each in found)
    for (one, ours), (other, theirs) in itertools.combinations(zip(found, spent), 2):
        names = {**ours, **theirs}  # another number of microbatches has other parts
        moved = sum(abs(ours.get(name, 0.0) - theirs.get(name, 0.0)) for name in names)
        assert moved >= 0.02 * min(one.answer.seconds, other.answer.seconds)


def test_no_layout_is_compiled_twice_with_axes_swapped_in_a_part_of_it(shortlist):
    """Some parts of their costs differ, and all of it is the same: the compiler finds no difference."""

    def listed(name, seconds, size, parts):
        answer = SimpleNamespace(seconds=seconds, bytes=size, picks=parts)
        candidate = SimpleNamespace(
            unlimited=SimpleNamespace(seconds_of=dict), solve=lambda: answer, named=name, remat="", in_microbatches="",
            phase=SimpleNamespace(case=SimpleNamespace(mesh={})),
        )  # fmt: skip
        return candidate, answer

    found, _ = listed("found", 1.0, 10, {"a": 0.6, "b": 0.4})
    others = [
        listed("twin", 1.0, 10, {"a": 0.4, "b": 0.6})[0],
        listed("smaller", 1.0, 9, {"a": 0.3, "b": 0.7})[0],
        listed("dearer", 1.1, 10, {"a": 0.5, "b": 0.6})[0],
    ]
    finding = SimpleNamespace(best=found, answer=found.solve(), candidates=[found, *others])
    names = [each.name for each in shortlist.trained(finding, {}, [], 4)]
    assert names == ["found", "mesh smaller", "mesh dearer"]
    hiding = [
        replace(shortlist.found(SimpleNamespace(best=each, answer=each.solve())), name=each.named, hidden=hidden)
        for each, hidden in ((found, 0.0), (others[0], 0.2), (others[1], 0.2))
    ]
    assert [each.name for each in shortlist.different(hiding, 3)] == ["found", "twin", "smaller"]
    alike = [hiding[0], replace(hiding[0], name="hides more", hidden=0.2), replace(hiding[0], name="the same")]
    assert [each.name for each in shortlist.different(alike, 3)] == ["found", "hides more"]


@pytest.mark.turns(1)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_of_layouts_to_serve_those_that_end_soonest_with_loops_are_compiled(
    run, script, shortlist, compiler, monkeypatch, phase
):
    """One of them hides its whole step, and so does one of the presets, which is there as it is planned best, too."""
    listed, pools = [], []

    def with_loops(settings, pool):
        pools.append([*pool])
        dearest = max(pools[-1], key=lambda each: each.answer.seconds)
        for each in pools[-1]:
            yield replace(each, lowering="auto", hidden=each.answer.seconds * (each == dearest))

    monkeypatch.setattr(shortlist, "with_loops", with_loops)
    monkeypatch.setattr(shortlist, "MORE", 1e6)  # a hop is a long time in steps as short as these
    monkeypatch.setattr(script.compiling, "compiled", lambda settings, found, both=True: listed.extend(found) or [])
    assert run("--compile", "4", "--phase", phase)[0] == 0
    ours, presets = [each for each in listed if not each.preset], [each for each in listed if each.preset]
    assert (ours[0].name, len(ours)) == ("found", min(4, len(pools[0])))
    assert ours[1].hidden > 0
    cheapest = min(pools[1], key=lambda each: each.answer.seconds)
    assert presets[0].answer.seconds == cheapest.answer.seconds
    assert presets[-1].expected == min(each.expected for each in [*presets, *pools[1]])
    names = [each.name for each in pools[0]]
    assert {name.split()[0] for name in names} == {"found", "mesh", "with"}
    assert not any(name.startswith(("with embedding", "with output")) for name in names)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(("phase", "batch", "loops"), [("prefill", 256, True), ("decode", 4, False)])
def test_what_auto_loops_is_compiled_so_too(script, tmp_path, monkeypatch, phase, batch, loops):
    report = SimpleNamespace(timeline=None, fits=False, bytes_per_device=1000, compile_seconds=1.0)
    monkeypatch.setattr(script.compiling.offline, "compiled", lambda *_: report)
    monkeypatch.setattr(script.compiling.host, "start", lambda *_: None)
    flags = ["--config", "palm-540b", "--topology", "tpu-v4:4x4x4", "--mesh", "x=4,y=4,z=4", "--length", "2048"]
    files = ["--out", str(tmp_path / "found.toml"), "--json", str(tmp_path / "found.json")]
    asked = [*flags, "--phase", phase, "--batch", str(batch), "--compile", "1", *files]
    assert runner.guarded(script.main, asked) == 0
    figures = json.loads((tmp_path / "found.json").read_text())["compiled"]
    programs = {(each["preset"], each["lowering"]) for each in figures}
    assert {(False, "blocking"), (True, "blocking")} <= programs
    assert any(lowering == "auto" for _, lowering in programs) == loops


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_layout_that_cuts_prompts_along_their_length_is_compiled(run, script, monkeypatch, tmp_path, phase):
    """One row is read on four devices so; what it is written to is taken by `gspmd compile`, in either phase."""
    config, path = tmp_path / "wide.toml", tmp_path / "found.toml"
    config.write_text(WIDE)
    compiled, report = [], SimpleNamespace(timeline=None, fits=False, bytes_per_device=1000, compile_seconds=1.0)
    offline = script.compiling.offline

    def check(settings, target, called):
        compiled.append(offline.mesh_of(settings, target))
        return report

    monkeypatch.setattr(offline, "compiled", check)
    monkeypatch.setattr(script.compiling.host, "start", lambda *_: None)
    flags = ["--config", str(config), "--batch", "1", "--length", "8192", "--mesh", "x=4"]
    assert run(*flags, "--phase", "prefill", "--compile", "1", "--out", str(path))[0] == 0
    assert "BL_xF, FE" in path.read_text()
    assert compiled
    options = ["--topology", "tpu-v5p:2x2x1", "--layout", str(path), "--phase", phase]
    settings = offline.parse([*flags, *options])
    assert offline.mesh_of(settings, script.compiling.topology(settings.topology)).shape == {"x": 4}


@needs_libtpu
@pytest.mark.slow
def test_the_shortlist_is_compiled(script, capfd, tmp_path, monkeypatch):
    config, path = tmp_path / "tiny.toml", tmp_path / "found.json"
    config.write_text(MODEL)
    monkeypatch.setattr(script.compiling.host, "start", lambda *_: None)
    flags = ["--config", str(config), "--topology", "tpu-v5p:2x2x1", "--batch", "8", "--length", "16"]
    code = runner.guarded(script.main, [*flags, "--mesh", "x=4", "--compile", "2", "--json", str(path)])
    assert code == 0
    figures = json.loads(path.read_text())
    assert len(figures["compiled"]) == 3
    assert [each["seconds"] for each in figures["compiled"]] == sorted(each["seconds"] for each in figures["compiled"])
    assert all(each["fits"] for each in figures["compiled"])


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("phase", [pytest.param("train", marks=pytest.mark.takes(12)), "encode", "prefill", "decode"])
def test_two_stacks_with_experts_are_searched_and_compiled_for_64_chips(script, tmp_path, monkeypatch, phase):
    monkeypatch.setattr(script.compiling.host, "start", lambda *_: None)
    monkeypatch.setattr(script.compiling, "traced", lambda settings, presets: presets)
    files = ["--out", str(tmp_path / "found.toml"), "--json", str(tmp_path / "found.json")]
    flags = ["--config", "switch-base-8", "--model.layers", "2", "--model.encoder-layers", "2", "--batch", "64"]
    flags += ["--topology", "tpu-v5e:8x8", "--mesh", "x=8,y=8", "--phase", phase, "--compile", "1"]
    if phase == "train":
        flags += ["--remat", "full", "--microbatches", "1"]
    assert runner.guarded(script.main, [*flags, *files]) == 0
    figures = json.loads((tmp_path / "found.json").read_text())
    assert figures["source_length"] == 512, "that of [training]"
    assert all(each["fits"] for each in figures["compiled"])
    assert min(each["bytes"] / each["planned_bytes"] for each in figures["compiled"]) > 0.3
    found = Layout.load(tmp_path / "found.toml")
    assert {"cross.key", "cross.w_k"} <= {*found.table}


def test_stages_are_a_table(run):
    code, out, _ = run("--mesh", "x=4", "--stages", "--remat", "full")
    assert code == 0
    assert "pipelines: the best of each number of stages" in out
    assert "p=2" in out
    assert "--mesh x=4 is for the layout without stages" in " ".join(out.split())


@pytest.mark.slow
@pytest.mark.parametrize("table", ["", "[model.moe]\nexperts = 4\nevery = 2\nrouter = 'gshard'"])
def test_the_best_pipeline_is_written_beside_the_layout(run, script, monkeypatch, tmp_path, table):
    """The file is the row of the table: it checks for the model, and its lines alone, searched again, cost the same."""
    config, path, seen = tmp_path / "deep.toml", tmp_path / "found.toml", []
    config.write_text(f"{MODEL.replace('layers = 2', 'layers = 4').replace('kv_heads = 4', 'kv_heads = 8')}{table}\n")
    search = script.pipelines.table
    monkeypatch.setattr(script.pipelines, "table", lambda *a, **k: seen.append(search(*a, **k)) or seen[-1])
    code, out, _ = run("--config", str(config), "--batch", "32", "--stages", "--remat", "full", "--out", str(path))
    best = seen[0].best
    assert code == 0
    assert "".join(out.split()).count(f"Thebestpipelineisin{tmp_path / 'found-stages.toml'}:") == 1
    text = (tmp_path / "found-stages.toml").read_text()
    (used,) = (line for line in text.splitlines() if line.startswith("# to be used "))
    assert " gspmd train --config " in used
    assert " --model.remat full " in used
    assert f" --microbatches {best.microbatches} " in used
    assert "[pipeline]" not in path.read_text()
    layout, whole = Layout.load(tmp_path / "found-stages.toml"), replace(best.problem.case.config, layers=4)
    layout.check(whole.sizes(32, 16), best.mesh)
    assert layout.table["pipeline.layers"] == "N_p"
    assert parameters(whole, layout)
    options, without = Options(best.problem), {}
    for name, texts in options.texts.items():
        fits = set(range(len(texts)))
        for section, key in {where for each in texts for where in each}:
            text = layout.overrides.get(section, {}).get(key) or layout.table[key]  # a state lies as its parameter
            fits &= options.having(name, section, key, tuple(map(Spec.parse, text.split(", "))))
        without[name] = {*range(len(texts))} - fits
    again = Search(best.problem.problem()).best(without=without)
    assert again.seconds == pytest.approx(best.answer.seconds, rel=1e-12)
    assert again.bytes == best.answer.bytes


@pytest.mark.slow
def test_a_pipeline_that_cannot_be_written_loses_nothing_else(run, tmp_path):
    (tmp_path / "found-stages.toml").mkdir()
    files = ["--out", str(tmp_path / "found.toml"), "--json", str(tmp_path / "found.json")]
    code, out, err = run("--mesh", "x=4", "--remat", "full", "--microbatches", "1", "--batch", "32", "--stages", *files)
    assert code == 2
    assert err.count("cannot write the best pipeline to") == 1
    assert "a step, no layout costs less" in " ".join(out.split())
    assert json.loads((tmp_path / "found.json").read_text())["complete"]


@pytest.mark.slow
def test_an_answer_that_cannot_be_written_is_printed(run, tmp_path):
    code, out, err = run("--mesh", "x=4", "--remat", "full", "--out", "/proc/found.toml")
    assert code == 2
    assert "cannot write the layout that was found" in err
    assert "[attention]" in out


@pytest.mark.slow
def test_lines_that_are_given_stay(run, tmp_path):
    out = str(tmp_path / "found.toml")
    given = ["--fixed", "ffn.w_in=E_xF", "--fixed", "attention.residual=B_yLE"]
    assert run(*given, "--remat", "none", "--mesh", "x=2,y=2", "--out", out)[0] == 0
    layout = Layout.load(out)
    assert (layout["ffn.w_in"], layout["attention.residual"]) == ("E_xF", "B_yLE")
    state = ["--fixed", "ffn.w_in=E_xF", "--fixed", "optimizer.ffn.w_in=E_xF_y"]
    assert run(*state, "--remat", "none", "--mesh", "x=2,y=2", "--microbatches", "1", "--out", out)[0] == 0
    assert str(Layout.load(out).overrides["optimizer"]["ffn.w_in"]) == "E_xF_y"
    assert run("--phase", "decode", "--fixed", "cache.attention.key=B_xTKD", "--mesh", "x=4", "--out", out)[0] == 0
    assert '"attention.key" = "B_xTKD"' in Path(out).read_text()
    code, _, said = run("--phase", "decode", "--fixed", "cache.key=BTKD")
    assert code == 2
    assert "--fixed cache.key=BTKD: the layout has no line 'cache.key'" in said
    code, _, said = run("--remat", "none", "--mesh", "x=4", "--fixed", "moe.w_in=XEF_x")
    assert code == 2
    assert "cannot fix moe.w_in: the layout has no such line, or the program does not read it." in said
    code, _, said = run("--stages", "--fixed", "ffn.w_in=E_xF", "--layout", "zero-3")
    assert code == 2
    assert "--fixed gives lines of a layout without stages; leave it, or --stages, out." in said
    assert "--layout is for a custom model (--model); the lines of this model are known. Leave it out." in said
