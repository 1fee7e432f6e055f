"""The search problems of serving: encoding of sources, prefill of prompts into a cache, and decoding of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from math import gcd
from typing import Any

import jax

from gspmd.layouts import Layout
from gspmd.layouts.rules.keys import KEYS
from gspmd.search.finding import MeshProblem
from gspmd.search.lines import Lines
from gspmd.search.phase import Case, PhaseProblem, ReadProgram, read_alike

from ..config import ModelConfig
from ..decoding.cache import SELF
from ..decoding.programs import serving_program
from ..decoding.serving import for_serving
from .workload import BASE, Phase, Unsearched, Workload

_ROWS = ("moe.expert_input", "moe.in_via", "moe.hidden", "moe.out_via")
"""Lines of the arrays on whose rows experts compute. All of them shard G and X alike, so that rows stay in place, and
leave C unsharded.
"""


class ServingProblem(PhaseProblem):
    """The search problem of one phase of serving on one mesh, with terms read from a trace of the program.

    Dimension L of activations stays unsharded. Each phase is searched by itself, so the layouts of two phases may store
    weights and cache differently.

    Args:
        workload: the step to search for, with phase `"encode"`, `"prefill"` or `"decode"`.
        mesh: sizes of the mesh axes.

    Raises:
        Unsearched: the router lets experts choose tokens.
    """

    def __init__(self, workload: Workload, mesh: Mapping[str, int]):
        moe, phase = workload.config.moe, workload.phase
        if moe and not moe.causal:
            why = f"the experts of router {moe.router} choose among tokens that do not exist yet"
            raise Unsearched("layouts to serve this model", [why])
        config, length = for_serving(workload.config), workload.length
        room, source = workload.room or length, config.tokens_of_source(workload.source_length, length)
        tokens = {"encode": source, "decode": 1}.get(phase, length)
        # The caches of texts and of their sources may differ in length.
        sizes = config.sizes(workload.batch, tokens) | {"T": source if phase == "encode" else gcd(room, source)}
        super().__init__(Case(config, sizes, dict(mesh), workload.chip, workload.dtype, trains=False))
        self.phase = "decode" if phase == "decode" else "prefill"
        # Beams of a prompt lie on one device, so devices divide the prompts and not only the rows.
        self._prompts = workload.batch // workload.beams if workload.beams else 0
        stored = workload.weights, workload.cache
        self._step = config, phase, workload.batch, length, room, source, workload.dtype, *stored, workload.fixed

    @cached_property
    def question(self) -> MeshProblem:
        """The problem on this mesh."""
        built, program, lines = read_phase(*self._step)
        if self._prompts:
            rows = lines.unknown(f"cache.{SELF}", "B")
            sizes = program.sizes.get(rows, frozenset()) | {self._prompts}
            program = replace(program, sizes={**program.sizes, rows: sizes})
        return MeshProblem(built, program, lines, self.axes, self.case.chip, dimensions=self.case.sizes)


@lru_cache(maxsize=64)
def read_phase(
    config: ModelConfig,
    phase: Phase,
    batch: int,
    length: int,
    room: int,
    source_length: int,
    dtype: str,
    weights: str,
    cache: str,
    fixed: tuple[tuple[str, str], ...] = (),
) -> ReadProgram:
    """Trace the program of a phase of serving, which is the same on every mesh."""
    stored: Any = {name: "int8" for name, kind in {"weights": weights, "cache": cache}.items() if kind == "int8"}

    def build(layout: Layout, mesh: jax.sharding.Mesh) -> tuple[Any, ...]:
        program = serving_program(
            config, layout, mesh, phase, batch=batch, length=length, room=room, dtype=dtype,
            source_length=source_length, **stored,
        )  # fmt: skip
        return program.step, *program.arguments

    return read_alike(build, _lines(config, phase, fixed))


@lru_cache(maxsize=64)
def _lines(config: ModelConfig, phase: Phase, fixed: tuple[tuple[str, str], ...]) -> Lines:
    """Return the lines of a model for a phase of serving, with the ties that the programs traced so far need."""
    lines = Lines.of(Layout.load(BASE), {}).served()
    lines.fixed = dict(fixed)
    lines.check_fixed()
    for name, key in KEYS.items():
        if key.kind == "activation":
            lines.whole.setdefault(name, set()).add("L")
    for line in _ROWS if config.moe else ():
        lines.hold(lines.unknown(line, "C"))
        for dim in "GX":
            lines.tie(lines.unknown(line, dim), lines.unknown(_ROWS[0], dim))
    return lines
