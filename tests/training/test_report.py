"""The printed report: tables, pictures, the header and the sample."""

import io
import json
import os
import shlex
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from matplotlib import image
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console

from gspmd import host
from gspmd.annotate import Spec
from gspmd.commands import runner
from gspmd.training.reporting import memory, plots, report, tables
from gspmd.training.reporting.metrics import Metrics
from gspmd.training.toml import ConfigError


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=120)


def text(console, *things):
    for thing in things:
        console.print(thing)
    return console.file.getvalue()


def rows(steps=60, layers=2, experts=4):
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        row = {"step": step, "loss": 5.0 / step + 1.5, "bits_per_byte": 7 / step + 2}
        layered = {name: rng.random(layers).tolist() for name in ("dropped", "entropy", "confidence")}
        yield row | layered | {"load": rng.dirichlet(np.ones(experts), layers).tolist()}
    yield {"step": steps, "val_bits_per_byte": 2.2, "gzip_bits_per_byte": 2.05}


@pytest.mark.parametrize(("spec", "held"), [("x", 32), ("", 4 * 32)], ids=["shards", "copies"])
def test_what_devices_have_no_room_for_is_refused(spec, held, make_mesh, monkeypatch):
    mesh = make_mesh({"x": 4})
    sharding, devices = jax.NamedSharding(mesh, jax.P(spec or None)), mesh.local_devices
    parts = {name: jax.ShapeDtypeStruct((32,), "float32", sharding=sharding) for name in ("weights", "moments")}
    monkeypatch.setattr(host, "memory", lambda devices: 2 * held)
    memory.check("cannot:", parts, devices, "Stop.")
    monkeypatch.setattr(host, "memory", lambda devices: 2 * held - 1)
    fact = f"{held} B of weights and {held} B of moments on each of 4 devices, which has {2 * held - 1} B, its share"
    with pytest.raises(ConfigError, match=f"^cannot:\n  it takes {fact} .* Stop.$"):
        memory.check("cannot:", parts, devices, "Stop.")


