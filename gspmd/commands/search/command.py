"""The execution of `gspmd search`: it searches, writes the layout's file, and prints the results."""

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from rich.markup import escape

from gspmd import host
from gspmd.annotate import LayoutError
from gspmd.audit import topology
from gspmd.commands import runner
from gspmd.commands.files import unwritten, write_text
from gspmd.commands.own import is_own
from gspmd.commands.search import compiling, figures, picture, shortlist, shown
from gspmd.commands.search.missing import nothing_fits
from gspmd.commands.search.settings import SearchSettings, parse
from gspmd.commands.search.slice import Slice
from gspmd.commands.search.unpriced import remedied
from gspmd.commands.search.written import beside, header, header_of_stages, save, seconds
from gspmd.display import console as printing
from gspmd.display.progress import Progress
from gspmd.display.tables import Sheet
from gspmd.interruption import number_of
from gspmd.layouts import Layout, presets
from gspmd.search.answers import Candidate, NoneFits, SearchResult, Space, document, find
from gspmd.search.answers.document import LineCost, of_lines, remarks
from gspmd.search.answers.frontier import Point, frontier
from gspmd.search.answers.microbatches import several
from gspmd.search.answers.presets import Placed, placed_presets
from gspmd.search.answers.why import Why, why
from gspmd.training.config import parse_mesh
from gspmd.writing import replace_file
from gspmd_models import ModelConfig
from gspmd_models.search import stages as pipelines
from gspmd_models.search.own import OwnProblem, OwnStep
from gspmd_models.search.phases import problem_of, searched, several_of
from gspmd_models.search.pipeline import StageProblem
from gspmd_models.search.workload import Workload


def run(argv: Sequence[str], script: str = "", settings: SearchSettings | None = None) -> int:
    """Run `gspmd search`; return its exit code.

    The code is 1 if no layout fits, 2 for bad input, and 129, 130 or 143 for an interrupt.

    Args:
        argv: the flags.
        script: if a file in scripts/ was started instead of `gspmd`, its name, for the help text.
        settings: the settings, if the flags have been parsed already.
    """

    def begin(argv: Sequence[str]) -> int:
        # JAX starts here, before a program is read: later programs are compiled for devices that are not attached. If
        # JAX has started already, for example in a user's program, its devices are used.
        with suppress(host.HostError):
            host.start(1, "cpu")
        # Traces and their steps are millions of objects that live on: by default, Python would spend a tenth of the
        # time looking for cycles among them.
        gc.set_threshold(400_000)
        return main(argv, script, settings)

    said, before = "Interrupted before a layout was found that fits.", gc.get_threshold()
    try:
        return runner.guarded(begin, argv, called="" if script else "gspmd search", interrupted=said)
    finally:
        gc.set_threshold(*before)


def main(argv: Sequence[str], script: str = "", settings: SearchSettings | None = None) -> int:
    """Parse the flags, unless settings are given; search, write and print; return the exit code."""
    settings = settings or parse(argv, script)
    target = Slice.named(settings.topology)
    with Progress(printing.console(stderr=True), "Searching") as progress:
        try:
            refuse_unsearched(settings, target)
            every = spaces(settings)
            finding = find(every(target), limit_of(settings, target), partial(said, progress))
        except NoneFits as fault:
            message = nothing_fits(fault, settings, target, spaces, progress.begin)
        else:
            message = ""
            found = CommandResults(finding, interrupted=finding.interrupt)
            if finding.complete:
                look_closer(found, settings, progress)
    if message:
        print(message, file=sys.stderr)
        return 1
    report(found, settings, target, argv)
    for fault in found.faults:
        print(fault, file=sys.stderr)
    return 128 + number_of(found.interrupted) if found.interrupted else 2 if found.faults else 0


