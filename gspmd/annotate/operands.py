"""Reading the sides of an equation: operands and groups, the products that they make, and the sums of those."""

from gspmd.annotate.reader import Reader
from gspmd.annotate.written import ARROW, CAPITALS, SEPARATOR, Written, WrittenOperand, WrittenTerm


class EquationReader(Reader):
    """Reads the terms of each side; faults are collected as those of the specs are."""

    def sides(self) -> list[list[WrittenTerm]]:
        """The terms on each side of the arrow; more than two sides are a fault."""
        sides = [self.terms()]
        while self.at < len(self.text):
            start, arrow = self.at, self.match(ARROW)
            if arrow != "->":
                self.fault(start, f"{arrow!r} is no arrow.", "Write the arrow '->'.")
            if len(sides) == 2:
                self.fault(start, "an equation has one arrow, and this is a second.", "Write two equations.")
            sides.append(self.terms())
        return sides

    def terms(self) -> list[WrittenTerm]:
        """The products up to an arrow or the end, each a list of operands."""
        terms = [[self.operand()]]
        while self.at < len(self.text) and not ARROW.match(self.text, self.at):
            start = self.at
            if self.take("+"):
                terms.append([self.operand()])
            elif self.take(","):
                terms[-1].append(self.operand())
            elif self.take(")"):
                self.fault(start, "this parenthesis closes nothing.", "Open it before, as in '(A, B)', or drop it.")
                self._read_on(terms[-1])
            else:
                self.fault(start, "a group follows a spec without a comma.", "Write 'A, (B, C)'.", start + 1)
                terms[-1].append(self.operand())
        return terms

    def _read_on(self, term: WrittenTerm) -> None:
        self.space()
        if self.peek() in CAPITALS:
            term.append(self.operand())

    def operand(self) -> WrittenOperand:
        """A spec, or a group in parentheses; nothing at all is a scalar."""
        self.space()
        start = self.at
        if not self._opens_group():
            spec = self.spec()
            return WrittenOperand([spec], False, start, spec.end)
        operand = self._group(start)
        self.space()
        if self.at < len(self.text) and not SEPARATOR.match(self.text, self.at):
            at, more = self.at, self.spec()
            self.fault(at, f"{self.text[at:more.end]!r} follows a group without a comma.",
                       "Write a comma between the operands of a product.", more.end)
        return operand

    def _opens_group(self) -> bool:
        return self.peek() == "(" and self._at_separator(Written(self.at))

    def _group(self, start: int) -> WrittenOperand:
        self.at += 1
        operand = WrittenOperand(self._member(), True, start)
        while self.take(","):
            operand.specs += self._member()
        if not self.take(")"):
            self.fault(start, "this parenthesis is not closed.", "Write a group as '(A, B)'.", start + 1)
            operand.specs[0].broken = True
        elif not self.text[start + 1 : self.at - 1].strip():
            self.fault(start, "this group is empty.",
                       "Write a group as '(A, B)'; a scalar is written as nothing at all.")
        operand.end = self.at
        return operand

    def _member(self) -> list[Written]:
        self.space()
        start = self.at
        if not self._opens_group():
            return [self.spec()]
        inner = self._group(start)
        self.fault(start, "a group cannot stand inside a group.",
                   "Write all its specs in one pair of parentheses.", inner.end)
        self.space()
        return inner.specs
