"""The comment at the top of the file of a layout that was found."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from gspmd.commands.arguments import command_line, flag_of, without
from gspmd.commands.files import write_text
from gspmd.commands.own import is_own
from gspmd.commands.search.compiling import Listed
from gspmd.commands.search.settings import SearchSettings
from gspmd.commands.search.slice import Slice
from gspmd.display.tables import counted
from gspmd.display.units import amount_of_bytes, amount_of_seconds, mesh_text
from gspmd.search import Answer
from gspmd.search.answers import Candidate, SearchResult
from gspmd.search.answers.document import PRICED
from gspmd.search.answers.errors import expected_error
from gspmd.training.config import ConfigError
from gspmd_models.search.stages import PipelineRow

_OF_NOTHING = ("--out", "--json", "--frontier", "--why", "--beside")
"""Flags that do not affect the answer."""
_OF_SEARCH = (*_OF_NOTHING, "--layout", "--topology", "--phase", "--mesh", "--memory", "--fixed", "--batch", "--length",
              "--source-length", "--microbatches", "--dtype", "--weights", "--cache", "--remat", "--model.remat",
              "--compile", "--compiler-options")  # fmt: skip
"""Flags that are not copied to a command of `gspmd train`: it lacks them, or their values are written out in full."""
_SWITCHES = ("--stages", "--no-stages")
"""Flags of the search without a value, which `gspmd train` does not have."""


def header(
    settings: SearchSettings,
    target: Slice,
    finding: SearchResult,
    argv: Sequence[str],
    shortlist: Iterable[Listed] = (),
) -> list[str]:
    """Return the lines of the file's first comment; it has no dates, so that equal searches write equal files."""
    answer, remat = finding.answer, finding.best.remat
    length = f"{settings.length} {finding.best.in_microbatches}".strip()
    if sources := settings.sources:
        length += f", sources of {sources}"
    parameters = f"{settings.num_parameters:,} parameters"
    facts = {
        "model": f"{settings.called}, {parameters}" + (f", remat {remat}" if remat else ""),
        "mesh": f"{finding.best.named}: {counted(finding.best.devices, 'device')}",
        "step": f"batch {settings.batch}, length {length}, {settings.dtype}{_stored(settings)}",
        "predicted": seconds(answer.seconds)
        + plus_or_minus(settings)
        + (f"; lower bound {seconds(finding.bound)}" if finding.complete else ""),
        "memory": _memory(settings, target, answer),
        **(
            {"proved": finding.proof}
            if finding.complete
            else {"found": "the best so far: the search was interrupted, and there may be a better one"}
        ),
        **dict(_compiled(finding, shortlist)),
    }
    verbs = {"train": "training", "encode": "encoding sources", "prefill": "reading prompts", "decode": "decoding"}
    verb = verbs[settings.phase]
    title = f"{settings.name}: a layout for {verb} on {target.name}, found by exact search."
    return comment(title, facts, argv, _used(settings, finding.best, argv))


def _memory(settings: SearchSettings, target: Slice, answer: Answer) -> str:
    held = f"{amount_of_bytes(answer.bytes)} of {amount_of_bytes(target.chip.hbm_bytes)} on each device"
    return f"{held}, of which {100 * settings.memory:.3g}% may be used"


def _stored(settings: SearchSettings) -> str:
    """Name the arrays stored in int8, as in `, int8 weights and int8 cache`; the text is empty if there are none."""
    kinds = [f"int8 {name}" for name in ("weights", "cache") if getattr(settings, name) == "int8"]
    return f", {' and '.join(kinds)}" if kinds else ""


def comment(title: str, facts: Mapping[str, str], argv: Sequence[str], used: str) -> list[str]:
    """Return the lines of a comment at the top of a file.

    Args:
        title: the first line, which says what was found.
        facts: further lines, as name -> text.
        argv: the flags of the search.
        used: the command that uses the layout.
    """
    width = max(map(len, facts))
    return [
        title,
        "",
        *(f"{fact.ljust(width)}  {text}" for fact, text in facts.items()),
        "",
        f"found with    {command_line(['gspmd', 'search', *without(argv, _OF_NOTHING)])}",
        f"to be used    {used}",
    ]


def beside(out: str) -> Path:
    """Return the path of the best pipeline's file, which is beside the file of a layout.

    >>> beside("layouts/found.toml").as_posix()
    'layouts/found-stages.toml'
    """
    path = Path(out)
    return path.with_name(f"{path.stem}-stages{path.suffix}")


