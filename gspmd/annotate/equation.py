"""The equation: specs joined as an einsum, as a sum of einsums, or as the move of one array."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from gspmd.annotate.errors import SpecError
from gspmd.annotate.parser import OperandNode, Parser, TermNode
from gspmd.annotate.spec import Spec

Specs = Spec | Sequence[Spec]
"""An operand or a result: one spec, or the specs of a group."""


@dataclass(frozen=True)
class Operand:
    """One operand: a spec, or a group of specs that are all multiplied by the other operand of the product."""

    specs: tuple[Spec, ...]
    group: bool = False

    def __str__(self) -> str:
        inner = ", ".join(map(str, self.specs))
        # A partial sum in one pair of parentheses is a scalar, not a group.
        lone_sum = len(self.specs) == 1 and not self.specs[0].dims and self.specs[0].partial
        return f"(({inner}))" if self.group and lone_sum else f"({inner})" if self.group else inner


@dataclass(frozen=True)
class Term:
    """The product of two operands, or one operand by itself."""

    operands: tuple[Operand, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.operands))


@dataclass(frozen=True)
class Equation:
    """One equation of a program: the products `terms` are added up, and the results are sharded as `outputs` say.

    Attributes:
      terms: the products that are added; only one unless the equation is a sum.
      outputs: the spec of the result, or of each result if an operand is a group.
      group: whether the result is a tuple.
      text: the notation that was read; comparisons with `==` ignore this attribute.
    """

    terms: tuple[Term, ...]
    outputs: tuple[Spec, ...]
    group: bool = False
    text: str = field(default="", compare=False)

    @classmethod
    def product(cls, left: Specs, right: Specs, result: Specs) -> "Equation":
        """The einsum of two operands, one of which may be a group: `Equation.product(x, (w, w), (h, h))`."""
        return cls.sum_of([(left, right)], result)

    @classmethod
    def move(cls, before: Spec, after: Spec) -> "Equation":
        """The move of one array from one spec to another: `BLE_x -> B_xLE`."""
        return cls.sum_of([(before,)], after)

    @classmethod
    def sum_of(cls, products: Iterable[Sequence[Specs]], result: Specs) -> "Equation":
        """The sum of several products; each product is given by its operands: `BF_x, F_xE + BD_x, D_xE -> BE_x`.

        Raises:
          SpecError: the operands and the result do not form an equation, as for `parse_equation`.
        """
        terms, output = _given_terms(products), _given_operand(result)
        text = f"{_sum_text(terms)} -> {output}"
        _check_form("equation", text, terms, output)
        return cls(terms, output.specs, output.group, text)

    @property
    def is_move(self) -> bool:
        """Whether one array is moved from one spec to another, and nothing is multiplied or added."""
        return len(self.terms) == 1 and len(self.terms[0].operands) == 1

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Every operand in the order in which a call takes them."""
        return tuple(operand for term in self.terms for operand in term.operands)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Every spec in reading order: the operands, with the members of a group one by one, and then the results."""
        return (*(spec for operand in self.operands for spec in operand.specs), *self.outputs)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The start and the end of each of `specs` in `text`, for the carets of an error, or () if there is no text."""
        from gspmd.annotate.diagnosis.refusals import spans  # imported here, as below, since most notation has no fault

        return spans(self.text) if self.text else ()

    @lru_cache(maxsize=4096)  # noqa: B019 - as for `Spec.__str__`
    def __str__(self) -> str:
        return f"{_sum_text(self.terms)} -> {Operand(self.outputs, self.group)}".strip()

    def __repr__(self) -> str:
        return f"<Equation {str(self)!r}>"

    def check(self, sizes: Mapping[str, int], mesh: Any) -> None:
        """Raise SpecError, with every fault, unless every spec of the equation fits these sizes and this mesh."""
        fits = isinstance(sizes, Mapping)
        faults = [spec.faults(sizes, mesh) for spec in self.specs] if fits else []
        if not fits or any(faults):
            from gspmd.annotate.diagnosis.sizes import unfit_sizes

            raise unfit_sizes(self, sizes, faults)

    def sizes(self, shapes: Sequence[tuple[int, ...] | Sequence[tuple[int, ...]]]) -> dict[str, int]:
        """Return the size of every dimension, given the shape of each operand; a group has a tuple of shapes.

        Raises:
          SpecError: there is not one shape for each operand, a rank differs, or a dimension has two different sizes.

        Example:
          >>> parse_equation("BL, (LE, LE) -> (BE, BE)").sizes([(2, 3), ((3, 5), (3, 5))])
          {'B': 2, 'L': 3, 'E': 5}
        """
        specs: tuple[Spec, ...] = self.specs[: -len(self.outputs)]
        flat: list[Any] = []
        if _are_sequences([shapes]) and _are_sequences(shapes) and len(shapes) == len(self.operands):
            flat = [s for o, shape in zip(self.operands, shapes) for s in (shape if o.group else [shape])]
        fits = len(flat) == len(specs) and _are_sequences(flat)
        pairs = [(spec.dims, tuple(shape)) for spec, shape in zip(specs, flat)] if fits else []
        sizes = {dim: size for dims, shape in pairs for dim, size in zip(dims, shape)}
        if not fits or any(tuple(map(sizes.get, dims)) != shape for dims, shape in pairs):
            from gspmd.annotate.diagnosis.sizes import unfit_shapes

            raise unfit_shapes(self, shapes)
        return sizes


