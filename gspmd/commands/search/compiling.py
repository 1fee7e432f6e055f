"""The best few layouts and the best preset, compiled for the slice: their order is that of the compiled programs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field, replace
from io import StringIO
from math import isclose
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

import gspmd
from gspmd import host
from gspmd.audit import Report, Topology, topology
from gspmd.commands import compile as offline
from gspmd.commands.search.settings import Settings
from gspmd.display.units import mesh_text
from gspmd.layouts import Layout
from gspmd.search import Answer, NothingFits
from gspmd.training import ShardingConfig
from gspmd_models.parameters import stages_axes
from gspmd_models.search.answers import Candidate, Finding, document
from gspmd_models.search.answers.document import PRICED, Remark
from gspmd_models.search.answers.presets import Placed

APART = 0.01
"""The share of a step from which on layouts count as different, so that compiling both says more than compiling one."""
SAME = 1e-6
"""The share up to which they are the same."""


@dataclass(frozen=True)
class Listed:
    """A layout of the shortlist.

    Attributes:
        name: what it is the best of, or the preset's name.
        candidate, answer: the mesh, and where the layout lies in the space.
        mesh: sizes by the names of the layout's own mesh axes.
        preset: whether it was written.
        lowering: under which it is compiled; planned it is under `blocking`.
        report: what the compiler made of it.
    """

    name: str
    candidate: Candidate
    answer: Answer
    mesh: Mapping[str, int]
    preset: bool = False
    lowering: str = PRICED
    report: Report | None = field(default=None, repr=False)

    @property
    def called(self) -> str:
        """The name, and the lowering where that is not the one that is planned."""
        return self.name if self.lowering == PRICED else f"{self.name}, lowering {self.lowering}"

    @property
    def seconds(self) -> float:
        """Those of the compiled program; infinite if it does not fit."""
        line = self.report and self.report.timeline
        return line.step_seconds if line else float("inf")


def shortlist(finding: Finding, said: Mapping[str, Remark], count: int) -> list[Listed]:
    """The answer, and the cheapest layouts that spend a hundredth of a step otherwise than each of those before.

    They are the best with another option of some choice, and the best on another mesh, with another choice of remat or
    in other microbatches. Where so few are different, the cheapest of the others follow, but for those that cost the
    same.
    """
    listed = [Listed("found", finding.best, finding.answer, finding.best.phase.costs.mesh)]
    others = sorted(_others(finding, said), key=lambda each: each.answer.seconds) if count > 1 else []
    for apart in (APART, SAME):
        for each in others:
            if len(listed) < count and all(_apart(each, other) >= apart for other in listed):
                listed.append(each)
    return listed


def _others(finding: Finding, said: Mapping[str, Remark]) -> Iterator[Listed]:
    for name, remark in said.items():
        if remark.other is not None:
            yield Listed(f"another {name}", finding.best, remark.other, finding.best.phase.costs.mesh)
    for each in finding.candidates:
        if each != finding.best:
            name = " ".join(filter(None, (f"mesh {each.named}", each.remat, each.in_microbatches)))
            with suppress(NothingFits):
                yield Listed(name, each, each.solve(), each.phase.costs.mesh)


def _apart(one: Listed, other: Listed) -> float:
    """The share of a step that two layouts spend on other parts of the cost; none, if mesh axes have other names.

    Nor if they cost the same in seconds and in bytes: they are taken for one, with mesh axes of equal sizes swapped in
    a part of it, of which the compiler made the same.
    """
    if all(isclose(getattr(one.answer, of), getattr(other.answer, of), rel_tol=1e-9) for of in ("seconds", "bytes")):
        return 0.0
    ours, theirs = (each.candidate.unlimited.seconds_of(each.answer.picks) for each in (one, other))
    moved = sum(abs(ours.get(name, 0.0) - theirs.get(name, 0.0)) for name in {**ours, **theirs})
    return moved / 2 / other.answer.seconds


def _text(listed: Listed) -> str:
    return document(listed.candidate, listed.answer, (), {})


def compiled(settings: Settings, listed: Iterable[Listed]) -> list[Listed]:
    """The shortlist with what the compiler made of it, the fastest program first, those that do not fit last.

    Each is compiled under `blocking`, and once more under `auto` where that loops some of its products: what that hides
    the compiler says better than a plan.

    Raises:
        PlanError: the compiler for TPUs is not installed, or refuses the slice.
    """
    host.keep_compiled(False)  # JAX cannot read back what was compiled for devices that are not there
    host.start(1, "cpu")
    target, done = topology(settings.topology), []
    with TemporaryDirectory() as folder:
        every = [program for each in listed for program in _programs(settings, each, target, Path(folder))]
        for number, each in enumerate(every, 1):
            called = f"{number} of {len(every)}, {each.called}"
            done.append(replace(each, report=offline.compiled(_settings(settings, each, Path(folder)), target, called)))
    return sorted(done, key=lambda each: (each.seconds, each.answer.seconds))


def _programs(settings: Settings, listed: Listed, target: Topology, folder: Path) -> list[Listed]:
    """A layout as it is planned, and with loops where `auto` makes any."""
    programs = [listed, replace(listed, lowering="auto")]
    planned, looped = (_traced(settings, each, target, folder).by_kind_and_axes() for each in programs)
    return programs if looped != planned else programs[:1]


def _traced(settings: Settings, listed: Listed, target: Topology, folder: Path) -> gspmd.ProgramPlan:
    """The steps of a program."""
    mesh, asked = target.mesh(listed.mesh), _settings(settings, listed, folder)
    # What alternatives it takes is no news here.
    with jax.set_mesh(mesh), gspmd.lowering(listed.lowering), redirect_stderr(StringIO()):
        program, args, _ = offline.program_of(asked, offline.layout_of(asked), mesh)
        return gspmd.trace(program, *args)


def _settings(settings: Settings, listed: Listed, folder: Path) -> offline.Settings:
    """Those of `gspmd compile` for a layout."""
    name = listed.name
    if not listed.preset:
        name = str(folder / "found.toml")
        Path(name).write_text(_text(listed))
    sharding = ShardingConfig(
        layout=name,
        mesh=mesh_text(listed.mesh),
        lowering=listed.lowering,
        compiler_options=settings.compiler_options,
    )
    return offline.Settings(
        settings.config, settings.topology, settings.phase, settings.batch, settings.length, dtype=settings.dtype,
        microbatches=listed.candidate.microbatches, model=listed.candidate.phase.costs.config,
        sharding=sharding,
    )  # fmt: skip


def best_preset(presets: Sequence[Placed]) -> list[Listed]:
    """The cheapest preset that fits, in a list; an empty one where none does."""
    fitting = ((each, each.answer) for each in presets if each.answer and each.fits)
    return [Listed(each.name, each.candidate, answer, each.mesh, preset=True) for each, answer in fitting][:1]


def traced(settings: Settings, presets: Iterable[Placed]) -> dict[str, float]:
    """Seconds by `gspmd.trace` of the presets that are not in the space and can be used; none without libtpu.

    Nor of pipelines: their step has slots in which nothing is done, which a trace does not count as a plan does.
    """
    found = {}
    for each in presets:
        if each.answer is not None or not each.usable or _staged(each):
            continue
        try:
            target = topology(settings.topology)
        except gspmd.PlanError:  # no compiler for TPUs is installed, which knows their devices
            return {}
        host.start(1, "cpu")
        listed = Listed(each.name, each.candidate, each.candidate.free, each.mesh, preset=True)
        found[each.name] = _traced(settings, listed, target, Path()).seconds
    return found


def _staged(placed: Placed) -> bool:
    """Whether a preset is a pipeline on its mesh."""
    return any(placed.mesh.get(axis, 1) > 1 for axis in stages_axes(Layout.load(placed.name)))