def header_of_stages(
    settings: SearchSettings, target: Slice, row: PipelineRow, than: float, argv: Sequence[str]
) -> list[str]:
    """Return the lines of the comment at the top of a pipeline's file.

    Args:
        settings, target: the settings and the slice of the search.
        row: the best pipeline that fits.
        than: seconds of the layout without stages, for comparison.
        argv: the flags.
    """
    assert row.answer is not None
    name, config = settings.name, row.problem.case.config
    mesh, length = mesh_text(row.mesh), f"{settings.length} in {row.microbatches} microbatches"
    facts = {
        "model": f"{name}, {settings.model.num_parameters:,} parameters, remat {config.remat}",
        "mesh": f"{mesh}: {counted(target.devices, 'device')}",
        "step": f"batch {settings.batch}, length {length}, {settings.dtype}",
        "predicted": f"{seconds(row.answer.seconds)}; {seconds(than)} without stages",
        "memory": _memory(settings, target, row.answer),
    }
    title = f"{name}: a pipeline of {row.stages} stages for training on {target.name}, found by exact search."
    file = f"{beside(settings.out)}" if settings.out else ""
    used = _train(settings, argv, file, mesh, config.remat, row.microbatches)
    return comment(title, facts, argv, used)


def _used(settings: SearchSettings, best: Candidate, argv: Sequence[str]) -> str:
    """Return the command that trains or serves with the layout, under the settings for which it was found."""
    if settings.phase == "train":
        return _train(settings, argv, settings.out, best.named, best.remat, best.microbatches)
    stored = [
        word for name in ("weights", "cache") if getattr(settings, name) == "int8" for word in (f"--{name}", "int8")
    ]
    placed = ["--layout", settings.out or "FILE", "--mesh", best.named, "--dtype", settings.dtype, *stored]
    return command_line(["gspmd", "generate", "--checkpoint", "DIR", *placed])


def _train(
    settings: SearchSettings, argv: Sequence[str], file: str, mesh: str, remat: str | None, microbatches: int
) -> str:
    """Return the command that trains with a layout; `file` is empty if the layout is printed."""
    given = [word for word in argv if flag_of(word) not in _SWITCHES]
    model = [] if settings.model_class or "--config" in {word.partition("=")[0] for word in argv} else [settings.config]
    return command_line(
        [
            "gspmd", "train", *(word for name in model for word in ("--config", name)), *without(given, _OF_SEARCH),
            "--layout", file or "FILE", "--mesh", mesh, *(["--model.remat", remat] if remat else []),
            "--batch", f"{settings.batch}", "--length", f"{settings.length}", "--microbatches", f"{microbatches}",
            "--dtype", settings.dtype, *(["--source-length", f"{settings.sources}"] if settings.sources else []),
        ]
    )  # fmt: skip


def _compiled(finding: SearchResult, shortlist: Iterable[Listed]) -> Iterator[tuple[str, str]]:
    for each in shortlist:
        if each.answer is finding.answer and each.report:
            held = amount_of_bytes(each.report.bytes_per_device)
            preset = f", that of preset {each.name}" if each.preset else ""
            preset += f", under lowering {each.lowering}" if each.lowering != PRICED else ""
            if each.fits:
                held = f"{seconds(each.seconds)}, {held}"
            first = f"the fastest of the programs that were compiled{preset}" if each.fits else "it does not fit"
            yield "compiled", f"{held} on each device: {first}"
            return


def where(best: Candidate) -> str:
    """Describe mesh, remat and microbatches of a candidate: `x=4,y=8, remat full, in 4 microbatches`."""
    return ", ".join(filter(None, (best.named, best.remat and f"remat {best.remat}", best.in_microbatches)))


def seconds(amount: float) -> str:
    """Return seconds as text with five digits, because layouts differ by thousandths.

    A part of the cost is negative if it corrects other parts that count the same steps.
    """
    if amount < 0:
        return f"-{seconds(-amount)}"
    return f"{amount:.5g} s" if amount >= 1 else amount_of_seconds(amount)


def error_to_expect(settings: SearchSettings) -> float | None:
    """Return the expected relative error of planned seconds; None for custom models or if no error was measured."""
    return None if is_own(settings) else expected_error(settings.phase, Slice.named(settings.topology).chip.name)


def plus_or_minus(settings: SearchSettings) -> str:
    """Return the expected error as text, such as ` ± 12%`, or an empty string if it is unknown."""
    error = error_to_expect(settings)
    return "" if error is None else f" ± {error:.0%}"


def save(text: str, out: str) -> None:
    """Write a layout that was found to a file, or print it if the file has no name.

    Raises:
        ConfigError: the file cannot be written; the layout is then printed, so that the search is not lost.
    """
    if not out:
        print(text)
        return
    try:
        write_text(out, text)
    except OSError as error:
        print(text)
        why = f"--out {out}: {error.strerror}. The layout is printed above; write it elsewhere."
        raise ConfigError("cannot write the layout that was found:", [why]) from None
