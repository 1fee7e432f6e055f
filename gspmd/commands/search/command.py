"""The best layout of a model on a TPU slice, searched exactly: a file to read, to change and to train with.

    gspmd search --config llama-2-70b --topology tpu-v5p:4x8x8 --batch 1024 --length 4096 --out found.toml

Layouts are priced as gspmd plans them, on every mesh whose axes are whole torus axes. The answer says by how much any
other that fits in memory may be faster: by 0.05% at most, as a rule. Nothing runs, and nothing is compiled unless
--compile asks for it. Exit code 1 if nothing fits.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.markup import escape

from gspmd.annotate import LayoutError
from gspmd.commands.search import compiling, figures, picture, shortlist, shown
from gspmd.commands.search.missing import nothing_fits
from gspmd.commands.search.settings import Settings
from gspmd.commands.search.settings import parse as parse_settings
from gspmd.commands.search.slice import Slice
from gspmd.commands.search.unpriced import remedied
from gspmd.commands.search.written import beside, header, header_of_stages, seconds
from gspmd.display import console as printing
from gspmd.display.progress import Progress
from gspmd.display.tables import Sheet
from gspmd.training import command
from gspmd.training.config import ConfigError, parse_mesh
from gspmd_models import ModelConfig
from gspmd_models.search import stages as pipelines
from gspmd_models.search.answers import Candidate, Finding, NoneFits, Space, document, find, meshes, problem_of
from gspmd_models.search.answers.document import Remark, of_lines, remarks
from gspmd_models.search.answers.frontier import Point, frontier
from gspmd_models.search.answers.microbatches import Range
from gspmd_models.search.answers.presets import Placed, placed_presets
from gspmd_models.search.answers.why import Why, why
from gspmd_models.search.pipeline import StageProblem
from gspmd_models.search.workload import Workload


def run(argv: Sequence[str], script: str = "") -> int:
    """Run `gspmd search`; return its exit code: 1 if nothing fits, 2 for bad input, 130 for an interrupt.

    Args:
        argv: the flags.
        script: the file in scripts/ that runs it instead, for the help.
    """
    said = "Interrupted before a layout was found that fits."
    return command.guarded(
        partial(main, script=script), argv, called="" if script else "gspmd search", interrupted=said
    )


def parse(argv: Sequence[str], script: str = "") -> Settings:
    """The settings: those of the file, replaced by flags."""
    return parse_settings(argv, script, __doc__)


def main(argv: Sequence[str], script: str = "") -> int:
    """Search, write and print; return the exit code."""
    settings = parse(argv, script)
    target = Slice.named(settings.topology)
    with Progress(printing.console(stderr=True), "Searching") as progress:
        try:
            refuse_unsearched(settings, target)
            finding = find(spaces(settings, target), limit_of(settings, target), partial(said, progress))
        except NoneFits as fault:
            message = nothing_fits(fault, settings, target, partial(spaces, settings), progress.begin)
        else:
            message = ""
            found = Found(finding, interrupted=not finding.complete)
            if finding.complete:
                look_closer(found, settings, progress)
    if message:
        print(message, file=sys.stderr)
        return 1
    report(found, settings, target, argv)
    for fault in found.faults:
        print(fault, file=sys.stderr)
    return 130 if found.interrupted else 2 if found.faults else 0


def refuse_unsearched(settings: Settings, target: Slice) -> None:
    """Refuse what is not searched, before minutes of searching.

    Raises:
        PlanError: the model, or with --stages stages of it.
    """
    workload = workload_of(settings, target, settings.model)
    use = "gspmd train" if settings.phase == "train" else "gspmd generate"
    with remedied(f"{use} takes a layout of your own with --layout FILE, and gspmd compile says what it costs."):
        problem_of(workload, {"x": 1})
    if settings.stages:
        with remedied("Leave --stages out: without stages it is searched."):
            StageProblem(workload, 1, {"x": 1})


def said(progress: Progress, text: str) -> None:
    """Say what is being searched, in a line that stays where there is no terminal."""
    progress.begin(text)
    progress.say(text)


def spaces(settings: Settings, target: Slice) -> Iterator[Space]:
    """Every mesh with every choice of remat that may be taken, in the microbatches that are given or in all numbers."""
    for mesh in [parse_mesh(settings.mesh)] if settings.mesh else meshes(target.torus):
        for remat in settings.remats:
            workload = workload_of(settings, target, replace(settings.model, remat=remat))
            several = partial(Range.of, workload, mesh) if settings.searches_microbatches else None
            yield Space(partial(problem_of, workload, mesh), several)


def workload_of(settings: Settings, target: Slice, model: ModelConfig) -> Workload:
    """What is asked for, of the model with a choice of remat; in one microbatch where their number is searched."""
    sizes = settings.batch, settings.length, settings.dtype
    return Workload(model, target.chip, *sizes, phase=settings.phase, microbatches=settings.microbatches or 1)


def limit_of(settings: Settings, target: Slice) -> float:
    """The bytes that a device may hold."""
    return settings.memory * target.chip.hbm_bytes


@dataclass
class Found:
    """What is known, more with every step of `look_closer`.

    Attributes:
        finding: the answer.
        planned: the answer before anything was compiled.
        said: what is said of each choice.
        asked: the answers to --why.
        presets: where they are in the space.
        traced: seconds of those that are not.
        front, drawn: for --frontier, the staircase and where presets are on its mesh.
        stages: for --stages.
        shortlist: for --compile.
        lowering: of the fastest program of those; empty where none was compiled.
        faults: what was asked with --why and is no line of this mesh; the answer is not lost with it.
        interrupted: whether something is missing.
    """

    finding: Finding
    said: dict[str, Remark] = field(default_factory=dict)
    asked: list[Why] = field(default_factory=list)
    presets: list[Placed] = field(default_factory=list)
    traced: dict[str, float] = field(default_factory=dict)
    front: list[Point] = field(default_factory=list)
    drawn: list[Placed] = field(default_factory=list)
    stages: pipelines.Table | None = None
    shortlist: list[compiling.Listed] = field(default_factory=list)
    lowering: str = ""
    faults: list[str] = field(default_factory=list)
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.planned = self.finding

    @property
    def fastest(self) -> compiling.Listed | None:
        """The fastest of the compiled programs that fit."""
        return next((each for each in self.shortlist if each.fits), None)


def look_closer(found: Found, settings: Settings, progress: Progress) -> None:
    """All that is asked about the answer, until an interrupt."""
    best = found.finding.best
    try:
        for key, _, text in (asked.partition("=") for asked in settings.why):
            progress.begin(f"why not {key}={text}")
            try:
                found.asked.append(why(best, key.strip(), text.strip()))
            except LayoutError as fault:
                found.faults.append(f"--why {key}={text}: {fault}")
        comment(found, progress)
        progress.begin("what presets cost")
        found.presets = placed_presets(found.finding.promising, found.finding.ranges)
        found.traced = compiling.traced(settings, found.presets)
        if settings.stages:
            found.stages = staged(best, settings, progress)
        if settings.compile:
            compile_best(found, settings, progress)
        if settings.frontier:  # of the mesh of the answer, which may be another now
            best = found.finding.best
            found.front, found.drawn = frontier(best, tell=progress.begin), placed_presets([best])
    except KeyboardInterrupt:
        found.interrupted = True


def staged(best: Candidate, settings: Settings, progress: Progress) -> pipelines.Table:
    """Pipelines on the slice, for every number of stages."""
    target = Slice.named(settings.topology)
    workload = workload_of(settings, target, best.phase.costs.config)
    return pipelines.table(workload, target.torus, best.limit, tell=partial(said, progress))


def comment(found: Found, progress: Progress) -> None:
    """Find what is said of each choice."""
    progress.begin("what each line costs, and what the next best would")
    for name, remark in remarks(found.finding.best, found.finding.answer):
        found.said[name] = remark


def compile_best(found: Found, settings: Settings, progress: Progress) -> None:
    """Compile the shortlist; the answer is then the layout whose program is the fastest, a preset's if it is that."""
    finding, count = found.finding, settings.compile
    if settings.phase == "train":
        listed = shortlist.trained(finding, found.said, found.presets, count)
    else:
        progress.begin("what loops hide in the cheapest layouts")
        listed = shortlist.served(settings, finding, found.presets, count)
    take_fastest(found, compiling.compiled(settings, listed))
    improve_preset(found, settings, progress)
    if not found.said:
        comment(found, progress)