def refuse_unsearched(settings: SearchSettings, target: Slice) -> None:
    """Raise errors about models that cannot be searched and about missing compilers, before a search takes minutes.

    Raises:
        PlanError: the search does not support the model; with --stages, the search does not support the model's stages;
            or with --compile, no program can be compiled here.
    """
    if settings.compile:
        topology(settings.topology)
    if is_own(settings):  # Its program is refused when it is read.
        return
    workload = workload_of(settings, target, settings.model)
    use = "gspmd train" if settings.phase == "train" else "gspmd generate"
    with remedied(f"{use} uses a layout of your own with --layout FILE, and gspmd compile reports its cost."):
        problem_of(workload, {"x": 1})
    if settings.stages:
        with remedied("Leave --stages out: without stages it is searched."):
            StageProblem(workload, 1, {"x": 1})


def said(progress: Progress, text: str) -> None:
    """Report the part of the search space that is being searched.

    Without a terminal, the report is a line of output that is not overwritten later.
    """
    progress.begin(text)
    progress.say(text)


def spaces(settings: SearchSettings) -> Callable[[Slice], Iterable[Space]]:
    """Return a function from a slice to the spaces to be searched: each mesh of the slice, with every choice of remat.

    If a number of microbatches is given, only this number is searched, and otherwise every number. The programs of a
    custom model are traced once and then used for every slice.

    Raises:
        LayoutError: the layout lacks lines of a custom model, or a line of --fixed.
    """
    given = [parse_mesh(settings.mesh)] if settings.mesh else []
    if is_own(settings):
        layout = Layout.load(settings.layout)
        step = OwnStep(settings.subject, settings.update, settings.batch, settings.length, layout, settings.given)
        counts = (1, *several(settings.batch)) if settings.microbatches is None else (settings.microbatches,)
        return lambda target: (
            Space(partial(OwnProblem, step, mesh, target.chip, count))
            for mesh in given or target.meshes()
            for count in counts
        )

    def of(target: Slice) -> Iterator[Space]:
        for mesh in given or searched(target.meshes(), settings.model):
            for remat in settings.remats:
                workload = workload_of(settings, target, replace(settings.model, remat=remat))
                more = partial(several_of, workload, mesh) if settings.searches_microbatches else None
                yield Space(partial(problem_of, workload, mesh), more)

    return of


def workload_of(settings: SearchSettings, target: Slice, model: ModelConfig) -> Workload:
    """Return the workload of a model, whose settings include the choice of remat.

    If the number of microbatches is searched, the workload has one microbatch.
    """
    sizes = settings.batch, settings.length, settings.dtype
    count, update = settings.microbatches or 1, settings.update
    fixed = tuple(settings.given.items())
    return Workload(
        model, target.chip, *sizes, phase=settings.phase, microbatches=count, update=update, fixed=fixed,
        weights=settings.weights, cache=settings.cache, source_length=settings.source_length,
    )  # fmt: skip


def limit_of(settings: SearchSettings, target: Slice) -> float:
    """Return the bytes that a device of the slice may hold."""
    return settings.memory * target.chip.hbm_bytes


@dataclass
class CommandResults:
    """The results of the command so far; every part of `look_closer` adds some.

    Attributes:
        finding: the answer.
        planned: the answer before anything was compiled.
        said: the comment on each choice.
        asked: the answers to --why.
        presets, beside: the presets, and the layouts of --beside, with their costs. Presets and layouts outside the
            searched space are included.
        front: the points of the staircase in the picture of --frontier, on the mesh of the answer.
        drawn: the presets and the layouts of --beside that are drawn in this picture, on the same mesh.
        stages: the pipelines, for --stages.
        shortlist: the layouts compiled for --compile.
        lowering: the lowering of the fastest program of the shortlist; empty if no program was compiled.
        faults: a fault for each question of --why about a line that does not exist on this mesh, and a fault if the
            file of the best pipeline cannot be written. The answer is printed nevertheless.
        interrupted: the exception because of which some results are missing; None if no result is missing.
    """

    finding: SearchResult
    said: dict[str, LineCost] = field(default_factory=dict)
    asked: list[Why] = field(default_factory=list)
    presets: list[Placed] = field(default_factory=list)
    beside: list[Placed] = field(default_factory=list)
    front: list[Point] = field(default_factory=list)
    drawn: list[Placed] = field(default_factory=list)
    stages: pipelines.Table | None = None
    shortlist: list[compiling.Listed] = field(default_factory=list)
    lowering: str = ""
    faults: list[str] = field(default_factory=list)
    interrupted: type[KeyboardInterrupt] | None = None

    def __post_init__(self) -> None:
        self.planned = self.finding

    @property
    def fastest(self) -> compiling.Listed | None:
        """The fastest of the compiled programs that fit, except those of --beside."""
        return next((each for each in self.shortlist if each.fits and not each.own), None)


