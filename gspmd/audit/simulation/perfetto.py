"""A timeline as a trace for https://ui.perfetto.dev, with rows for computation, for each mesh axis and for memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspmd.audit.arguments import file_path
from gspmd.audit.simulation.machine import LOCAL_ROWS, Span
from gspmd.audit.simulation.timeline import Timeline, checked_timeline
from gspmd.writing import replace_file


def write(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline to a file in the Chrome trace event format.

    Only one iteration of a loop is in the trace. A slice around this iteration is labeled with the number of iterations
    that the slice stands for. Events after a loop are therefore earlier than in a real run. A collective over several
    mesh axes appears in the rows of all these axes. The totals of the whole run are in `otherData`.

    Args:
        timeline: the timeline to write, from `gspmd.audit.timeline`.
        path: the JSON file to write.

    Source: *Trace Event Format* (Google), complete events (`ph: X`) in microseconds and metadata events (`ph: M`).
    """
    text = json.dumps(trace(timeline))
    replace_file(file_path(path), lambda file: file.write_text(text, encoding="utf-8"))


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return the trace of a timeline as data that `json.dumps` accepts."""
    lanes = _lanes(checked_timeline(timeline, "write"))
    named = f"{timeline.name or 'program'} on {timeline.chip.name}"
    events = [_metadata("process_name", 0, name=named)]
    for thread, name in sorted({(thread, name) for _, thread, name in lanes}):
        events.append(_metadata("thread_name", thread, name=name))
        events.append(_metadata("thread_sort_index", thread, sort_index=thread))
    drawn = [_event(span, thread) for span, thread, _ in lanes]
    events += sorted(drawn, key=lambda event: (event["tid"], event["ts"], -event["dur"]))  # Enclosing slices first.
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": _totals(timeline)}


def _lanes(timeline: Timeline) -> list[tuple[Span, int, str]]:
    """Return (bar, number of a thread, name of the thread) for each bar, and for each row on which the bar is drawn.

    Bars that overlap without nesting need separate threads, so a row has one thread for each lane. Loops are on the
    first thread of computation, around the bars of their iteration.
    """
    lanes = [(span, 0, _title("compute", 0)) for span in timeline.spans if span.category == "loop"]
    first = 0
    for name in timeline.rows:
        placed = timeline.lanes(name)
        lanes += [(span, first + lane, _title(name, lane)) for span, lane in placed]
        first += max((lane + 1 for _, lane in placed), default=1)
    return lanes


def _title(row: str, lane: int) -> str:
    title = row if row in LOCAL_ROWS else f"mesh axis {row}"
    return f"{title} ({lane + 1})" if lane else title


def _metadata(name: str, thread: int, /, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": 0, "tid": thread, "args": args}


def _event(span: Span, thread: int) -> dict[str, Any]:
    begun, ended = _micro(span.start), _micro(span.start + span.seconds)
    return {
        "ph": "X",
        "name": f"{span.name} × {span.trips}" if span.category == "loop" else span.name,
        "cat": span.category,
        "pid": 0,
        "tid": thread,
        "ts": begun,
        "dur": round(ended - begun, 3),
        "args": dict(_arguments(span)),
    }


def _arguments(span: Span) -> Iterator[tuple[str, Any]]:
    yield from (("times", span.times), ("total_us", _micro(span.seconds * span.times)))
    if span.category not in ("loop", "einsum", "other", "copy"):
        yield from (("axes", list(span.rows)), ("exposed_us", _micro(span.exposed)))
    for name in ("equation", "source", "instruction", "cycles", "bytes"):
        if getattr(span, name):
            yield name, getattr(span, name)


def _totals(timeline: Timeline) -> dict[str, Any]:
    names = (
        "step_seconds",
        "compute_seconds",
        "hidden_seconds",
        "exposed_seconds",
        "memory_seconds",
        "host_seconds",
        "flops",
        "mfu",
    )
    mesh = " ".join(f"{axis}={size}" for axis, size in timeline.mesh.items())
    return {"chip": timeline.chip.name, "mesh": mesh, **{name: getattr(timeline, name) for name in names}}


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
