"""What a found layout says of itself at the top of its file."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gspmd.commands.search.compiling import Listed
from gspmd.commands.search.settings import Settings
from gspmd.commands.search.slice import Slice
from gspmd.display.tables import counted
from gspmd.display.units import amount_of_bytes, amount_of_seconds, mesh_text
from gspmd_models.search.answers import Candidate, Finding
from gspmd_models.search.answers.document import PRICED
from gspmd_models.search.stages import Row

_OF_NOTHING = ("--out", "--json", "--frontier", "--why")
"""Flags that change nothing in the answer."""


def header(
    settings: Settings, target: Slice, finding: Finding, argv: Sequence[str], shortlist: Iterable[Listed] = ()
) -> list[str]:
    """The lines of the comment, without dates: searching again writes the same."""
    answer, model, remat = finding.answer, settings.model, finding.best.remat
    length = f"{settings.length} {finding.best.in_microbatches}".strip()
    name = Path(settings.config).stem
    facts = {
        "model": f"{name}, {model.num_parameters:,} parameters" + (f", remat {remat}" if remat else ""),
        "mesh": f"{finding.best.named}: {counted(finding.best.devices, 'device')}",
        "step": f"batch {settings.batch}, length {length}, {settings.dtype}",
        "predicted": seconds(answer.seconds) + (f"; lower bound {seconds(finding.bound)}" if finding.complete else ""),
        "memory": f"{amount_of_bytes(answer.bytes)} of {amount_of_bytes(target.chip.hbm_bytes)} on each device, "
        f"of which {100 * settings.memory:.3g}% may be used",
        "found": _how(finding),
        **dict(_compiled(finding, shortlist)),
    }
    width = max(map(len, facts))
    verb = {"train": "training", "prefill": "reading prompts", "decode": "decoding"}[settings.phase]
    return [
        f"{name}: a layout for {verb} on {target.name}, found by exact search.",
        "",
        *(f"{fact.ljust(width)}  {text}" for fact, text in facts.items()),
        "",
        f"found with    {shlex.join(['gspmd', 'search', *asked(argv)])}",
        f"to be used    --layout FILE --mesh {finding.best.named}{_trained(finding.best)}",
    ]


def beside(out: str) -> Path:
    """Where the best pipeline is written beside a layout.

    >>> beside("layouts/found.toml").as_posix()
    'layouts/found-stages.toml'
    """
    path = Path(out)
    return path.with_name(f"{path.stem}-stages{path.suffix}")


def header_of_stages(settings: Settings, target: Slice, row: Row, than: float, argv: Sequence[str]) -> list[str]:
    """The lines of the comment on a pipeline's file.

    Args:
        settings, target: of the search.
        row: the best pipeline, which fits.
        than: seconds of the layout without stages.
        argv: the flags.
    """
    assert row.answer is not None
    name, config = Path(settings.config).stem, row.problem.costs.config
    mesh, length = mesh_text(row.mesh), f"{settings.length} in {row.microbatches} microbatches"
    facts = {
        "model": f"{name}, {settings.model.num_parameters:,} parameters, remat {config.remat}",
        "mesh": f"{mesh}: {counted(target.devices, 'device')}",
        "step": f"batch {settings.batch}, length {length}, {settings.dtype}",
        "predicted": f"{seconds(row.answer.seconds)}; {seconds(than)} without stages",
        "memory": f"{amount_of_bytes(row.answer.bytes)} of {amount_of_bytes(target.chip.hbm_bytes)} on each device, "
        f"of which {100 * settings.memory:.3g}% may be used",
    }
    width = max(map(len, facts))
    return [
        f"{name}: a pipeline of {row.stages} stages for training on {target.name}, found by exact search.",
        "",
        *(f"{fact.ljust(width)}  {text}" for fact, text in facts.items()),
        "",
        f"found with    {shlex.join(['gspmd', 'search', *asked(argv)])}",
        f"to be used    --layout FILE --mesh {mesh} --model.remat {config.remat} --microbatches {row.microbatches}",
    ]


def _trained(best: Candidate) -> str:
    """The flags of `gspmd train` that the layout was found with; the config may say otherwise."""
    return f" --model.remat {best.remat} --microbatches {best.microbatches}" if best.remat else ""


def _compiled(finding: Finding, shortlist: Iterable[Listed]) -> Iterator[tuple[str, str]]:
    for each in shortlist:
        if each.answer is finding.answer and each.report:
            held = amount_of_bytes(each.report.bytes_per_device)
            preset = f", that of preset {each.name}" if each.preset else ""
            preset += f", under lowering {each.lowering}" if each.lowering != PRICED else ""
            first = f"the fastest of the programs that were compiled{preset}" if each.report.fits else "it does not fit"
            yield "compiled", f"{seconds(each.seconds)}, {held} on each device: {first}"
            return


def where(best: Candidate) -> str:
    """The mesh, and what else a layout was found with: `x=4,y=8, remat full, in 4 microbatches`."""
    return ", ".join(filter(None, (best.named, best.remat and f"remat {best.remat}", best.in_microbatches)))


def seconds(amount: float) -> str:
    """Seconds to five digits, since layouts differ by thousandths; below 0 where two parts of the cost share them."""
    if amount < 0:
        return f"-{seconds(-amount)}"
    return f"{amount:.5g} s" if amount >= 1 else amount_of_seconds(amount)


def _how(finding: Finding) -> str:
    if not finding.complete:
        return "the best so far: the search was interrupted, and there may be a better one"
    return finding.proof


def asked(argv: Sequence[str]) -> list[str]:
    """The flags that the answer depends on.

    >>> asked(["--batch", "8", "--out", "a.toml", "--json=b"])
    ['--batch', '8']
    """
    kept, skip = [], False
    for word in argv:
        if not skip and word.partition("=")[0] not in _OF_NOTHING:
            kept.append(word)
        skip = not skip and word in _OF_NOTHING
    return kept
