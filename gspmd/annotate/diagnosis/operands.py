"""Read the sides of an equation (operands and groups, products, and sums of products), and go on after a fault."""

import re

from gspmd.annotate.diagnosis.nodes import ARROW, CAPITALS, LocatedOperand, LocatedSpec, LocatedTerm
from gspmd.annotate.diagnosis.reader import Reader

_COMMA_MEANT = re.compile(r"[*×·⋅∙@;，、&⊗]")
_ARROW_MEANT = re.compile(r"[-=~−–—:]+")
_WORD_AHEAD = re.compile(r"[^\s,+()>]*")
_OPENING = re.compile(r"[(\s]*")
_DEEPEST = 8  # nested groups that are read; even a group in a group is a fault, and deeper parentheses are ignored


class EquationReader(Reader):
    """A reader of equations, which collects faults like the reader of specs, `Reader`."""

    def __init__(self, text: str):
        super().__init__(text)
        # Whether the text may have several specs, so that a space may be a missing comma.
        self.has_others, self.depth = True, 0
        # The arrow is searched once, here: a search at every '=' would take quadratic time on a text with thousands of
        # them.
        self.has_arrow = ARROW.search(text) is not None

    def sides(self) -> list[list[LocatedTerm]]:
        """Read the terms on each side of the arrow; more than two sides are a fault."""
        sides = [self.terms()]
        while self.at < len(self.text):
            start, arrow = self.at, self.arrow()
            if arrow != "->":
                self.fault(start, f"{arrow!r} is not an arrow.", "Write the arrow '->'.")
            if len(sides) == 2:
                self.fault(start, "an equation has one arrow, and this is a second.", "Write two equations.")
            self.has_others = False
            sides.append(self.terms())
        return sides

    def arrow(self) -> str:
        """Consume an arrow, or text that is meant as an arrow, and return this text; return "" if no arrow is next."""
        return self.match(ARROW) or (self.match(_ARROW_MEANT) if self._at_arrow() else "")

    def terms(self) -> list[LocatedTerm]:
        """Read the terms up to an arrow or the end; each term is a list of operands."""
        terms = [[self.operand()]]
        while self.at < len(self.text) and not self._at_arrow():
            start = self.at
            if self.take("+"):
                terms.append([self.operand()])
            elif self._comma():
                terms[-1].append(self.operand())
            elif self.take(")"):
                remedy = "Add the opening parenthesis, as in '(A, B)', or drop this one."
                self.fault(start, "this parenthesis closes nothing.", remedy)
                self._read_on(terms[-1])
            else:
                before = terms[-1][-1]
                terms[-1].append(self.operand())
                self._missing_comma(before, terms[-1][-1])
        return terms

    def _at_arrow(self) -> bool:
        if ARROW.match(self.text, self.at):
            return True
        # A sign that hardly looks like an arrow, such as '=', is read as an arrow if the text has no real one.
        return _ARROW_MEANT.match(self.text, self.at) is not None and not self.has_arrow

    def _comma(self) -> bool:
        """Consume a comma, or text that is meant as a comma."""
        start = self.at
        if self.take(","):
            return True
        wrong = self.match(_COMMA_MEANT)
        if wrong:
            self.fault(start, f"{wrong!r} is not a comma.", "Write a product with a comma, as in 'A, B -> AB'.")
        return bool(wrong)

    def _missing_comma(self, one: LocatedOperand | LocatedSpec, two: LocatedOperand | LocatedSpec) -> None:
        left, right = self.text[one.start : one.end].strip(), self.text[two.start : two.end].strip()
        gap = max(two.start, one.end + 1)
        self.fault(one.end, f"a comma is missing between {left!r} and {right!r}.", f"Write '{left}, {right}'.", gap)

    def _read_on(self, term: LocatedTerm) -> None:
        self.space()
        if self.peek() in CAPITALS:
            term.append(self.operand())

    def operand(self) -> LocatedOperand:
        """Read a spec, or a group in parentheses. Empty text is a scalar."""
        self.space()
        start = self.at
        if not self._opens_group():
            spec = self.spec()
            return LocatedOperand([spec], False, start, spec.end)
        operand = self._group(start)
        self.space()
        return operand

    def _at_separator(self, spec: LocatedSpec) -> bool:
        return (
            super()._at_separator(spec)
            or self._at_arrow()
            or _COMMA_MEANT.match(self.text, self.at) is not None
            or self._at_another(spec)
        )

    def _at_another(self, spec: LocatedSpec) -> bool:
        """Return whether another spec begins here, after a space.

        Another spec begins if `spec` has ended in a partial sum, or if the next word repeats a dimension of `spec`.
        """
        if not (self.has_others and spec.dims and self.peek() in CAPITALS and self.text[self.at - 1].isspace()):
            return False
        word = _WORD_AHEAD.match(self.text, self.at)
        return spec.partial is not None or (word is not None and not set(word.group()).isdisjoint(spec.names))

    def _clashes(self, spec: LocatedSpec) -> None:
        """Report repeated dimensions and axes; if two operands were read as one spec, report only the missing comma."""
        names = spec.names
        at = next((n for n, name in enumerate(names) if name in names[:n]), 0)
        halves = [[axis.name for dim in dims for axis in dim.axes] for dims in (spec.dims[:at], spec.dims[at:])]
        whole = [*halves, names[:at], names[at:]]
        if not (at and self.has_others and all(len(set(each)) == len(each) for each in whole)):
            return super()._clashes(spec)
        dim = spec.dims[at]
        left, right = self.text[spec.start : dim.start].strip(), self.text[dim.start : spec.end]
        self.fault(
            dim.start,
            f"dimension {dim.name} appears twice in one spec.",
            f"Every dimension has a letter of its own; separate two operands with a comma: '{left}, {right}'.",
            dim.end,
        )

    def _opens_group(self) -> bool:
        return self.peek() == "(" and self._at_separator(LocatedSpec(self.at))

    def _group(self, start: int) -> LocatedOperand:
        self.at += 1
        self.depth, outside, self.has_others = self.depth + 1, self.has_others, True
        operand = LocatedOperand(self._member(), True, start)
        self._more_members(operand)
        self.depth, self.has_others = self.depth - 1, outside
        if not self.take(")"):
            self.fault(start, "this parenthesis is not closed.", "Write a group as '(A, B)'.", start + 1)
            operand.specs[0].broken = True
        elif not self.text[start + 1 : self.at - 1].strip():
            self.fault(start, "this group is empty.", "Write a group as '(A, B)'; write nothing for a scalar.")
        operand.end = self.at
        return operand

    def _more_members(self, operand: LocatedOperand) -> None:
        while True:
            comma, before = self.at, operand.specs[-1]
            if self._comma():
                if self.peek() == ")":
                    inside = self.text[operand.start : comma]
                    self.fault(
                        comma,
                        "nothing follows this comma.",
                        f"Drop it: '{inside})'. A scalar as the last member is a space: '{inside}, )'.",
                    )
                    return
                operand.specs += self._member()
            elif self.peek() in CAPITALS:
                member = self._member()
                self._missing_comma(before, member[0])
                operand.specs += member
            else:
                return

    def _member(self) -> list[LocatedSpec]:
        self.space()
        start = self.at
        if not self._opens_group():
            return [self.spec()]
        if self.depth == _DEEPEST:  # deeper parentheses are ignored
            self.match(_OPENING)
            return [self.spec()]
        inner = self._group(start)
        self.fault(
            start, "a group cannot be inside a group.", "Write all its specs in one pair of parentheses.", inner.end
        )
        self.space()
        return inner.specs
