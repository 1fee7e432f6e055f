"""The figure of a layout: the blocks of a model from top to bottom, with the spec of every activation and weight."""

from collections.abc import Mapping, Sequence
from html import escape

from gspmd.annotate.equation import parse_via
from gspmd.annotate.errors import SpecError
from gspmd.display.html import page
from gspmd.display.html import table as html_table
from gspmd.display.runs import Run, joined, runs_html
from gspmd.figures.canvas import Canvas, width_in
from gspmd.figures.figure import Figure
from gspmd.layouts.printed import plain, sections
from gspmd.layouts.rules.keys import Text
from gspmd.layouts.table import LayoutTable


class _Op:
    """An operation in the figure, with the names of the layout lines for its weights and for its vias."""

    def __init__(self, name: str, *weights: str, vias: tuple[str, ...] = ()):
        self.name, self.weights, self.vias = name, weights, vias


class _Add:
    """An addition in the figure: the result of a section is added to the residual stream that entered the section."""


_Row = str | _Op | _Add
"""A row of the figure: an activation, given by the name of its line, or an operation, or an addition."""

# The activations and operations of a section in the order in which `gspmd_models` computes them; those whose lines a
# layout does not write are left out. Other lines, such as those of shared experts, which run in parallel to the listed
# ones, are listed below.
_ATTENTION: tuple[_Row, ...] = (
    "residual", "memory", _Op("norm", "norm"),
    _Op("einsum", "w_q", "w_k", "w_v", "w_q_down", "w_k_down", vias=("in_via", "key_via")),
    "latent_query", "latent", _Op("einsum", "w_q_up", "w_k_up", "w_v_up"),
    "query", "key", _Op("attention"), _Op("einsum", "w_o", vias=("out_via",)), _Add(),
)  # fmt: skip
_FLOWS: Mapping[str, tuple[_Row, ...]] = {
    "embedding": ("tokens", _Op("look up", "table", "positions"), _Op("norm", "norm")),
    "attention": _ATTENTION,
    "cross": _ATTENTION,
    "ffn": (
        "residual", _Op("norm", "norm"), _Op("einsum", "w_in", "w_gate", vias=("in_via",)), "hidden",
        _Op("activation"), _Op("einsum", "w_out", vias=("out_via",)), _Add(),
    ),
    "moe": (
        "groups", _Op("route", "router", "router_noise", "router_bias"), "dispatched", _Op("send"), "expert_input",
        _Op("einsum", "w_in", "w_gate", vias=("in_via",)), "hidden", _Op("activation"),
        _Op("einsum", "w_out", vias=("out_via",)),
    ),
    "output": (_Op("norm", "norm"), _Op("einsum", "table", vias=("in_via",)), "logits"),
}  # fmt: skip
_NAMES, _LIST = 12.0, 128.0
"""Two x positions in a list of lines: the left edge of the names, and the smallest left edge of the specs."""
_SKIP, _SPINE, _WEIGHTS = 100.0, 168.0, 246.0
"""Smallest x positions of three columns: the residual stream beside a block, the activations, and the weights."""
_NARROW = 300.0
"""Smallest width of a panel."""
_BOX, _WEIGHT, _GAP, _PAD, _BETWEEN, _APART = 24.0, 27.0, 18.0, 10.0, 20.0, 12.0
_MOST = 8
"""The figure shows at most this number of lines of an overriding section, such as [gradients]."""


def layout_figure(layout: LayoutTable) -> Figure:
    """Draw a layout, with a panel for each section.

    In a panel, activations run downward and weights come from the right.

    Args:
        layout: the layout.

    Returns:
        The figure. Every line of the layout is a group with two attributes: `data-key` is the key of the line, and
        `data-spec` is its spec.
    """
    return _Drawing(layout).figure()


def as_html(layout: LayoutTable) -> str:
    """Return the table of a layout and its figure as HTML, for a notebook."""
    rows = []
    for section, lines in sections(layout):
        specs = section not in ("mesh", "lowering", "dimensions", "padding")
        rows += [(escape(section), escape(key), _html(text) if specs else escape(text)) for key, text in lines]
    sheet = html_table(layout.name, ("section", "key", "spec"), rows)
    return page([sheet, layout_figure(layout).document(standalone=False)])


