"""Compilation of found layouts as programs for the slice, and traces that give the seconds hidden by loops."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

import gspmd
from gspmd import host
from gspmd.audit import Report, Topology, topology
from gspmd.commands import compile as offline
from gspmd.commands.search.settings import SearchSettings
from gspmd.display.units import mesh_text
from gspmd.layouts import Layout
from gspmd.search import Answer
from gspmd.search.answers import Candidate, document
from gspmd.search.answers.document import PRICED
from gspmd.search.answers.presets import Placed
from gspmd.training import ConfigError, ShardingConfig
from gspmd_models.parameters import stages_axes


@dataclass(frozen=True)
class Listed:
    """A layout of the shortlist, perhaps compiled.

    Attributes:
        name: a name that distinguishes the layout from the others, such as "another ffn.w_in", or the name of a preset.
        candidate: the candidate of the search, which has the mesh.
        answer: the layout, in the form of an answer of the search.
        mesh: sizes of the mesh axes, under the names that the layout uses.
        preset: whether the layout is a preset.
        own: whether the layout is one of --beside, which is compared with the other layouts but never written.
        lowering: the lowering under which the layout is compiled; seconds are always planned under `blocking`.
        hidden: seconds that looped equations save under this lowering, because they send while they multiply; predicted
            by the cost model of `auto`.
        report: the compiler's report, or None if the layout is not compiled.
    """

    name: str
    candidate: Candidate
    answer: Answer
    mesh: Mapping[str, int]
    preset: bool = False
    own: bool = False
    lowering: str = PRICED
    hidden: float = 0.0
    report: Report | None = field(default=None, repr=False)

    @property
    def called(self) -> str:
        """The name, followed by the lowering if it is not `blocking`, under which seconds are planned."""
        return self.name if self.lowering == PRICED else f"{self.name}, lowering {self.lowering}"

    @property
    def expected(self) -> float:
        """The planned seconds, minus the seconds that loops hide."""
        return self.answer.seconds - self.hidden

    @property
    def fits(self) -> bool:
        """Whether the layout has been compiled and fits."""
        return self.report is not None and self.report.fits

    @property
    def seconds(self) -> float:
        """Seconds of the compiled program; infinite if it does not fit or is not compiled."""
        line = self.report and self.report.timeline
        return line.step_seconds if self.fits and line else float("inf")  # GPUs have one even if it does not fit.


def compiled(settings: SearchSettings, listed: Iterable[Listed], both: bool = True) -> Iterator[Listed]:
    """Compile the layouts one after another, and yield each with the compiler's report.

    Args:
        settings: the settings of the search.
        listed: the layouts.
        both: whether to compile each layout under `blocking`, and again under `auto` if `auto` loops any product. The
            second program is compiled because programs show better than plans how much loops hide. If false, each
            layout is compiled only under the lowering with which it is listed.

    Raises:
        PlanError: the compiler for these chips is not installed, or refuses the slice.
    """
    host.keep_compiled(False)  # JAX cannot read back programs compiled for devices that are not attached.
    host.start(1, "cpu")
    target = topology(settings.topology)
    with TemporaryDirectory() as folder:
        where = target, Path(folder)
        every = [program for each in listed for program in (_programs(settings, each, *where) if both else [each])]
        for number, each in enumerate(every, 1):
            called = f"{number} of {len(every)}, {each.called}"
            yield replace(each, report=offline.compiled(_settings(settings, each, Path(folder)), target, called))


def fastest(listed: Iterable[Listed]) -> list[Listed]:
    """Sort compiled layouts by the seconds of their programs; those that do not fit come last."""
    return sorted(listed, key=lambda each: (each.seconds, each.answer.seconds))


def _programs(settings: SearchSettings, listed: Listed, target: Topology, folder: Path) -> list[Listed]:
    """Return a layout under `blocking`, the lowering of its plan, and also under `auto` if `auto` loops any product."""
    blocking, auto = (replace(listed, lowering=name, hidden=0.0) for name in (PRICED, "auto"))
    planned, looped = (_traced(settings, each, target, folder) for each in (blocking, auto))
    if looped.by_kind_and_axes() == planned.by_kind_and_axes():
        return [blocking]
    # The predicted hidden seconds hold only for forward passes: for training, gains were predicted where programs were
    # slower.
    return [blocking, replace(auto, hidden=looped.hidden_seconds if settings.phase != "train" else 0.0)]


def with_loops(settings: SearchSettings, listed: Iterable[Listed]) -> Iterator[Listed]:
    """Yield the layouts under `auto`, each with the seconds that its loops hide.

    Raises:
        PlanError: the compiler for these chips is not installed, or refuses the slice.
    """
    host.start(1, "cpu")
    target = topology(settings.topology)
    with TemporaryDirectory() as folder:
        for each in listed:
            auto = replace(each, lowering="auto")
            yield replace(auto, hidden=_traced(settings, auto, target, Path(folder)).hidden_seconds)


def _traced(settings: SearchSettings, listed: Listed, target: Topology, folder: Path) -> gspmd.ProgramPlan:
    """Trace the program of a layout, and return its planned steps."""
    mesh, asked = target.mesh(listed.mesh), _settings(settings, listed, folder)
    # The choice among alternatives was reported before.
    with jax.set_mesh(mesh), gspmd.lowering(listed.lowering), redirect_stderr(StringIO()):
        program, args, _ = offline.program_of(asked, offline.layout_of(asked), mesh)
        return gspmd.trace(program, *args)


def _settings(settings: SearchSettings, listed: Listed, folder: Path) -> offline.CompileSettings:
    """Return the settings of `gspmd compile` for a layout."""
    name = listed.name
    if not (listed.preset or listed.own):
        name = str(folder / "found.toml")
        Path(name).write_text(document(listed.candidate, listed.answer, (), {}))
    sharding = ShardingConfig(
        layout=name,
        mesh=mesh_text(listed.mesh),
        lowering=listed.lowering,
        compiler_options=settings.compiler_options,
    )
    update = settings.update
    return offline.CompileSettings(
        settings.config, settings.topology, settings.phase, settings.batch, settings.length, dtype=settings.dtype,
        weights=settings.weights, cache=settings.cache, microbatches=listed.candidate.microbatches,
        parameter_dtype=update.parameter_dtype, frozen=update.frozen, optimizer=update.optimizer,
        model_class=settings.model_class, model=listed.candidate.phase.case.config or settings.model,
        sharding=sharding, source_length=settings.source_length,
    )  # fmt: skip


def traced(settings: SearchSettings, presets: Iterable[Placed]) -> list[Placed]:
    """Return the presets; those that the search does not consider get the seconds that `gspmd.trace` predicts.

    Without the compiler no preset is traced. If the step refuses a preset, for example because the preset cuts blocks
    of int8 moments, the returned preset has `usable` False. Pipelines are not traced, because a trace counts the idle
    slots of a pipeline's step differently from a plan.
    """
    every = [*presets]
    outside = [(each, stages_axes(Layout.load(each.name))) for each in every if each.answer is None and each.usable]
    wanted = [each for each, stages in outside if all(each.mesh.get(axis, 1) == 1 for axis in stages)]
    if not wanted:
        return every
    try:
        target = topology(settings.topology)
    except gspmd.PlanError:  # No compiler is installed that knows their devices.
        return every
    host.start(1, "cpu")
    return [_outside(settings, each, target) if each in wanted else each for each in every]


def _outside(settings: SearchSettings, preset: Placed, target: Topology) -> Placed:
    """Trace a preset that the search does not consider, and return it with its seconds.

    If the step refuses the preset, it is returned with the reason instead.
    """
    listed = Listed(preset.name, preset.candidate, preset.candidate.free, preset.mesh, preset=True)
    try:
        return replace(preset, traced=_traced(settings, listed, target, Path()).seconds)
    except (gspmd.LayoutError, gspmd.PlanError, ConfigError) as error:
        faults = error.faults or str(error).splitlines()
        return replace(preset, usable=False, reason=str(getattr(faults[0], "fact", faults[0])))
