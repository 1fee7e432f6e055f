"""The search problems of serving: prompts that are read into a cache, and tokens that are read one by one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

import jax

from gspmd.layouts import Layout
from gspmd.layouts.rules.keys import KEYS
from gspmd.search.finding import MeshProblem
from gspmd.search.lines import Lines
from gspmd.search.phase import Case, PhaseProblem, read_alike
from gspmd.search.program import Build, TracedProgram

from ..config import ModelConfig
from ..decoding.programs import serving_program
from ..decoding.serving import for_serving
from .unsearched import Unsearched
from .workload import Phase, Workload, absent_of, base_of

_ROWS = ("moe.expert_input", "moe.in_via", "moe.hidden", "moe.out_via")
"""Lines of rows that have arrived at their experts, where they stay: these lie alike, and C is whole."""


class ServingProblem(PhaseProblem):
    """The search problem of one phase of serving on one mesh, whose terms are read from the program.

    Activations keep their length whole; what the two phases store may differ, since each is searched for itself.

    Args:
        workload: the step, whose phase is `"prefill"` or `"decode"`.
        mesh: sizes of the mesh axes.

    Raises:
        Unsearched: experts that choose among tokens.
    """

    def __init__(self, workload: Workload, mesh: Mapping[str, int]):
        moe, phase = workload.config.moe, workload.phase
        if moe and not moe.causal:
            why = f"the experts of router {moe.router} choose among tokens that are not there yet"
            raise Unsearched("layouts to serve this model", [why])
        config, length = for_serving(workload.config), workload.length
        room = workload.room or length
        sizes = config.sizes(workload.batch, 1 if phase == "decode" else length) | {"T": room}
        super().__init__(
            Case(config, sizes, dict(mesh), workload.chip, workload.dtype, trains=False, absent=absent_of(config))
        )
        self.phase = phase
        stored = workload.weights, workload.cache
        self._step = config, phase, workload.batch, length, room, workload.dtype, *stored, workload.fixed

    @cached_property
    def question(self) -> MeshProblem:
        """The search on this mesh."""
        built, lines, program = read_phase(*self._step)
        return MeshProblem(built, program, lines, self.axes, self.case.chip, dimensions=self.case.sizes)


@lru_cache(maxsize=64)
def read_phase(
    config: ModelConfig,
    phase: Phase,
    batch: int,
    length: int,
    room: int,
    dtype: str,
    weights: str,
    cache: str,
    fixed: tuple[tuple[str, str], ...] = (),
) -> tuple[Build, Lines, TracedProgram]:
    """Return how a program of serving is built, with its lines and the program, which are the same on every mesh."""
    stored: Any = {name: "int8" for name, kind in {"weights": weights, "cache": cache}.items() if kind == "int8"}

    def build(layout: Layout, mesh: jax.sharding.Mesh) -> tuple[Any, ...]:
        program = serving_program(
            config, layout, mesh, phase, batch=batch, length=length, room=room, dtype=dtype, **stored
        )
        return program.step, *program.arguments

    return build, *read_alike(build, _lines(config, fixed))


@lru_cache(maxsize=64)
def _lines(config: ModelConfig, fixed: tuple[tuple[str, str], ...]) -> Lines:
    """The lines of a model that is served, tied as any of its programs so far has wanted them."""
    lines = Lines.of(Layout.load(base_of(config)), {}).served()
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
