"""The parser of well-formed notation: from text to tuples of names, and back.

    equation = terms "->" operand
    terms    = term { "+" term }
    term     = operand [ "," operand ]
    operand  = spec | "(" spec { "," spec } ")"
    spec     = { dim } [ partial ]
    dim      = "A".."Z" [ "_" ( axes | "?" ) ]
    partial  = "partialsum-" axes | "(" "partialsum-" axes ")"
    axes     = letter { letter } | "{" name { "," name } "}"

White space may stand anywhere but inside a word, inside `->`, and between a dimension and its mesh axes. The parser
raises ValueError at the first thing that is wrong, and says nothing about it: as in CPython, a second parser, in
`annotate/diagnosis`, reads a text again that was refused, and finds every fault and its remedy.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

OPEN = "?"
"""In place of mesh axes: the compiler places this dimension."""
NAME = re.compile(r"[a-z][a-z0-9_]*")

# A word ends where "partialsum-" begins: "E_xpartialsum-y" is E_x with a partial sum over y.
_AXES = rf"(?:(?!partialsum-)[a-z])+|\{{\s*{NAME.pattern}\s*(?:,\s*{NAME.pattern}\s*)*\}}"
_DIM = re.compile(rf"\s*([A-Z])(?:_(\?|{_AXES}))?")
_PARTIAL = re.compile(rf"\s*(\(\s*)?partialsum-\s*({_AXES})(?(1)\s*\))")
_MARK = re.compile(r"\s*(->|[,+()]|\Z)")


class SpecNode(NamedTuple):
    """The fields of a `Spec`, as they were parsed."""

    dims: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...]


class OperandNode(NamedTuple):
    """One spec, or the specs of a group."""

    specs: tuple[SpecNode, ...]
    group: bool


TermNode = tuple[OperandNode, ...]


class Parser:
    """A recursive-descent parser, with one method for each rule of the grammar."""

    def __init__(self, text: str):
        self.text, self.at = text, 0

    def equation(self) -> tuple[tuple[TermNode, ...], OperandNode]:
        """The terms to the left of the arrow, and the result."""
        terms = self.terms()
        self.expect("->")
        result = self.operand()
        self.expect("")
        if not is_well_formed(terms, result):
            raise ValueError("the operands or the results do not go together")
        return terms, result

    def via(self) -> tuple[TermNode, ...]:
        """The terms alone, as `via=` has them."""
        terms = self.terms()
        self.expect("")
        if not is_well_formed(terms):
            raise ValueError("the operands do not go together")
        return terms

    def lone_spec(self) -> SpecNode:
        """One spec and nothing else."""
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
        # A partial sum in parentheses, and nothing else in them, is a scalar; any other parenthesis opens a group.
        if _PARTIAL.match(self.text, self.at) or not self.take("("):
            return OperandNode((self.spec(),), False)
        specs = [self.spec()]
        while self.take(","):
            if self.text.startswith(")", self.at):
                raise ValueError("a group ends with a comma")  # a scalar that ends a group is a space: "(A, )"
            specs.append(self.spec())
        self.expect(")")
        return OperandNode(tuple(specs), True)

    def spec(self) -> SpecNode:
        dims, axes, partial = [], [], ()
        while found := _DIM.match(self.text, self.at):
            self.at = found.end()
            dims.append(found[1])
            axes.append(_names(found[2]))
        if found := _PARTIAL.match(self.text, self.at):
            self.at, partial = found.end(), _names(found[2])
        return SpecNode(tuple(dims), tuple(axes), partial)

    def take(self, mark: str) -> bool:
        """Whether `mark` comes next (empty: the end of the text); if so it is consumed."""
        found = _MARK.match(self.text, self.at)
        if taken := found is not None and found[1] == mark:
            self.at = found.end()
        return taken

    def expect(self, mark: str) -> None:
        if not self.take(mark):
            raise ValueError(f"{mark or 'the end'} is missing at {self.at}")


def _names(suffix: str | None) -> tuple[str, ...]:
    if suffix and suffix[0] == "{":
        return tuple(name.strip() for name in suffix[1:-1].split(","))
    return tuple(suffix or ())


def is_well_formed(terms: Sequence[Sequence[Any]], result: Any = None) -> bool:
    """Whether a product has two operands at most, groups stand where they may, and every term has the result's dims.

    Args:
      terms: the operands of each term: `OperandNode`s, or `Operand`s of an equation that was not parsed.
      result: likewise; none for a via.
    """
    operands = [operand for term in terms for operand in term]
    groups = [operand for operand in operands if operand.group]
    results = [] if result is None else [result]
    if not terms or not all(1 <= len(term) <= 2 for term in terms) or any(map(_is_empty_group, operands + results)):
        return False
    if len(groups) > (len(terms) == 1):  # a product may have one group, a sum none
        return False
    if result is None:
        return True
    if groups and len(operands) == 1:  # a move takes one array
        return False
    if result.group != bool(groups) or len(result.specs) != (len(groups[0].specs) if groups else 1):
        return False
    for at, spec in enumerate(result.specs):
        for term in terms:
            known = {dim for operand in term for dim in operand.specs[at if operand.group else 0].dims}
            if not known.issuperset(spec.dims):
                return False
    return True


def _is_empty_group(operand: Any) -> bool:
    """Whether an operand is `()`, which has no spec; a scalar, whose spec is empty, needs no group."""
    specs = operand.specs
    return operand.group and (not specs or (len(specs) == 1 and not specs[0].dims and not specs[0].partial))


def axes_suffix(axes: Sequence[str]) -> str:
    """Mesh axes as the suffix of a dimension; names longer than a letter stand in braces, or it would not parse back.

    >>> axes_suffix(["x", "y"]), axes_suffix(["data", "x"])
    ('xy', '{data,x}')
    """
    return "".join(axes) if all(len(axis) == 1 for axis in axes) else "{" + ",".join(axes) + "}"


def dim_text(dim: str, axes: Sequence[str]) -> str:
    """A dimension with its mesh axes: `E_xy`, or `E`."""
    return f"{dim}_{axes_suffix(axes)}" if axes else dim
