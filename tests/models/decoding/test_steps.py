"""Prefill and decode steps: the logits of a full forward pass at every position, whatever the layouts and chunks."""

import itertools
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.layouts.layout import presets
from gspmd.moe import MoEConfig
from gspmd_models.decoding import decode_step, for_serving, phases, prefill_step, served

ROWS, LENGTH, ROOM = 8, 12, 16
READ = np.array([1, 3, 8, 5, 8, 2, 7, 4])
"""Tokens that the prefill reads of each row; the rest is decoded."""


@dataclass(frozen=True)
class Case:
    """A model, the layouts in which it reads and decodes, and how."""

    config: dict
    decode: str
    prefill: str | None = None
    chunk: int = 4
    lowering: str = "blocking"
    devices: int = 8
    mesh: dict | None = None
    changes: dict | None = None

    def __str__(self) -> str:
        settings = ",".join(f"{name}={value}" for name, value in self.config.items() if name != "moe")
        moe = "moe," * ("moe" in self.config)
        return f"{moe}{settings}-{self.decode}-{self.prefill or 'same'}-{self.chunk}-{self.lowering}"


def full_pass(settings, tokens, make_mesh):
    """Logits of a whole forward pass on one device, [B, L, V], and the parameters by path."""
    layout = Layout.load("replicated")
    mesh = make_mesh(layout.mesh_for(1))
    with jax.set_mesh(mesh):
        model = models.build(settings, layout, mesh, jax.random.key(0))
        return np.asarray(jax.jit(lambda ids: model(ids)[0])(tokens))


def read_and_decode(case, settings, tokens, make_mesh, axis_type="explicit", *, int8=False):
    """Logits of the last token of every chunk of READ, by row and position, then of every decoded one."""
    layout = Layout.load(case.decode).override(case.changes or {})
    mesh, found = make_mesh(case.mesh or layout.mesh_for(case.devices), axis_type), {}
    sizes = [settings.sizes(ROWS, length) | {"T": ROOM} for length in (case.chunk, 1)]
    reading, writing = phases(layout, case.prefill and Layout.load(case.prefill), sizes=tuple(sizes), mesh=mesh)
    with jax.set_mesh(mesh), gspmd.lowering(case.lowering):
        model = models.build(settings, writing, mesh, jax.random.key(0))
        weights, whole = models.arrays(model), jax.NamedSharding(mesh, jax.P())
        fresh = case.chunk >= READ.max()  # as the Generator reads prompts of one chunk
        prefill = jax.jit(prefill_step(served(model, reading), fresh=fresh), donate_argnums=3)
        decode = jax.jit(decode_step(model), donate_argnums=2)
        cache = models.empty_cache(settings, writing, mesh, ROWS, ROOM, model.dtype, int8=int8)
        where = models.abstract_tokens(reading, mesh, ROWS, case.chunk).sharding
        for start in range(0, READ.max(), case.chunk):
            counts = np.clip(READ - start, 0, case.chunk).astype(np.int32)
            padded = np.pad(tokens, ((0, 0), (0, case.chunk)), constant_values=1)[:, start : start + case.chunk]
            logits, cache = prefill(weights, jax.device_put(padded, where), jax.device_put(counts, whole), cache)
            logits = np.asarray(logits)
            found |= {(row, start + count - 1): logits[row] for row, count in enumerate(counts) if count}
        for step in range(LENGTH - READ.max()):
            at = READ + step
            logits, cache = decode(weights, jax.device_put(tokens[np.arange(ROWS), at], whole), cache)
            found |= {(row, at[row]): np.asarray(logits)[row] for row in range(ROWS)}
    assert np.asarray(cache.lengths).tolist() == (READ + LENGTH - READ.max()).tolist()
    return found


def check(case, config, make_mesh, axis_type="explicit", tolerance=1e-5, **options):
    """That every logit is that of the full pass, up to `tolerance` times the largest of them."""
    settings = for_serving(config(**case.config))
    tokens = np.random.default_rng(0).integers(0, settings.vocabulary, (ROWS, LENGTH)).astype(np.int32)
    wanted = full_pass(settings, tokens, make_mesh)
    for (row, at), logits in read_and_decode(case, settings, tokens, make_mesh, axis_type, **options).items():
        np.testing.assert_allclose(logits, wanted[row, at], rtol=tolerance, atol=tolerance * np.abs(wanted).max())


