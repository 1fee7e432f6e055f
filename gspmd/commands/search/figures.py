"""The results of a search as JSON."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from gspmd.commands.search.compiling import Listed
from gspmd.commands.search.settings import SearchSettings
from gspmd.commands.search.slice import Slice
from gspmd.commands.search.written import error_to_expect
from gspmd.search import Answer
from gspmd.search.answers import Candidate, SearchResult
from gspmd.search.answers.document import LineCost
from gspmd.search.answers.frontier import Point
from gspmd.search.answers.presets import Placed
from gspmd.search.answers.why import Why


def to_json(
    settings: SearchSettings,
    target: Slice,
    finding: SearchResult,
    said: Mapping[str, LineCost],
    presets: Iterable[Placed],
    beside: Iterable[Placed],
    asked: Iterable[Why],
    front: Sequence[Point],
    shortlist: Iterable[Listed],
) -> str:
    """Return all results as JSON, in seconds and bytes."""
    best = finding.best
    figures = {
        "topology": target.name,
        "phase": settings.phase,
        "batch": settings.batch,
        "length": settings.length,
        **({"source_length": settings.sources} if settings.sources else {}),
        "microbatches": best.microbatches,
        "searched_microbatches": finding.microbatches,
        "dtype": settings.dtype,
        "remat": best.remat,
        "limit": best.limit,
        "complete": finding.complete,
        "bound": finding.bound if finding.complete else None,
        "expected_error": error_to_expect(settings),
        **_answer(best, finding.answer),
        "next": {name: {"text": each.next, "more": each.more} for name, each in said.items() if each.next},
        "meshes": [
            {"mesh": dict(each.phase.case.mesh), "remat": each.remat, "microbatches": each.microbatches,
             "outcome": each.outcome, "bound": each.free.seconds,
             "seconds": each.answer and each.answer.seconds}
            for each in finding.candidates
        ],
        "presets": [*map(_placed, presets)],
        "beside": [*map(_placed, beside)],
        "why": [
            {"key": each.key, "text": each.text, "over": each.over, **_answer(best, each.answer)} for each in asked
        ],
        "frontier": [{"bytes": each.answer.bytes, "seconds": each.answer.seconds} for each in front],
        "compiled": [_compiled(each) for each in shortlist],
    }  # fmt: skip
    return json.dumps(figures, indent=2) + "\n"


def _answer(candidate: Candidate, answer: Answer) -> dict:
    return {
        "mesh": dict(candidate.phase.case.mesh),
        "seconds": answer.seconds,
        "bytes": answer.bytes,
        "terms": candidate.unlimited.seconds_of(answer.picks),
        "lines": candidate.phase.written(answer.picks),
    }


def _placed(each: Placed) -> dict:
    return {
        "name": each.name,
        "mesh": dict(each.mesh),
        "remat": each.candidate.remat,
        "microbatches": each.candidate.microbatches,
        "fits": each.fits,
        "reason": each.reason,
        "seconds": each.answer and each.answer.seconds,
        "bytes": each.answer and each.answer.bytes,
    }


def _compiled(each: Listed) -> dict:
    report = each.report
    spent: defaultdict[str, float] = defaultdict(float)
    for part in report.timeline.parts if report and report.timeline else ():
        spent[part.category] += part.exposed if part.axes else part.seconds
    return {
        "name": each.name,
        "mesh": dict(each.mesh),
        "remat": each.candidate.remat,
        "microbatches": each.candidate.microbatches,
        "preset": each.preset,
        "beside": each.own,
        "lowering": each.lowering,
        "planned_seconds": each.answer.seconds,
        "hidden_seconds": each.hidden,
        "planned_bytes": each.answer.bytes,
        "seconds": each.seconds if each.fits else None,
        "bytes": report and report.bytes_per_device,
        "fits": report and report.fits,
        "compile_seconds": report and report.compile_seconds,
        "spent": spent,
        "lines": each.candidate.phase.written(each.answer.picks),
    }