def look_closer(found: CommandResults, settings: SearchSettings, progress: Progress) -> None:
    """Find everything that the flags ask for about the answer, until an interrupt."""
    best = found.finding.best
    try:
        for key, _, text in (asked.partition("=") for asked in settings.why):
            progress.begin(f"why not {key}={text}")
            try:
                found.asked.append(why(best, key.strip(), text.strip()))
            except LayoutError as fault:
                found.faults.append(f"--why {key}={text}: {fault}")
        comment(found, progress)
        if not is_own(settings):  # Presets are layouts of our models.
            progress.begin("what presets cost")
            found.presets = placed_presets(found.finding.promising, found.finding.ranges)
            found.presets = compiling.traced(settings, found.presets)
        if settings.beside:
            progress.begin("what the layouts of --beside cost")
            beside = placed_presets(found.finding.promising, found.finding.ranges, settings.beside)
            found.beside = compiling.traced(settings, beside)
        if settings.stages:
            found.stages = staged(best, settings, progress)
        if settings.compile:
            compile_best(found, settings, progress)
        if settings.frontier:  # For the mesh of the answer, which may have changed.
            best = found.finding.best
            found.front = frontier(best, tell=progress.begin)
            found.drawn = [] if is_own(settings) else placed_presets([best], names=[*settings.beside, *presets()])
    except KeyboardInterrupt as interrupt:
        found.interrupted = type(interrupt)


def staged(best: Candidate, settings: SearchSettings, progress: Progress) -> pipelines.Table:
    """Find the best pipeline on the slice for every number of stages."""
    target = Slice.named(settings.topology)
    workload = workload_of(settings, target, best.phase.case.config)
    return pipelines.table(workload, target.torus, best.limit, tell=partial(said, progress))


def comment(found: CommandResults, progress: Progress) -> None:
    """Find the comment on each choice of the answer."""
    progress.begin("the cost of each line, and of the next best")
    for name, remark in remarks(found.finding.best, found.finding.answer):
        found.said[name] = remark


def compile_best(found: CommandResults, settings: SearchSettings, progress: Progress) -> None:
    """Compile the shortlist; the layout of the fastest program becomes the answer, and may be a preset."""
    finding, count = found.finding, settings.compile
    if settings.phase == "train":
        listed = shortlist.trained(finding, found.said, found.presets, count)
    else:
        progress.begin("the communication that loops hide in the cheapest layouts")
        listed = shortlist.served(settings, finding, found.presets, count)
    take_fastest(found, compiling.compiled(settings, listed))
    improve_preset(found, settings, progress)
    take_fastest(found, compiling.compiled(settings, shortlist.beside(found.beside)))
    if not found.said:
        comment(found, progress)


def take_fastest(found: CommandResults, programs: Iterable[compiling.Listed]) -> None:
    """Add programs to the shortlist as they are compiled; the layout of the fastest program becomes the answer.

    If the answer changes, the comments on the previous answer are dropped.
    """
    for each in programs:
        found.shortlist = compiling.fastest([*found.shortlist, each])
        if first := found.fastest:
            found.lowering = first.lowering
            if first.answer is not found.finding.answer:  # The bound stays that of the search.
                found.finding, found.said = found.planned.taking(first.candidate, first.answer), {}