DIAGONAL = [
    Case(
        {"block": "parallel", "kv_heads": 1}, "weight-stationary-2d", "weight-gathered-xyz", chunk=3, lowering="looped"
    ),
    Case(
        {"heads": 6, "kv_heads": 3, "tied": False},
        "megatron-1d",
        lowering="xla",
        mesh={"x": 2, "y": 4, "z": 1},
        changes={"padding.K": 4, "ffn.residual": "B_xL_yzE", "attention.residual": "B_xL_yzE"},
    ),
    Case({"heads": 6, "kv_heads": 3, "layers": 1}, "megatron-1d", chunk=8, mesh={"x": 2, "y": 2, "z": 1}),
    pytest.param(Case(
        {"moe": MoEConfig(router="gshard")}, "gshard",
        mesh={"x": 2, "y": 2, "z": 2}, changes={"cache.attention.key": "B_xyT_zKD"},
    ), marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("case", DIAGONAL, ids=str)
def test_every_position_is_that_of_a_full_pass(case, config, make_mesh):
    check(case, config, make_mesh)


HEADS = {"whole": 8, "grouped": 4, "multiquery": 1}
ATTENTION = {
    "heads": {"query": "BLH_xyzD", "key": "BLKD"},
    "z": {"query": "B_zLH_xyD", "key": "B_zLKD"},
    "yz": {"query": "B_yzLH_xD", "key": "B_yzLKD"},
    "xyz": {"query": "B_xyzLHD", "key": "B_xyzLKD"},
    "length": {"query": "B_xLH_yzD", "key": "B_xLKD", "cache": "B_xT_yzKD"},
    "both": {"query": "B_zLH_xyD", "key": "B_zLKD", "cache": "B_yT_xKD"},
}
MESHES = ({"x": 8, "y": 1, "z": 1}, {"x": 2, "y": 2, "z": 2}, {"x": 4, "y": 2, "z": 1})
LOWERINGS = ("xla", "blocking", "looped")


def attention_layouts():
    """Every layout of attention, block and kind of heads; lowering and mesh take turns, so that all pairs come up."""
    kinds = itertools.product(ATTENTION, ("serial", "parallel"), HEADS)
    for number, (name, block, heads) in enumerate(kinds):
        at = ATTENTION[name]
        keys = itertools.product(("prefill", "decode"), ("query", "key"))
        changes = {f"{phase}.attention.{key}": at[key] for phase, key in keys}
        changes |= {"cache.attention.key": at["cache"]} if "cache" in at else {}
        base = "weight-stationary-2d" if number % 2 else "weight-stationary-1d"
        turn = number + number // 3
        yield Case(
            {"block": block, "kv_heads": HEADS[heads]}, base, chunk=3 + number % 3, changes=changes,
            lowering=LOWERINGS[turn % 3], mesh=MESHES[(turn // 3) % 3],
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["chunks", "whole"])
@pytest.mark.parametrize("case", [*attention_layouts()], ids=str)
def test_attention_lies_in_any_way(case, whole, config, make_mesh):
    check(replace(case, chunk=8) if whole else case, config, make_mesh)


@pytest.mark.slow
@pytest.mark.parametrize("preset", presets())
def test_every_preset_reads_and_decodes(preset, config, make_mesh):
    number = presets().index(preset)
    settings = {"moe": MoEConfig(router=("switch", "gshard", "top-k")[number % 3])}
    check(Case(settings, preset, lowering=LOWERINGS[number % 3]), config, make_mesh, ("explicit", "auto")[number % 2])


@pytest.mark.slow
def test_an_int8_cache_is_nearly_the_same_and_does_not_depend_on_chunks(config, make_mesh):
    case = Case({"kv_heads": 4}, "weight-stationary-2d", chunk=3)
    check(case, config, make_mesh, tolerance=0.02, int8=True)
    settings = config(kv_heads=4)
    tokens = np.random.default_rng(0).integers(0, settings.vocabulary, (ROWS, LENGTH)).astype(np.int32)
    both = [read_and_decode(replace(case, chunk=chunk), settings, tokens, make_mesh, int8=True) for chunk in (2, 8)]
    for at in both[0].keys() & both[1].keys():
        np.testing.assert_allclose(both[0][at], both[1][at], rtol=1e-4, atol=1e-5)