def found_html(told: str, lines: Mapping[str, str], layout: LayoutTable) -> str:
    """Return HTML that shows the result of a search for a layout.

    Args:
        told: a sentence about the result, shown first.
        lines: a mapping from key to spec, with the lines that the search found.
        layout: the layout that has these lines, shown as a figure.
    """
    rows = [(escape(key), _html(spec)) for key, spec in lines.items()]
    drawn = layout_figure(layout).document(standalone=False)
    return page([f"<p>{escape(told)}</p>", html_table(layout.name, ("line", "spec"), rows), drawn])


def _html(text: str) -> str:
    return " | ".join(runs_html(_notation(each)) for each in text.split(" | "))


def _notation(text: str) -> list[Run]:
    """Return the text of a line with its mesh axes as subscripts.

    A text that is not a spec is returned unchanged; `Layout.check` reports it.
    """
    try:
        return joined((spec.runs() for spec in parse_via(text).specs), " · ")
    except SpecError:
        return [Run(text)]


class _Drawing:
    def __init__(self, layout: LayoutTable):
        self.layout, self.canvas = layout, Canvas()
        parts = list(dict.fromkeys(key.partition(".")[0] for key in layout.table))
        if _FLOWS.keys() >= {*parts}:  # sections of custom models stay in the order of the file
            parts = [part for part in _FLOWS if part in parts]
        self.parts = parts
        self._place()

    def _place(self) -> None:
        """Measure the texts, and choose the x positions of the columns and the width of the panels."""
        table, rows = self.layout.table, [(part, row) for part in self.parts for row in self._rows(part)]
        boxes = [(part, row) for part, row in rows if isinstance(row, str)]
        names = max((width_in("small", name) for _, name in boxes), default=0.0)
        specs = (width_in("", self._runs(table[f"{part}.{name}"])) for part, name in boxes)
        half = max(specs, default=0.0) / 2 + _PAD
        self.skip = max(_SKIP, _NAMES + names + _APART)
        self.spine = max(_SPINE, self.skip + half + _APART / 2)
        nodes = (width_in("small", row.name) / 2 + _PAD for _, row in rows if isinstance(row, _Op))
        self.weights = max(_WEIGHTS, self.spine + max(half, *nodes, 0.0) + 2 * _APART)
        listed = [name for part in self.parts for name in self._others(part, self._rows(part))]
        listed += [key for lines in self.layout.overrides.values() for key in _shown(lines)]
        self.list = max([_LIST, *(_NAMES + width_in("small", name) + _APART for name in listed)])
        self.wide = max([_NARROW, *map(self._width, self.parts), *map(self._width_of, self.layout.overrides.values())])

    def figure(self) -> Figure:
        layout, canvas = self.layout, self.canvas
        canvas.text(0, 14, layout.name, "title ink")
        canvas.text(0, 30, f"mesh axes {', '.join(layout.axes)}", "small soft")
        y = 42.0
        for number, part in enumerate(self.parts):
            if number and part != "moe":
                canvas.arrow([(self.spine, y), (self.spine, y + _BETWEEN)])
            y += _BETWEEN * bool(number)
            y = self._panel(part, y)
        for name, lines in layout.overrides.items():
            y = self._override(name, lines, y + 12)
        lines_ = "; ".join(f"{key} {_first(text)}" for key, text in layout.table.items())
        return canvas.figure(f"Layout {layout.name}", f"{lines_}.", lambda: plain(layout))

    def _runs(self, text: Text) -> list[Run]:
        runs = _notation(_first(text))
        more = len(text) - 1 if isinstance(text, tuple) else 0
        return [*runs, Run(f" or {more} more", "sum")] if more else runs

    def _weights(self, part: str, row: _Op) -> list[str]:
        return [key for name in row.weights if (key := f"{part}.{name}") in self.layout.table]

    def _rows(self, part: str) -> list[_Row]:
        """Return the rows of a section, without rows for lines that the layout does not write."""
        table = self.layout.table
        rows: list[_Row] = []
        for row in _FLOWS.get(part, ()):
            if isinstance(row, str):
                rows += [row] if f"{part}.{row}" in table else []
            elif isinstance(row, _Add):
                rows += [row] if f"{part}.residual" in table else []
            elif not row.weights or self._weights(part, row):
                rows.append(row)
        return rows

    def _others(self, part: str, rows: Sequence[_Row]) -> list[str]:
        shown = {row for row in rows if isinstance(row, str)}
        shown |= {name for row in rows if isinstance(row, _Op) for name in (*row.weights, *row.vias)}
        names = (key.partition(".")[2] for key in self.layout.table if key.partition(".")[0] == part)
        return [name for name in names if name not in shown]

    def _width(self, part: str) -> float:
        """Return the width of a section's panel."""
        rows, table = self._rows(part), self.layout.table
        operations = [row for row in rows if isinstance(row, _Op)]
        ends = [self.spine + width_in("", self._runs(table[f"{part}.{row}"])) / 2 + _PAD for row in rows
                if isinstance(row, str)]  # fmt: skip
        ends += [
            self.weights + width_in("", self._runs(table[key])) + 2 * _PAD + 8 + width_in("small", _name(key))
            for row in operations
            for key in self._weights(part, row)
        ]
        vias = [via for row in operations for _, via in self._vias(part, row)]
        ends += [self.spine + _APART + width_in("small", via) for via in vias]
        ends += [self.list + width_in("", self._runs(table[f"{part}.{name}"])) for name in self._others(part, rows)]
        heads = (width_in(kind, text) + _APART for text, kind in self._heads(part))
        return max(*ends, _NAMES + sum(heads) - _APART, 0.0) + _NAMES

    def _width_of(self, lines: Mapping[str, Text]) -> float:
        """Return the width of an overriding section's panel."""
        return max(self.list + width_in("", self._runs(text)) for text in _shown(lines).values()) + _NAMES

    def _heads(self, part: str) -> list[tuple[str, str]]:
        """Return the texts at the top of a panel, each with its CSS classes.

        These are the section's name, a remark if the section replaces [ffn] in some blocks, and the section's lowering.
        """
        heads = [(part, "strong ink")]
        if part == "moe" and "ffn.w_in" in self.layout.table:
            heads.append(("in place of ffn, in blocks of experts", "small soft"))
        if part in _FLOWS and (lowering := self.layout.lowering_of(part)):
            heads.append((f"lowering {lowering}", "small soft"))
        return heads

    def _vias(self, part: str, row: _Op) -> list[tuple[str, list[Run]]]:
        """Return the key and the text of each via that the layout writes for an operation."""
        keys = [key for name in row.vias if (key := f"{part}.{name}") in self.layout.table]
        return [(key, [Run(f"{_name(key).replace('_', ' ')} ", "sum"), *self._runs(self.layout.table[key])])
                for key in keys]  # fmt: skip

    def _panel(self, part: str, y: float) -> float:
        """Draw the panel of a section with its top edge at `y`, and return the y of its bottom edge."""
        canvas, rows = self.canvas, self._rows(part)
        start = len(canvas.parts)
        right = _NAMES
        for text, kind in self._heads(part):
            if text.startswith("lowering"):
                canvas.text(self.wide - _NAMES, y + 20, text, kind, "end")
            else:
                right += canvas.text(right, y + 20, text, kind) + _APART
        at, before, skip = y + 30, None, 0.0
        for row in rows:
            together = isinstance(row, str) and isinstance(before, str)
            if before is not None and not together:
                weights = len(self._weights(part, row)) if isinstance(row, _Op) else 0
                deep = (max(_BOX, _WEIGHT * weights - 3) - 22) / 2 if isinstance(row, _Op) else 0.0
                canvas.arrow(
                    [(self.spine, at), (self.spine, at + _GAP + deep)]
                )  # to the node, in the middle of its weights
                at += _GAP
            at += 3 * together
            if isinstance(row, str):
                skip = skip or (at + _BOX / 2 if row == "residual" else 0.0)
                at = self._activation(part, row, at)
            elif isinstance(row, _Op):
                at = self._operation(part, row, at, last=row is rows[-1])
            else:
                at = self._sum(part, at, skip)
            before = row
        others = self._others(part, rows)
        at += 8 * bool(others and rows)
        for name in others:
            with self._line(f"{part}.{name}"):
                canvas.text(_NAMES, at + 15, name, "small soft")
                canvas.text(self.list, at + 15, self._runs(self.layout.table[f"{part}.{name}"]), "ink")
            at += 18
        # The panel is drawn behind its contents, but its height is known only now.
        end = at + 12
        drawn = canvas.parts[start:]
        del canvas.parts[start:]
        canvas.rect(0, y, self.wide, end - y, "panel", rx=8)
        canvas.parts += drawn
        return end

    def _line(self, key: str):
        return self.canvas.group(class_="spec", data_key=key, data_spec=_alternatives(self.layout.table[key]))

    def _activation(self, part: str, name: str, y: float) -> float:
        runs = self._runs(self.layout.table[f"{part}.{name}"])
        wide = width_in("", runs) + 2 * _PAD
        with self._line(f"{part}.{name}"):
            self.canvas.rect(self.spine - wide / 2, y, wide, _BOX, "box", rx=5)
            self.canvas.text(self.spine, y + _BOX / 2 + 4, runs, "ink", "middle")
            self.canvas.text(_NAMES, y + _BOX / 2 + 4, name, "small soft")
        return y + _BOX

    def _operation(self, part: str, row: _Op, y: float, *, last: bool) -> float:
        """Draw an operation and its weights with the top edge at `y`, and return the y of the bottom edge.

        No line is drawn below the last operation of a section.
        """
        canvas, weights, vias = self.canvas, self._weights(part, row), self._vias(part, row)
        high = max(_BOX, _WEIGHT * len(weights) - 3)
        middle, end = y + high / 2, y + high + 15 * len(vias)
        wide = width_in("small", row.name) + 2 * _PAD
        for number, key in enumerate(weights):
            centre, turn = y + number * _WEIGHT + _BOX / 2, self.weights - 12
            self._weight(key, centre - _BOX / 2)
            canvas.path([(self.weights, centre), (turn, centre), *([(turn, middle)] if centre != middle else [])])
        if weights:
            canvas.path([(self.weights - 12, middle), (self.spine + wide / 2, middle)])
        canvas.rect(self.spine - wide / 2, middle - 11, wide, 22, "node", rx=11)
        canvas.text(self.spine, middle + 3.5, row.name, "small ink", "middle")
        if not last:
            canvas.path([(self.spine, middle + 11), (self.spine, end)])
        for number, (key, runs) in enumerate(vias):
            with self._line(key):
                canvas.text(self.spine + _APART, y + high + 13 + 15 * number, runs, "small ink")
        return end

    def _weight(self, key: str, y: float) -> None:
        runs = self._runs(self.layout.table[key])
        wide = width_in("", runs) + 2 * _PAD
        with self._line(key):
            self.canvas.rect(self.weights, y, wide, _BOX, "box", rx=2)
            self.canvas.text(self.weights + _PAD, y + _BOX / 2 + 4, runs, "ink")
            self.canvas.text(self.weights + wide + 8, y + _BOX / 2 + 4, _name(key), "small soft")

    def _sum(self, part: str, y: float, skip: float) -> float:
        """Draw the addition at the end of a block with its top edge at `y`, and return the y of its bottom edge.

        The residual stream is drawn beside the block, from y `skip` to the addition, unless `skip` is 0.
        """
        canvas = self.canvas
        canvas.rect(self.spine - 11, y, 22, 22, "node", rx=11)
        canvas.text(self.spine, y + 15.5, "+", "strong ink", "middle")
        if skip:
            half = width_in("", self._runs(self.layout.table[f"{part}.residual"])) / 2 + _PAD
            canvas.path(
                [(self.spine - half, skip), (self.skip, skip), (self.skip, y + 11), (self.spine - 11, y + 11)],
                "line dashed",
            )
        return y + 22

    def _override(self, name: str, lines: Mapping[str, Text], y: float) -> float:
        canvas = self.canvas
        shown = _shown(lines)
        high = 30 + 18 * (len(shown) + (len(lines) > len(shown))) + 6
        canvas.rect(0, y, self.wide, high, "panel", rx=8)
        canvas.text(_NAMES, y + 20, name, "strong ink")
        y += 30
        for key, text in shown.items():
            with canvas.group(class_="spec", data_key=f"{name}.{key}", data_spec=_alternatives(text)):
                canvas.text(_NAMES, y + 11, key, "small soft")
                canvas.text(self.list, y + 11, self._runs(text), "ink")
            y += 18
        if len(lines) > len(shown):
            canvas.text(_NAMES, y + 11, f"… {len(lines) - len(shown)} more lines", "small soft")
            y += 18
        return y + 6


def _shown(lines: Mapping[str, Text]) -> dict[str, Text]:
    """Return the lines of an overriding section that the figure shows, at most `_MOST`."""
    return dict(list(lines.items())[:_MOST])


def _name(key: str) -> str:
    return key.partition(".")[2]


def _first(text: Text) -> str:
    return text[0] if isinstance(text, tuple) else text


def _alternatives(text: Text) -> str:
    return " | ".join(text) if isinstance(text, tuple) else text
