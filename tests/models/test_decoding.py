"""Prefill and decode steps: the logits of a full forward pass at every position, whatever the layouts and chunks."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
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
    reading, writing = phases(layout, case.prefill and Layout.load(case.prefill))
    mesh, found = make_mesh(case.mesh or layout.mesh_for(case.devices), axis_type), {}
    with jax.set_mesh(mesh), gspmd.lowering(case.lowering):
        model = models.build(settings, writing, mesh, jax.random.key(0))
        weights, whole = models.arrays(model), jax.NamedSharding(mesh, jax.P())
        prefill = jax.jit(prefill_step(served(model, reading)), donate_argnums=3)
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


def check(case, config, make_mesh, axis_type="explicit"):
    settings = for_serving(config(**case.config))
    tokens = np.random.default_rng(0).integers(0, settings.vocabulary, (ROWS, LENGTH)).astype(np.int32)
    wanted = full_pass(settings, tokens, make_mesh)
    for (row, at), logits in read_and_decode(case, settings, tokens, make_mesh, axis_type).items():
        np.testing.assert_allclose(logits, wanted[row, at], rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


DIAGONAL = [
    Case({"block": "parallel", "kv_heads": 1}, "weight-stationary-2d", "weight-gathered-xyz", chunk=3),
    Case({"kv_heads": 4, "tied": False}, "megatron-1d", chunk=8, lowering="xla", mesh={"x": 2, "y": 4, "z": 1}),
    Case({"moe": MoEConfig(router="gshard"), "layers": 2}, "gshard", lowering="looped"),
]


@pytest.mark.parametrize("case", DIAGONAL, ids=str)
def test_every_position_is_that_of_a_full_pass(case, config, make_mesh):
    check(case, config, make_mesh)