class Via(tuple[Term, ...]):
    """The left side of an equation, as `via=` accepts it: a tuple of terms, with the specs to which operands move.

    Attributes:
      text: the notation that was read; comparisons with `==` ignore this attribute.
    """

    text: str

    def __new__(cls, terms: Iterable[Term], text: str = "") -> "Via":
        via = super().__new__(cls, terms)
        via.text = text or str(via)
        return via

    @classmethod
    def of(cls, *operands: Specs) -> "Via":
        """The `Via` with these specs for the operands of one product; a sequence of specs is a group."""
        return cls.sum_of([operands])

    @classmethod
    def sum_of(cls, products: Iterable[Sequence[Specs]]) -> "Via":
        """The `Via` with these specs for the operands of several products: `BF_x, F_xE + BD_x, D_xE`."""
        via = cls(_given_terms(products))
        _check_form("via", via.text, via)
        return via

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Every operand, in the order of a call."""
        return tuple(operand for term in self for operand in term.operands)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Every spec in reading order, with the members of a group one by one."""
        return tuple(spec for operand in self.operands for spec in operand.specs)

    def __str__(self) -> str:
        return _sum_text(self)

    def __repr__(self) -> str:
        return f"<Via {str(self)!r}>"


def parse_equation(text: str | Equation) -> Equation:
    """Read an equation; an `Equation` is returned as it is.

    Raises:
      SpecError: lists every fault of the text, each with a caret under it.

    Example:
      >>> equation = parse_equation("BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)")
      >>> equation.group, len(equation.operands), str(equation.outputs[1])
      (True, 2, 'BLF_yzx')

    Source: Pope et al. 2022 (arXiv 2211.05102), section 3.1, for the notation of the specs.
    """
    if isinstance(text, Equation):
        return text
    if not isinstance(text, str):
        raise _unreadable("equation", text)
    return _parse_equation(text)


def parse_via(text: str | Via) -> Via:
    """Read the left side of an equation; a `Via` is returned as it is.

    >>> list(map(str, parse_via("BLE_x, E_xF_yz").specs))
    ['BLE_x', 'E_xF_yz']
    """
    if isinstance(text, Via):
        return text
    if not isinstance(text, str):
        raise _unreadable("via", text)
    return _parse_via(text)


@lru_cache(maxsize=4096)
def _parse_equation(text: str) -> Equation:
    try:
        nodes, result = Parser(text).equation()
        terms, output = _terms(nodes), _operand(result)
    except ValueError:
        raise _unreadable("equation", text) from None
    _check_form("equation", text, terms, output)
    return Equation(terms, output.specs, output.group, text)


@lru_cache(maxsize=4096)
def _parse_via(text: str) -> Via:
    try:
        via = Via(_terms(Parser(text).via()), text)
    except ValueError:
        raise _unreadable("via", text) from None
    _check_form("via", text, via)
    return via


def _terms(nodes: Iterable[TermNode]) -> tuple[Term, ...]:
    return tuple(Term(tuple(map(_operand, term))) for term in nodes)


def _operand(node: OperandNode) -> Operand:
    specs, group = node
    return Operand(tuple(Spec(*fields) for fields in specs), group)


def _given_terms(products: Iterable[Sequence[Specs]]) -> tuple[Term, ...]:
    return tuple(Term(tuple(map(_given_operand, operands))) for operands in products)


def _given_operand(specs: Any) -> Operand:
    group = isinstance(specs, (tuple, list))
    return Operand(tuple(map(Spec.parse, specs if group else [specs])), group)


def _check_form(what: str, text: str, terms: Sequence[Term], result: Operand | None = None) -> None:
    """Raise SpecError unless the operands fit together and, in an equation, the result fits them."""
    operands = [operand for term in terms for operand in term.operands]
    groups = [operand for operand in operands if operand.group]
    # A product has at most two operands; an equation has at most one group, and a sum has none; "()" has no spec.
    fine = terms and all(1 <= len(term.operands) <= 2 for term in terms) and len(groups) <= (len(terms) == 1)
    fine = fine and not any(str(operand) == "()" for operand in (*groups, result))
    if fine and result is not None:
        fine = result.group == bool(groups) and len(result.specs) == (len(groups[0].specs) if groups else 1)
        fine = fine and not (groups and len(operands) == 1)  # a move takes one array
        fine = fine and all(
            {dim for operand in term.operands for dim in operand.specs[at if operand.group else 0].dims} >= {*spec.dims}
            for at, spec in enumerate(result.specs)
            for term in terms
        )
    if not fine:
        raise _unreadable(what, text)


def _sum_text(terms: Iterable[Term]) -> str:
    return " + ".join(map(str, terms))


def _unreadable(what: str, text: object) -> SpecError:
    from gspmd.annotate.diagnosis.refusals import unreadable

    return unreadable(what, text)


def _are_sequences(values: Sequence) -> bool:
    return all(isinstance(value, Sequence) and not isinstance(value, str) for value in values)