def improve_preset(found: CommandResults, settings: SearchSettings, progress: Progress) -> None:
    """If a preset is fastest, compile variants of it: each single change, then all changes that helped together.

    Of the lines in which the answer differs from the preset, some may save time and others may cost time. The
    variants are written as the search writes layouts, so their mesh axes, norms and biases come from the search and not
    from the preset.
    """
    first = found.fastest
    if not first or not first.preset:
        return
    progress.begin(f"improvements of {first.name}")
    improved = shortlist.improved(settings, first, settings.compile)
    take_fastest(found, compiling.compiled(settings, improved, both=False))
    names = {each.name for each in improved}
    faster = [each for each in found.shortlist if each.name in names and each.seconds < first.seconds]
    take_fastest(found, compiling.compiled(settings, shortlist.together(settings, first, faster), both=False))


def report(found: CommandResults, settings: SearchSettings, target: Slice, argv: Sequence[str]) -> None:
    """Write the files that the flags name, and print the other results."""
    finding = found.finding
    top = header(settings, target, finding, argv, found.shortlist)
    text = document(finding.best, finding.answer, top, found.said, found.lowering)
    save(text, settings.out)
    console = printing.console(140)
    if found.presets or found.beside:
        written = next((each.name for each in found.shortlist if each.answer is finding.answer), "found")
        console.print(shown.comparison(finding, [*found.presets, *found.beside], written))
        for line in shown.outside([*found.presets, *found.beside]):
            console.print(line, markup=False, highlight=False)
    for asked in found.asked:
        console.print(*shown.reasons(asked), sep="\n")
    if found.stages:
        for line in of_stages(found, found.stages, settings, target, argv):
            console.print(line, highlight=False)
    if found.shortlist:
        console.print(shown.compiled(found.shortlist))
        for line in shown.uncompiled(found.beside):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        for line in shown.warnings(found.shortlist):
            console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(shown.answer_line(finding, settings), markup=False, highlight=False, soft_wrap=True)
    if settings.frontier and found.front:
        drawn = picture.figure(finding, found.front, found.drawn, top[0].removesuffix("."))
        found.faults += unwritten("frontier", settings.frontier, lambda path: replace_file(path, drawn.savefig))
    if settings.json:
        lists = found.said, found.presets, found.beside, found.asked, found.front, found.shortlist
        text = figures.to_json(settings, target, finding, *lists)
        found.faults += unwritten("json", settings.json, lambda path: write_text(path, text))
    if found.interrupted:
        print(interrupted(found, settings), file=sys.stderr)


def of_stages(
    found: CommandResults, table: pipelines.Table, settings: SearchSettings, target: Slice, argv: Sequence[str]
) -> Iterator[Sheet | str]:
    """Yield the table of pipelines, and write the best pipeline to a file next to the layout without stages."""
    if not table.rows:
        divided = "the GPUs" if target.chip.is_switch else "an axis of the slice"
        yield f"pipelines: no number of stages divides the stacked layers and {divided}."
        return
    yield pipelines.sheet(table)
    if settings.mesh:
        yield f"--mesh {settings.mesh} is for the layout without stages; pipelines have meshes of their own."
    best = table.best
    if settings.out and best and best.answer:
        path, than = beside(settings.out), found.finding.answer.seconds
        top = header_of_stages(settings, target, best, than, argv)
        text = of_lines(best.lines, best.problem.case, top, mesh=best.mesh)
        try:
            write_text(path, text)
        except OSError as error:
            found.faults.append(f"cannot write the best pipeline to {path}: {error.strerror}.")
            return
        took = f"{seconds(best.answer.seconds)} a step, {best.answer.seconds / than:.3f} of that without stages"
        yield f"The best pipeline is in {escape(str(path))}: {took}."


def interrupted(found: CommandResults, settings: SearchSettings) -> str:
    """Return the message of an interrupted search."""
    where = f"written to {settings.out}" if settings.out else "printed"
    if found.finding.complete:
        return f"\nInterrupted. The best layout is {where}; some of its comments are missing."
    return f"\nInterrupted. The best layout so far is {where}; there may be a better one."
