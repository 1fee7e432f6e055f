"""The search that a page asks for: what `gspmd search` does, sent part by part, and compared with the page's layout."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from gspmd.annotate.errors import LayoutError, PlanError
from gspmd.commands.search.command import limit_of, parse, refuse_unsearched, spaces
from gspmd.commands.search.missing import nothing_fits
from gspmd.commands.search.settings import SearchSettings
from gspmd.commands.search.slice import Slice
from gspmd.commands.search.written import header, plus_or_minus, seconds, where
from gspmd.display.units import amount_of_bytes, mesh_text
from gspmd.page.equation import inline
from gspmd.page.layout import LayoutAnswer, LayoutRequest, Shelf
from gspmd.page.requests import Texts
from gspmd.search import Answer
from gspmd.search.answers import Candidate, NoneFits, SearchResult, document, find
from gspmd.search.answers.document import DERIVED, LineCost, changed, ordered, remarks
from gspmd.search.answers.frontier import frontier
from gspmd.search.answers.presets import Placed, picks_of, placed_presets
from gspmd.search.answers.staircase import frontier_figure
from gspmd.search.answers.why import Why, why

Tell = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class SearchRequest(LayoutRequest):
    """A request to search, and to compare the result with the page's layout.

    The search considers either only the mesh of that layout or every mesh of a slice. It considers either only the
    layout's number of microbatches or every number.
    """

    topology: str = ""
    meshes: str = "this"
    parts: str = "this"
    recomputed: str = "this"


@dataclass(frozen=True)
class WhyRequest(Texts):
    """A question about a line of a layout that was found; `token` identifies the search that found it."""

    token: str = ""
    key: str = ""
    spec: str = ""


class Searcher:
    """The searches of a process; the last search is kept, to answer questions about the lines that it found.

    Args:
        shelf: the models and layouts that a page may name.
    """

    def __init__(self, shelf: Shelf):
        self._shelf = shelf
        self._tokens = count(1)
        self._token = ""
        self._found: SearchResult | None = None

    def search(self, request: SearchRequest, tell: Tell) -> dict[str, Any]:
        """Search, and pass each part of the result to `tell` when it is known: `found`, `lines` and `frontier`.

        Raises:
            NotationError, ConfigError: the request names something that does not exist, does not fit, or cannot be
                searched.
        """
        self._token, self._found = "", None
        shown = LayoutAnswer(request, self._shelf)
        argv = arguments(request, shown)
        settings = parse(["--config", str(self._shelf.path(request.config)), *argv])
        target = Slice.named(settings.topology)
        say = lambda text: tell({"said": text})  # noqa: E731
        refuse_unsearched(settings, target)
        every = spaces(settings)
        try:
            finding = find(every(target), limit_of(settings, target), say)
        except NoneFits as fault:
            raise PlanError(nothing_fits(fault, settings, target, spaces, say)) from None
        self._token, self._found = f"{next(self._tokens)}", finding
        say("the cost of this layout in the same space")
        beside = placed(finding, shown)
        tell({"found": self._told(finding, beside, settings, target)})
        say("the cost of each line, and of the next best")
        said = dict(remarks(finding.best, finding.answer))
        top = header(settings, target, finding, ["--config", request.config, *argv])
        toml = document(finding.best, finding.answer, top, said)
        tell({"lines": lines_of(finding, said), "toml": toml})
        front = frontier(finding.best, tell=say)
        marks = [("found", finding.answer)]
        if beside.answer and beside.candidate.named == finding.best.named:
            marks.append(("shown", beside.answer))
        drawn = frontier_figure(front, marks, finding.best.limit, where(finding.best))
        points = [cost(each.answer) for each in front]
        tell({"frontier": {"points": points, "figure": inline(drawn)}})
        return {"token": self._token}

    def _told(self, finding: SearchResult, beside: Placed, settings: SearchSettings, target: Slice) -> dict[str, Any]:
        best = finding.best
        return cost(finding.answer) | {
            "token": self._token,
            "topology": target.name,
            "mesh": best.named,
            "remat": best.remat,
            "microbatches": best.microbatches,
            "where": where(best),
            "error": plus_or_minus(settings).strip(),
            "bound": finding.bound,
            "proof": finding.proof,
            "limit": best.limit,
            "said_limit": amount_of_bytes(best.limit),
            "lines": written(best, finding.answer),
            "shown": placed_record(beside),
        }

    def why(self, request: WhyRequest) -> dict[str, Any]:
        """Return the cost of giving a line a different spec, part by part.

        Raises:
            LayoutError: the search is no longer kept, there is no such line, or the spec is not one of its options.
        """
        if self._found is None or request.token != self._token:
            raise LayoutError("this search is no longer kept.\n  Search again, then ask.")
        return why_record(why(self._found.best, request.key.strip(), request.spec.strip()))


def arguments(request: SearchRequest, shown: LayoutAnswer) -> list[str]:
    """Return the flags of `gspmd search` for a request, without `--config`; every text of the request is checked."""
    flags = ["--topology", Slice.named(request.topology).name]
    if request.meshes == "this":
        flags += ["--mesh", mesh_text({axis: size for axis, size in shown.mesh.items() if size > 1} or {"x": 1})]
    flags += ["--batch", f"{shown.batch}", "--length", f"{shown.length}"]
    if request.parts == "this":
        flags += ["--microbatches", f"{shown.microbatches}"]
    if request.dtype != "bfloat16":
        flags += ["--dtype", str(shown.subject.dtype)]
    if request.recomputed == "this":
        flags += ["--remat", shown.model.remat_name]
    return flags


def cost(answer: Answer) -> dict[str, Any]:
    """Return seconds and bytes of an answer, as numbers and as `gspmd search` prints them."""
    said = {"said_seconds": seconds(answer.seconds), "said_bytes": amount_of_bytes(answer.bytes)}
    return {"seconds": answer.seconds, "bytes": answer.bytes} | said


def written(candidate: Candidate, answer: Answer) -> dict[str, str]:
    """Return the lines of an answer, as key -> text.

    If a section overrides a line, the key of the line in this section begins with the section.
    """
    return {_key(line.section, line.key): line.text for line in ordered(candidate.phase.lines(answer.picks))}


def _key(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def placed(finding: SearchResult, shown: LayoutAnswer) -> Placed:
    """Return the page's layout as a search prices it.

    The layout is priced on its own mesh if this mesh was searched, and otherwise on the mesh that is best for the
    layout.
    """
    mesh = {axis: size for axis, size in shown.mesh.items() if size > 1}
    own = [each for each in finding.candidates if {**each.phase.case.mesh} == mesh]
    if not own:
        return placed_presets(finding.promising, finding.ranges, [shown.written])[0]
    alike = (shown.model.remat_name, shown.microbatches)
    candidate = min(own, key=lambda each: ((each.remat, each.microbatches) != alike, each.free.seconds))
    try:
        layout = shown.written.resolved(candidate.sizes, shown.mesh)
        answer = picks_of(candidate, candidate.unlimited_search, layout)
    except LayoutError as error:
        reason = error.faults[0].fact if error.faults else str(error).splitlines()[0]
        return Placed("shown", candidate, shown.mesh, reason=reason)
    return Placed("shown", candidate, shown.mesh, answer)


def placed_record(placed: Placed) -> dict[str, Any]:
    """Return, as plain data, the page's layout as a search prices it, or the reason why the search has no price."""
    if placed.answer is None:
        return {"reason": placed.reason}
    candidate = placed.candidate
    return cost(placed.answer) | {"where": where(candidate), "fits": placed.fits,
                                  "lines": written(candidate, placed.answer)}  # fmt: skip