def test_the_memory_of_host_devices_is_shared_and_that_of_their_container(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_LIMIT", tmp_path / "memory.max")
    one = host.memory(jax.devices()[:1])
    assert one == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host.memory(jax.devices()[:4]) == one // 4
    for limit, wanted in (("max", one), ("4000", 4000), (str(2 * one), one)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert host.memory(jax.devices()[:1]) == wanted


def test_tensors_with_their_pieces(console):
    placed = {"ffn.w_in": (Spec.parse("E_xF_y"), (512, 2048)), "norm": (Spec.parse("E"), (512,))}
    shown = text(console, tables.tensors("Parameters", placed, {"x": 4, "y": 2}))
    assert "E_xF_y" in shown
    assert "128 × 1024" in shown
    assert "524 kB" in shown
    assert "526 kB" in shown


def rows_of(shown):
    """The first and last cells of every row of a table."""
    return {row[0]: row[-1] for row in cells(shown) if row[-1].endswith("B")}


def cells(shown):
    """The rows of a table, without its borders."""
    lines = (line.translate(dict.fromkeys(map(ord, "┃│"), "|")) for line in shown.splitlines())
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]


def blocks(number):
    """A block's norm and two pairs of matrices that stand alike."""
    for name, spec, shape in (("norm", "NE", (2, 8)), ("w_q", "NEHD", (2, 8, 2, 4)), ("w_k", "NEKD", (2, 8, 2, 4))):
        yield f"blocks.{number}.attention.{name}", (Spec.parse(spec), shape)
    for name in ("w_in", "w_gate"):
        yield f"blocks.{number}.ffn.{name}", (Spec.parse("NEF_x"), (2, 8, 16))
    yield f"blocks.{number}.ffn.norm", (Spec.parse("NE"), (2, 8))


def test_what_stands_alike_is_one_row(console):
    placed = dict(pair for number in range(3) for pair in blocks(number))
    shown = text(console, tables.tensors("Parameters", placed, {"x": 2}))
    assert rows_of(shown) == {
        "blocks.{0..2}.{attention,ffn}.norm": "384 B",
        "blocks.{0..2}.attention.w_q": "1.54 kB",
        "blocks.{0..2}.attention.w_k": "1.54 kB",
        "blocks.{0..2}.ffn.{w_in,w_gate}": "3.07 kB",
        "all": "6.53 kB",
    }


def test_a_row_stands_for_its_tensors_and_no_others():
    placed = {f"blocks.{number}.{name}": (Spec.parse("E"), (8,)) for number, name in ((0, "a"), (0, "b"), (1, "a"))}
    other = {"c.a": ("E", (8,)), "d.a": ("F", (8,)), "e.a": ("E", (9,)), "f": ("E", (8,))}
    placed |= {name: (Spec.parse(spec), shape) for name, (spec, shape) in other.items()}
    rows = tables._alike(placed)
    assert sorted(name for row in rows for name in row.names) == sorted(placed)
    assert [row.name for row in rows] == ["blocks.0.{a,b}", "blocks.1.a", "c.a", "d.a", "e.a", "f"]


@pytest.mark.parametrize(("width", "shapes"), [(120, (True, True)), (90, (False, True)), (80, (False, False))])
def test_a_narrow_terminal_leaves_out_shapes_and_nothing_else(width, shapes):
    narrow = Console(file=io.StringIO(), width=width)
    placed = {"blocks.0.attention.w_gate": (Spec.parse("NE_{data}H_{model}D"), (12, 1024, 64, 128)),
              "embedding.table": (Spec.parse("VE"), (32_000, 1024))}  # fmt: skip
    report.show_tensors(narrow, "Parameters", placed, SimpleNamespace(shape={"data": 2, "model": 4}))
    head, *rows = cells(narrow.file.getvalue())
    assert max(map(len, narrow.file.getvalue().splitlines())) <= width
    assert ("whole shape" in head, "on one device" in head) == shapes
    assert {(row[0], row[1], row[-1]) for row in rows} >= {
        ("blocks.0.attention.w_gate", "NE_{data}H_{model}D", "50.3 MB"), ("embedding.table", "VE", "131 MB"),
    }  # fmt: skip


def test_where_not_even_names_fit_they_go_on_in_the_next_line():
    narrow = Console(file=io.StringIO(), width=30)
    narrow.print(tables.tensors("Parameters", dict(blocks(0)), {"x": 2}))
    assert "…" not in narrow.file.getvalue()
    assert "2.18 kB" in narrow.file.getvalue()


def test_pictures_are_drawn(tmp_path):
    plots.loss_curve(list(rows()), tmp_path / "loss.png")
    assert plots.expert_load(list(rows()), tmp_path / "experts.png")
    for name in ("loss.png", "experts.png"):
        pixels = image.imread(tmp_path / name)
        assert pixels.shape[1] > 800
        assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 20


@pytest.mark.parametrize(("name", "value"), [("val_bits_per_byte", 30.0), ("gzip_bits_per_byte", 12.0)])
def test_a_curve_that_ends_above_the_clipped_axes_leaves_room_for_them(tmp_path, name, value):
    """Warnings are errors: matplotlib warns if a label takes all the room."""
    plots.loss_curve([*rows(), {"step": 60, name: value}], tmp_path / "loss.png")
    assert image.imread(tmp_path / "loss.png").std() > 0.05


def test_a_mean_neither_lags_nor_is_biased_at_its_ends():
    line = 3 - 0.01 * np.arange(200)
    np.testing.assert_allclose(plots._smooth(line), line, atol=1e-12)
    np.testing.assert_array_equal(plots._smooth(line[:49]), line[:49])
    noisy = line + np.random.default_rng(0).normal(0, 0.1, 200)
    assert np.abs(plots._smooth(noisy) - line).std() < 0.05


def test_labels_that_would_overlap_move_apart():
    assert plots._apart([0.5, 0.9, 0.1], 0.05) == [0.5, 0.9, 0.1]
    moved = plots._apart([0.5, 0.52, 0.51], 0.05)
    assert np.argsort(moved).tolist() == [0, 2, 1]
    assert np.diff(np.sort(moved)).min() > 0.05 - 1e-12
    assert np.mean(moved) == pytest.approx(0.51)


def test_the_curve_says_what_it_is_and_of_which_run(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(plots.images, "save", lambda figure, *_: saved.append(figure))
    plots.loss_curve(list(rows()), tmp_path / "loss.png", "001 · zero-3 on 8 devices")
    plots.expert_load(list(rows()), tmp_path / "experts.png", "001 · zero-3 on 8 devices")
    (axes,) = saved[0].axes
    assert [label.get_text().rpartition(" ")[0] for label in axes.texts] == ["training", "held out", "gzip"]
    assert axes.get_title(loc="right") == "001 · zero-3 on 8 devices"
    assert "001 · zero-3 on 8 devices" in [text.get_text() for text in saved[1].texts]


def test_held_out_text_far_above_the_rest_is_cut_off_and_labels_are_not(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots.images, "save", lambda figure, *_: drawn.append(figure))
    steps = range(1, 61)
    early = [{"step": at, "bits_per_byte": 1.0 + 40 / at**2, "val_bits_per_byte": 1.1 + 40 / at} for at in steps]
    plots.loss_curve(early, tmp_path / "loss.png", "a run")
    canvas, (axes,) = FigureCanvasAgg(drawn[0]), drawn[0].axes
    canvas.draw()
    for label in axes.texts:
        box = label.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= drawn[0].bbox.x1, label.get_text()
    points = next(line for line in axes.lines if line.get_marker() == "o")
    assert 0 < len(points.get_ydata()) < 60
    assert max(points.get_ydata()) <= axes.get_ylim()[1]


def test_a_short_run_can_be_drawn(tmp_path):
    plots.loss_curve(list(rows(steps=1)), tmp_path / "loss.png")
    assert plots.expert_load(list(rows(steps=1, layers=1)), tmp_path / "experts.png")


def test_steps_are_whole_numbers_on_the_axis_of_a_short_run(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots.images, "save", lambda figure, *_: drawn.append(figure))
    plots.loss_curve(list(rows(steps=5)), tmp_path / "loss.png")
    ticks = drawn[0].axes[0].get_xticks()
    assert all(tick == int(tick) for tick in ticks), ticks


def test_a_long_run_has_no_column_narrower_than_a_reader_sees():
    found = list(rows(steps=1001))[:-1]
    edges, load = plots._binned(found)
    assert (len(edges), load.shape) == (241, (240, 2, 4))
    assert (edges[0], edges[-1]) == (0.5, 1001.5)
    widths = np.diff(edges)[:, None, None]
    every = np.array([row["load"] for row in found])
    np.testing.assert_allclose((load * widths).sum(0), every.sum(0), rtol=1e-12)


def test_the_end_of_a_layer_is_the_mean_of_its_last_tenth():
    found = [{"dropped": [step / 100, 0.0], "entropy": [1.0, 2.0]} for step in range(20)]
    assert plots._ending(found, 0) == "at the end: 18.5% dropped, entropy 1.00"
    assert plots._ending([{}], 0) == ""


def test_a_dense_model_has_no_load(tmp_path):
    assert not plots.expert_load([{"step": 1, "loss": 1.0}], tmp_path / "experts.png")
    assert not (tmp_path / "experts.png").exists()


def test_sample_may_hold_anything(console, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "bits_per_byte": 1.4}\n')
    with Metrics(tmp_path, resumed_at=1) as metrics:
        report.finish(console, tmp_path, "mine", "def ", lambda: "def [/bold] f\x00\x07(x):\n    return", metrics)
    assert (tmp_path / "sample.txt").read_text() == "def [/bold] f\x00\x07(x):\n    return"
    shown = console.file.getvalue()
    assert "def [/bold] f" in shown
    assert "\x07" not in shown


def test_header(console):
    report.header(console, {"mesh": "x=4, y=2 [explicit]"})
    assert "x=4, y=2 [explicit]" in console.file.getvalue()


def test_bytes_are_those_of_the_compute_type(console):
    placed = {
        "embedding.tokens": (Spec.parse("BL"), (4, 8)),
        "ffn.hidden": (Spec.parse("BLF"), (4, 8, 2)),
        "output.logits": (Spec.parse("BLV"), (4, 8, 2)),
    }
    report.show_tensors(console, "Activations", placed, SimpleNamespace(shape={"x": 2}), "bfloat16")
    assert rows_of(console.file.getvalue()) == {
        "embedding.tokens": "128 B", "ffn.hidden": "128 B", "output.logits": "256 B", "all": "512 B",
    }  # fmt: skip


def test_the_closing_box_has_commands_that_can_be_copied(tmp_path):
    rows = [{"step": step, "loss": 2.0, "tokens_per_second": 1000.0 * step, "mfu": 0.1 * step} for step in (1, 2, 3)]
    rows[1]["val_bits_per_byte"] = 2.0
    rows.append({"step": 3, "val_bits_per_byte": 2.125, "gzip_bits_per_byte": 2.25})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sample.txt").touch()
    narrow = Console(file=io.StringIO(), width=40)
    commands = runner.next_commands(Path("my [runs]/001"), 3, "it's ", "gspmd train")
    report.closing(narrow, tmp_path, 272.0, commands)
    shown = narrow.file.getvalue()
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[0].startswith("── done in 4 min 32 s ──")
    assert "gspmd train --resume --out 'my [runs]/001' --steps 6" in lines
    (generate,) = (line for line in lines if line.startswith("gspmd generate"))
    assert shlex.split(generate) == ["gspmd", "generate", "--checkpoint", "my [runs]/001", "--prompt", "it's "]
    assert "steps          3, 1,636 tokens per second on average, 16.4% MFU" in lines
    assert "held-out text  2.125 bits per byte at the end; the best was 2.000, at step 2" in lines
    assert f"figures        {tmp_path}/metrics.jsonl" in lines
    assert f"text           {tmp_path}/sample.txt" in lines
    assert not any(line.startswith(("checkpoints", "pictures", "profile")) for line in lines)


def test_a_script_is_sampled_from_by_the_one_beside_it(monkeypatch):
    monkeypatch.setattr("sys.argv", ["scripts/train_moe.py"])
    assert runner.next_commands(Path("runs/001"), 3, "def ") == {
        "to train on": "python scripts/train_moe.py --resume --out runs/001 --steps 6",
        "to sample from it": "python scripts/generate.py --checkpoint runs/001 --prompt 'def '",
    }
    assert list(runner.next_commands(Path("runs/001"), 3, None)) == ["to train on"]