def take_fastest(found: Found, programs: Iterable[compiling.Listed]) -> None:
    """Add programs to the shortlist as they are compiled, and make the layout of the fastest the answer.

    What was said of another layout is forgotten then.
    """
    for each in programs:
        found.shortlist = compiling.fastest([*found.shortlist, each])
        if first := found.fastest:
            found.lowering = first.lowering
            if first.answer is not found.finding.answer:  # whose bound is that of the search, whatever was between
                found.finding, found.said = found.planned.taking(first.candidate, first.answer), {}


def improve_preset(found: Found, settings: Settings, progress: Progress) -> None:
    """Where the fastest program is a preset's, compile it with other lines too, each alone, and then the faster ones
    together: among the lines in which the answer differs may be one that gains and one that loses more.

    They are written as the search writes a layout, with its mesh axes, norms and biases, and not as the preset.
    """
    first = found.fastest
    if not first or not first.preset:
        return
    progress.begin(f"what would improve {first.name}")
    improved = shortlist.improved(settings, first, settings.compile)
    take_fastest(found, compiling.compiled(settings, improved, both=False))
    names = {each.name for each in improved}
    faster = [each for each in found.shortlist if each.name in names and each.seconds < first.seconds]
    take_fastest(found, compiling.compiled(settings, shortlist.together(settings, first, faster), both=False))


