"""The parser of well-formed notation: from text to tuples of names, and back.

    equation = terms "->" operand
    terms    = term { "+" term }
    term     = operand { "," operand }
    operand  = spec | "(" spec { "," spec } ")"
    spec     = { dim } [ sum ]
    dim      = "A".."Z" [ "_" ( axes | "?" ) ]
    sum      = word axes | "(" word axes ")"
    word     = "partialsum-" | "reduced-"
    axes     = letter { letter } | "{" name { "," name } "}"

The parser raises ValueError at the first fault, without an explanation. As in CPython, a second parser (in
`annotate/diagnosis`) then reads the text again and finds every fault and its remedy.
"""

import re
from collections.abc import Sequence

OPEN = "?"
"""The mark that replaces the mesh axes of a dimension that the compiler places."""
NAME = re.compile(r"[a-z][a-z0-9_]*")

# The letters of axes end where "partialsum-" begins: "E_xpartialsum-y" is E_x with a partial sum over y.
_AXES = rf"(?:(?!partialsum-|reduced-)[a-z])+|\{{\s*{NAME.pattern}\s*(?:,\s*{NAME.pattern}\s*)*\}}"
_DIM = re.compile(rf"\s*([A-Z])(?:_(\?|{_AXES}))?")
_SUM = re.compile(rf"\s*(\(\s*)?(partialsum|reduced)-\s*({_AXES})(?(1)\s*\))")
_MARK = re.compile(r"\s*(->|[,+()]|\Z)")

SpecNode = tuple[tuple[str, ...], tuple[tuple[str, ...], ...], tuple[str, ...], tuple[str, ...]]
"""The fields of a `Spec`: dims, axes, partial, reduced."""
OperandNode = tuple[tuple[SpecNode, ...], bool]
"""The specs of an operand, and whether it is a group."""
TermNode = tuple[OperandNode, ...]


class Parser:
    """A recursive-descent parser, with a method for each rule of the grammar."""

    def __init__(self, text: str):
        self.text, self.at = text, 0

    def equation(self) -> tuple[tuple[TermNode, ...], OperandNode]:
        """Parse an equation: the terms to the left of the arrow, and the result."""
        terms = self.terms()
        self.expect("->")
        result = self.operand()
        self.expect("")
        return terms, result

    def via(self) -> tuple[TermNode, ...]:
        terms = self.terms()
        self.expect("")
        return terms

    def lone_spec(self) -> SpecNode:
        spec = self.spec()
        self.expect("")
        return spec

    def terms(self) -> tuple[TermNode, ...]:
        terms = [self.term()]
        while self.take("+"):
            terms.append(self.term())
        return tuple(terms)

    def term(self) -> TermNode:
        operands = [self.operand()]
        while self.take(","):
            operands.append(self.operand())
        return tuple(operands)

    def operand(self) -> OperandNode:
        # Parentheses that hold nothing but a partial sum are a scalar; all others are a group.
        if _SUM.match(self.text, self.at) or not self.take("("):
            return (self.spec(),), False
        specs = [self.spec()]
        while self.take(","):
            if self.text.startswith(")", self.at):
                raise ValueError("a group ends with a comma")  # a scalar that ends a group is a space: "(A, )"
            specs.append(self.spec())
        self.expect(")")
        return tuple(specs), True

    def spec(self) -> SpecNode:
        dims, axes, sums = [], [], {}
        while found := _DIM.match(self.text, self.at):
            self.at = found.end()
            dims.append(found[1])
            axes.append(_names(found[2]))
        if found := _SUM.match(self.text, self.at):
            self.at, sums[found[2]] = found.end(), _names(found[3])
        return tuple(dims), tuple(axes), sums.get("partialsum", ()), sums.get("reduced", ())

    def take(self, mark: str) -> bool:
        """Return whether `mark` comes next, and consume it if so; an empty `mark` matches the end of the text."""
        found = _MARK.match(self.text, self.at)
        if found is None or found[1] != mark:
            return False
        self.at = found.end()
        return True

    def expect(self, mark: str) -> None:
        if not self.take(mark):
            raise ValueError(f"{mark or 'the end'} is missing at {self.at}")


def _names(suffix: str | None) -> tuple[str, ...]:
    if suffix and suffix[0] == "{":
        return tuple(name.strip() for name in suffix[1:-1].split(","))
    return tuple(suffix or ())


def axes_suffix(axes: Sequence[str]) -> str:
    """Return mesh axes as the suffix of a dimension, with braces if a name is longer than a letter.

    >>> axes_suffix(["x", "y"]), axes_suffix(["data", "x"])
    ('xy', '{data,x}')
    """
    return "".join(axes) if all(len(axis) == 1 for axis in axes) else "{" + ",".join(axes) + "}"


def dim_text(dim: str, axes: Sequence[str]) -> str:
    """Return a dimension with its mesh axes: `E_xy`, or `E`."""
    return f"{dim}_{axes_suffix(axes)}" if axes else dim
