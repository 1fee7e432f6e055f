"""Chunks of slots: the number that is asked for, the divisors that there are, and the figures of a chip."""

from dataclasses import replace
from importlib import util

import jax
import jax.numpy as jnp
import pytest

import gspmd
from gspmd.annotate import Spec, parse_via
from gspmd.audit import hlo, timeline, topology
from gspmd.hardware.chips import chip
from gspmd.lowerings.program import Context
from gspmd.moe import MoEConfig, expert_layer
from gspmd.moe.experts import chunks
from gspmd.moe.experts.chunks import chunks_of
from gspmd.moe.experts.dropout import Dropout
from gspmd.moe.experts.work import Buffers, ExpertWork
from tests.moe import placed

LAYOUT = placed.LAYOUTS["one axis"]


def _work(capacity, *, groups=32, embed=2048, feed_forward=8192, **more):
    specs = {name: Spec.parse(spec) for name, spec in LAYOUT.specs.items()}
    sizes = {"G": groups, "X": 32, "C": capacity, "E": embed, "F": feed_forward}
    work = ExpertWork(
        specs["dispatched"], specs["expert_input"], specs["hidden"], (specs["w_gate"], specs["w_in"]), specs["w_out"],
        None, None, "swiglu", tuple(sizes.items()), "bfloat16", "bfloat16",
    )  # fmt: skip
    return replace(work, **more)


def _context(lowering, size=16, name="tpu-v5e"):
    return Context((("x", size),), chip(name), True, lowering)


@pytest.mark.parametrize(("capacity", "wanted"), [(160, (80, 80)), (5, (3, 2)), (2, (1, 1)), (1, (1,))])
def test_looped_cuts_whatever_can_be_cut(capacity, wanted):
    assert chunks_of(_work(capacity), _context("looped")) == wanted


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_other_lowerings_do_not_cut(lowering):
    assert chunks_of(_work(160), _context(lowering)) == (160,)


def test_what_stays_is_not_cut():
    there = Spec.parse("G_xXCE")
    work = _work(160, there=there, hidden=Spec.parse("G_xXCF"), w_in=(Spec.parse("XEF"),) * 2, w_out=Spec.parse("XFE"))
    assert chunks_of(work, _context("looped")) == (160,)


def test_chunks_are_whole_shards_of_slots():
    there, hidden = Spec.parse("GX_xC_yE"), Spec.parse("GX_xC_yF")
    context = replace(_context("looped"), axes=(("x", 4), ("y", 2)))
    assert chunks_of(_work(10, there=there, hidden=hidden), context) == (6, 4)


def test_rows_are_cut_by_tokens():
    """Each token has two rows at most on a shard of two experts."""
    rows = _work(2 * 7, rows=Buffers(shards=16, choices=2))
    assert chunks_of(rows, _context("looped")) == (8, 6)
    assert chunks_of(replace(rows, dropout=Dropout(0.1, 7, 8192)), _context("looped")) == (14,)


def test_a_chips_figures_choose(monkeypatch):
    monkeypatch.setattr(chunks, "_is_known", lambda: True)
    count = lambda lowering, capacity, **more: len(chunks_of(_work(capacity, **more), _context(lowering)))  # noqa: E731
    assert count("auto", 160) == count("looped", 160) == 8
    assert count("auto", 4, groups=16, embed=128, feed_forward=128) == 1  # hops and weights read again cost more
    assert count("looped", 4, groups=16, embed=128, feed_forward=128) == 2


def test_what_equations_hide_by_themselves_counts(monkeypatch):
    """Weights that are gathered, for not too many slots: rings hide that, and chunks would not."""
    monkeypatch.setattr(chunks, "_is_known", lambda: True)
    context = replace(_context("auto"), axes=(("x", 4), ("y", 16)))
    stay, gathered = ("X_xEF", "X_xFE"), ("X_xE_yF", "X_xFE_y")
    vias = {"in_via": parse_via("G_yX_xCE, X_xEF"), "out_via": parse_via("G_yX_xCF, X_xFE")}
    slots = {"dispatched": "G_yxXCE", "there": "G_yX_xCE", "hidden": "G_yX_xCF"}

    def number(w_in, w_out, **more):
        specs = {name: Spec.parse(spec) for name, spec in slots.items()}
        weights = {"w_in": (Spec.parse(w_in),) * 2, "w_out": Spec.parse(w_out)}
        return len(chunks_of(_work(160, groups=64, **specs, **weights, **more), context))

    assert number(*stay) == 2
    assert number(*gathered, **vias) == 1


@pytest.mark.parametrize("cut", [(160,), (80, 80), (81, 79), (40, 40, 40, 40)], ids=str)
def test_chunks_send_what_the_whole_would(cut):
    work, context = _work(160), _context("looped")
    ways = [work.there_and_back(context, capacity) for capacity in cut]
    sent = sum(step.wire_bytes for way in ways for steps in way for step in steps)
    assert sent == sum(step.wire_bytes for steps in work.there_and_back(context, 160) for step in steps)


@pytest.mark.slow
@pytest.mark.skipif(util.find_spec("libtpu") is None, reason="the compiler for TPUs, libtpu, is not installed")
def test_on_a_tpu_most_of_what_is_sent_hides_behind_products():
    """The TPU compiler may send all-to-alls asynchronously here, which it does not by itself."""
    hidden = {lowering: _hidden(lowering) for lowering in ("blocking", "looped")}
    assert hidden["blocking"] < 0.1
    assert hidden["looped"] > 0.8


def _hidden(lowering):
    """The share of the all-to-alls' seconds in which something else is done."""
    machine, shapes = topology("tpu-v5e:4x4"), {"router": (2048, 32), "w_out": (32, 8192, 2048)}
    mesh = machine.mesh({"x": 16})
    array = lambda shape, spec, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(  # noqa: E731
        shape, dtype, sharding=jax.NamedSharding(mesh, Spec.parse(spec).partition_spec())
    )
    shapes |= dict.fromkeys(("w_in", "w_gate"), (32, 2048, 8192))
    weights = {name: array(shape, LAYOUT.specs[name]) for name, shape in shapes.items()}
    layer = jax.jit(lambda x, w: expert_layer(x, w, LAYOUT.section, MoEConfig(experts=32, router="gshard"))[0])
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        lowered = layer.lower(array((32, 2048, 2048), LAYOUT.specs["groups"]), weights)
    compiled = lowered.compile(compiler_options={"xla_tpu_enable_async_all_to_all": "true"})
    parts = timeline(hlo.parse(compiled.as_text()), machine.chip, {"x": 16}).parts
    sent = next(part for part in parts if part.category == "all-to-all")
    return 1 - sent.exposed / sent.seconds