def lines_of(finding: SearchResult, said: Mapping[str, LineCost]) -> list[dict[str, Any]]:
    """Return the lines of the answer.

    The first line of each choice also has the cost of the choice, and the next best spec.
    """
    candidate, answer = finding.best, finding.answer
    rows, first = [], dict[str, str]()
    for line in ordered(candidate.phase.lines(answer.picks)):
        key = _key(line.section, line.key)
        row: dict[str, Any] = {"key": key, "spec": line.text}
        if line.choice in first:
            row["with"] = first[line.choice]
        elif (remark := said.get(line.choice)) and not line.section and line.key not in DERIVED:
            first[line.choice] = key
            row |= {"seconds": remark.seconds, "said": str(remark), "more": remark.more}
            row |= _next(candidate, answer, line.choice, remark)
        rows.append(row)
    return rows


def _next(candidate: Candidate, answer: Answer, choice: str, remark: LineCost) -> dict[str, Any]:
    if remark.other is None:
        return {}
    (section, key), text = next(changed(candidate, choice, answer, remark.other))
    return {"next": {"key": _key(section, key), "spec": text}}


def why_record(asked: Why) -> dict[str, Any]:
    """Return the table that `gspmd search --why` prints for a question, as plain data with its numbers."""
    ours, theirs = asked.best, asked.answer
    rows = [(name, before, after) for name, before, after in asked.terms] + [("a step", ours.seconds, theirs.seconds)]
    terms = [
        {
            "name": name,
            "found": before,
            "asked": after,
            "said": [seconds(before), seconds(after), _more(after - before)],
        }
        for name, before, after in rows
    ]
    more = theirs.seconds / ours.seconds - 1
    most = "" if theirs.complete else "at most "
    held = [
        amount_of_bytes(ours.bytes),
        amount_of_bytes(theirs.bytes),
        _more(theirs.bytes - ours.bytes, amount_of_bytes),
    ]
    return {
        "key": asked.key,
        "spec": asked.text,
        "title": f"{asked.key} = {asked.text}: {most}{seconds(theirs.seconds)}, {more:+.2%}",
        "over": asked.over,
        "said_over": amount_of_bytes(asked.over),
        "terms": terms,
        "held": {"found": ours.bytes, "asked": theirs.bytes, "said": held},
        "lines": [list(row) for row in asked.lines],
    }


def _more(amount: float, said: Callable[[float], str] = seconds) -> str:
    return f"{'-' if amount < 0 else '+'}{said(abs(amount))}"