def report(found: Found, settings: Settings, target: Slice, argv: Sequence[str]) -> None:
    """Write the files that were asked for, and print the rest."""
    finding = found.finding
    top = header(settings, target, finding, argv, found.shortlist)
    text = document(finding.best, finding.answer, top, found.said, found.lowering)
    if settings.out:
        try:
            Path(settings.out).write_text(text, encoding="utf-8")
        except OSError as error:  # minutes of searching are not lost with it
            print(text)
            why = f"--out {settings.out}: {error.strerror}. The layout is printed above; write it elsewhere."
            raise ConfigError("cannot write the layout that was found:", [why]) from None
    console = printing.console(140)
    if not settings.out:
        print(text)
    if found.presets:
        written = next((each.name for each in found.shortlist if each.answer is finding.answer), "found")
        console.print(shown.comparison(finding, found.presets, written))
        for line in shown.outside(found.presets, found.traced):
            console.print(line, markup=False, highlight=False)
    for asked in found.asked:
        console.print(*shown.reasons(asked), sep="\n")
    if found.stages:
        for line in of_stages(found, found.stages, settings, target, argv):
            console.print(line, highlight=False)
    if found.shortlist:
        console.print(shown.compiled(found.shortlist))
    console.print(shown.answer_line(finding, settings.compile), markup=False, highlight=False)
    if settings.frontier and found.front:
        drawn = picture.figure(finding, found.front, found.drawn, top[0].removesuffix("."))
        found.faults += unwritten("--frontier", settings.frontier, partial(drawn.savefig, settings.frontier))
    if settings.json:
        lists = found.said, found.presets, found.asked, found.front, found.shortlist
        text = figures.to_json(settings, target, finding, *lists)
        write = partial(Path(settings.json).write_text, text, encoding="utf-8")
        found.faults += unwritten("--json", settings.json, write)
    if found.interrupted:
        print(interrupted(found, settings), file=sys.stderr)


def unwritten(flag: str, path: str, write: Callable[[], object]) -> list[str]:
    """Write a file; return what is to be said where that is not possible."""
    try:
        write()
    except OSError as error:
        return [f"cannot write {flag} {path}: {error.strerror}."]
    return []


def of_stages(
    found: Found, table: pipelines.Table, settings: Settings, target: Slice, argv: Sequence[str]
) -> Iterator[Sheet | str]:
    """What is said of pipelines; the best one is written beside the layout without stages."""
    if not table.rows:
        yield "pipelines: no number of stages divides the stacked layers and an axis of the slice."
        return
    yield pipelines.sheet(table)
    if settings.mesh:
        yield f"--mesh {settings.mesh} is of the layout without stages; pipelines have meshes of their own."
    best = table.best
    if settings.out and best and best.answer:
        path, than = beside(settings.out), found.finding.answer.seconds
        top = header_of_stages(settings, target, best, than, argv)
        try:
            path.write_text(of_lines(best.lines, best.problem.costs.config, best.mesh, top), encoding="utf-8")
        except OSError as error:
            found.faults.append(f"cannot write the best pipeline to {path}: {error.strerror}.")
            return
        took = f"{seconds(best.answer.seconds)} a step, {best.answer.seconds / than:.3f} of that without stages"
        yield f"The best pipeline is in {escape(str(path))}: {took}."


def interrupted(found: Found, settings: Settings) -> str:
    """What there is after an interrupt."""
    where = f"written to {settings.out}" if settings.out else "printed"
    if found.finding.complete:
        return f"\nInterrupted. The best layout is {where}; some of what is said about it is missing."
    return f"\nInterrupted. The best layout so far is {where}; there may be a better one."
