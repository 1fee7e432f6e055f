"""The equation: specs joined as an einsum, as a sum of einsums, or as the move of one array.

    equation = term { "+" term } "->" operand
    term     = operand [ "," operand ]
    operand  = spec | "(" spec { "," spec } ")"
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from gspmd.annotate.diagnosis.nodes import TermNode
from gspmd.annotate.diagnosis.operands import EquationReader
from gspmd.annotate.diagnosis.rules import faults_of
from gspmd.annotate.errors import Fault, SpecError, listed, report, shown
from gspmd.annotate.spec import Spec, spec_from
from gspmd.annotate.validation import mesh_sizes, whole_sizes

Specs = Spec | Sequence[Spec]
"""What one argument of a call stands for: a spec, or the specs of a group."""


@dataclass(frozen=True)
class Operand:
    """One operand: a spec, or a group of several that meet the same other operand."""

    specs: tuple[Spec, ...]
    group: bool = False

    def __str__(self) -> str:
        inner = ", ".join(map(str, self.specs))
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
    """One equation of a program: `terms` are multiplied out and added, and come to stand as `outputs`.

    Attributes:
      terms: the products that are added; one, unless the equation is a sum.
      outputs: the spec of the result, or of each result where an operand is a group.
      group: whether the result is a tuple.
      text: as it was written; not part of equality.
      spans: the place in `text` of every spec, operands first, then outputs.
    """

    terms: tuple[Term, ...]
    outputs: tuple[Spec, ...]
    group: bool = False
    text: str = field(default="", compare=False)
    spans: tuple[tuple[int, int], ...] = field(default=(), compare=False, repr=False)

    def __repr__(self) -> str:
        return f"<Equation {str(self)!r}>"

    @classmethod
    def product(cls, left: Specs, right: Specs, result: Specs) -> "Equation":
        """The einsum of two operands; a sequence of specs is a group.

        Raises:
          SpecError: as `parse_equation`, for the equation as it would be written.

        Example:
          >>> x, w, h = map(Spec.parse, ("BLE_xyz", "E_xF_yz", "BLF_yzx"))
          >>> str(Equation.product(x, w, h)), str(Equation.product(x, (w, w), (h, h)))
          ('BLE_xyz, E_xF_yz -> BLF_yzx', 'BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)')
        """
        return cls.sum_of([(left, right)], result)

    @classmethod
    def move(cls, before: Spec, after: Spec) -> "Equation":
        """The move of one array from one spec to another.

        >>> str(Equation.move(Spec.parse("BLE_x"), Spec.parse("B_xLE")))
        'BLE_x -> B_xLE'
        """
        return cls.sum_of([(before,)], after)

    @classmethod
    def sum_of(cls, products: Iterable[Sequence[Specs]], result: Specs) -> "Equation":
        """The sum of several products, each given by its operands.

        >>> h, w_out, y, w_o, x = map(Spec.parse, ("BF_x", "F_xE", "BD_x", "D_xE", "BE_x"))
        >>> str(Equation.sum_of([(h, w_out), (y, w_o)], x))
        'BF_x, F_xE + BD_x, D_xE -> BE_x'
        """
        return parse_equation(f"{_joined(map(_term, products))} -> {_operand(result)}")

    @property
    def is_move(self) -> bool:
        """Whether one array is brought from one spec to another, and nothing is multiplied or added."""
        return len(self.terms) == 1 and len(self.terms[0].operands) == 1

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Every operand in the order in which a call takes them."""
        return tuple(operand for term in self.terms for operand in term.operands)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Every spec as it is read: the operands', group members one by one, then the results'."""
        return (*(spec for operand in self.operands for spec in operand.specs), *self.outputs)

    def __str__(self) -> str:
        return f"{' + '.join(map(str, self.terms))} -> {Operand(self.outputs, self.group)}".strip()

    def check(self, sizes: Mapping[str, int], mesh: Any) -> None:
        """Raises SpecError, with every fault, unless every spec of the equation fits these sizes and this mesh."""
        if not isinstance(sizes, Mapping):
            raise SpecError(f"cannot shard {self.text or str(self)!r} for the sizes {shown(sizes)}.\n"
                            "  Write the size of every dimension of the whole tensors, such as {'B': 8, 'E': 16}.")
        mesh, sizes = mesh_sizes(mesh), whole_sizes(sizes)
        specs = [*(s for o in self.operands for s in o.specs), *self.outputs]
        faults = [self._placed(at, f) for at, spec in enumerate(specs) for f in spec.faults(sizes, mesh)]
        if faults:
            given = ", ".join(f"{d}={n}" for d, n in sizes.items())
            raise report(SpecError, f"cannot shard {self.text!r} for the sizes {given}", _one_for_each_cause(faults))

    def sizes(self, shapes: Sequence[tuple[int, ...] | Sequence[tuple[int, ...]]]) -> dict[str, int]:
        """The size of every dimension, from the operands' shapes in reading order (a group's shapes as a tuple).

        Raises:
          SpecError: for a number of operands, a rank, or two sizes of one dimension that do not agree.

        Example:
          >>> parse_equation("BL, (LE, LE) -> (BE, BE)").sizes([(2, 3), ((3, 5), (3, 5))])
          {'B': 2, 'L': 3, 'E': 5}
        """
        flat = self._flat_shapes(shapes)
        specs = [s for o in self.operands for s in o.specs]
        sizes: dict[str, int] = {}
        faults = []
        for at, (spec, shape) in enumerate(zip(specs, flat)):
            if len(spec.dims) != len(shape):
                faults.append(self._placed(at, spec.faults(shape, dict.fromkeys((*spec.used, *spec.partial), 1))[0]))
                continue
            for dim, size in zip(spec.dims, shape):
                if sizes.setdefault(dim, size) != size:
                    fact = f"dimension {dim} has size {size} here, and size {sizes[dim]} before."
                    remedy = "Arrays that share a dimension agree on its size."
                    faults.append(Fault(self.text, *self.spans[at], fact, remedy))
        if faults:
            raise report(SpecError, f"cannot apply {self.text!r} to arrays of shapes {_shapes_text(shapes)}", faults)
        return sizes

    def _flat_shapes(self, shapes: Sequence) -> list[tuple[int, ...]]:
        if not _are_sequences([shapes]) or not _are_sequences(shapes):
            raise self._no_shapes(shapes)
        counts = [len(shape) if operand.group else 1 for operand, shape in zip(self.operands, shapes)]
        if len(shapes) != len(self.operands) or counts != [len(o.specs) for o in self.operands]:
            wanted = listed(f"a tuple of {len(o.specs)} arrays" if o.group else "an array" for o in self.operands)
            given = "1 operand" if len(shapes) == 1 else f"{len(shapes)} operands"
            raise SpecError(f"cannot apply {self.text!r} to {given}\n  It takes {wanted}.")
        flat = [s for o, shape in zip(self.operands, shapes) for s in (shape if o.group else [shape])]
        if not _are_sequences(flat):
            raise self._no_shapes(shapes)
        return [tuple(s) for s in flat]

    def _no_shapes(self, shapes: Any) -> SpecError:
        return SpecError(f"cannot apply {self.text!r} to the shapes {shown(shapes)}.\n"
                         "  Write a tuple for each operand, and a tuple of tuples for a group.")

    def _placed(self, at: int, fault: Fault) -> Fault:
        # A spec's own faults point into its canonical text; here they point at where it stands in the equation.
        if not self.spans:  # an equation that was not read from text, such as a gradient's
            return Fault(str(self), 0, len(str(self)), fault.fact, fault.remedy)
        start, end = self.spans[at]
        if self.text[start:end] == fault.text:
            start, end = start + fault.start, start + fault.end
        return replace(fault, text=self.text, start=start, end=end)


class Via(tuple[Term, ...]):
    """The left side of an equation, as `via=` takes it: the specs to which the operands are brought. A tuple of terms.

    Attributes:
      text: as it was written; not part of equality.
    """

    text: str

    def __new__(cls, terms: Iterable[Term], text: str = "") -> "Via":
        via = super().__new__(cls, terms)
        via.text = text or _joined(via)
        return via

    @classmethod
    def of(cls, *operands: Specs) -> "Via":
        """The specs of one product's operands; a sequence of specs is a group.

        >>> x, w = Spec.parse("BLE_x"), Spec.parse("E_xF_yz")
        >>> str(Via.of(x, w)), str(Via.of(x, (w, w)))
        ('BLE_x, E_xF_yz', 'BLE_x, (E_xF_yz, E_xF_yz)')
        """
        return cls.sum_of([operands])

    @classmethod
    def sum_of(cls, products: Iterable[Sequence[Specs]]) -> "Via":
        """The specs of several products' operands.

        >>> h, w_out, y, w_o = map(Spec.parse, ("BF_x", "F_xE", "BD_x", "D_xE"))
        >>> str(Via.sum_of([(h, w_out), (y, w_o)]))
        'BF_x, F_xE + BD_x, D_xE'
        """
        return parse_via(_joined(map(_term, products)))

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Every operand in the order in which a call takes them."""
        return tuple(operand for term in self for operand in term.operands)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Every spec as it is read, group members one by one."""
        return tuple(spec for operand in self.operands for spec in operand.specs)

    def __str__(self) -> str:
        return _joined(self)

    def __repr__(self) -> str:
        return f"<Via {str(self)!r}>"


def _joined(terms: Iterable[Term]) -> str:
    return " + ".join(map(str, terms))


def _term(operands: Sequence[Specs]) -> Term:
    return Term(tuple(map(_operand, operands)))


def _operand(specs: Specs) -> Operand:
    return Operand((specs,)) if isinstance(specs, Spec) else Operand(tuple(specs), group=True)


def _one_for_each_cause(faults: Sequence[Fault]) -> list[Fault]:
    """The first fault of every cause: a size that is wrong is wrong wherever its dimension stands."""
    found: dict[tuple, list[Fault]] = {}
    for fault in faults:
        found.setdefault(fault.cause or (fault.fact,), []).append(fault)
    return [_with_the_rest(first, more) for first, *more in found.values()]


def _with_the_rest(first: Fault, more: Sequence[Fault]) -> Fault:
    if not more:
        return first
    places = listed(dict.fromkeys(f"'{fault.text[fault.start : fault.end]}'" for fault in more))
    said = f"The same in {len(more)} more place{'s' * (len(more) > 1)}: {places}."
    return replace(first, remedy=f"{first.remedy}\n  {said}")


def parse_equation(text: str | Equation) -> Equation:
    """Reads an equation; one that is read already is returned as it is.

    Raises:
      SpecError: lists every fault of the text, each with a caret under it.

    Example:
      >>> equation = parse_equation("BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)")
      >>> equation.group, len(equation.operands), str(equation.outputs[1])
      (True, 2, 'BLF_yzx')
      >>> parse_equation("BLE_xyz -> B_xyzLE").is_move
      True

    Source: Pope et al. 2022 (arXiv 2211.05102), section 3.1, for the notation of the specs.
    """
    if isinstance(text, Equation):
        return text
    _refuse_other_than_text(text, "an equation", "A_x, B -> A_xB")
    return _parse_equation(text)


def parse_via(text: str | Via) -> Via:
    """Reads the left side of an equation: the specs to which its operands are brought.

    >>> list(map(str, parse_via("BLE_x, E_xF_yz").specs))
    ['BLE_x', 'E_xF_yz']
    """
    if isinstance(text, Via):
        return text
    _refuse_other_than_text(text, "the specs of via=", "BLE_x, E_xF_yz")
    return _parse_via(text)


# -- reading -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _parse_equation(text: str) -> Equation:
    reader = EquationReader(text)
    sides = reader.sides()
    if len(sides) == 1:
        end = len(text.rstrip())
        reader.fault(end, "an equation has an arrow, and this has none.",
                     "Write '->' and the spec of the result, as in 'A_x, B -> A_xB'.", end + 1)
    faults = [*reader.faults, *faults_of(text, sides[0], sides[1] if len(sides) > 1 else None)]
    if faults:
        raise report(SpecError, f"cannot read the equation {text!r}", sorted(faults, key=lambda f: f.start))
    output = sides[1][0][0]
    written = [s for term in sides[0] for operand in term for s in operand.specs] + output.specs
    return Equation(_terms(sides[0]), tuple(map(spec_from, output.specs)), output.group, text,
                    tuple((s.start, s.end) for s in written))


@lru_cache(maxsize=4096)
def _parse_via(text: str) -> Via:
    reader = EquationReader(text)
    terms = reader.terms()
    if reader.at < len(text):
        arrow, _ = reader.at, reader.arrow()
        reader.fault(arrow, "via= has the operands' specs, and no arrow.", "Write the left side of the equation only.")
    faults = [*reader.faults, *faults_of(text, terms, None)]
    if faults:
        raise report(SpecError, f"cannot read via={text!r}", sorted(faults, key=lambda f: f.start))
    return Via(_terms(terms), text)


def _terms(written: list[TermNode]) -> tuple[Term, ...]:
    return tuple(Term(tuple(Operand(tuple(map(spec_from, o.specs)), o.group) for o in term)) for term in written)


def _refuse_other_than_text(text: object, what: str, example: str) -> None:
    if not isinstance(text, str):
        raise SpecError(f"cannot read {what} from {shown(text)}: it is no text ({type(text).__name__}).\n"
                        f"  Write a string such as {example!r}.")


def _are_sequences(values: Sequence) -> bool:
    return all(isinstance(value, Sequence) and not isinstance(value, str) for value in values)


def _shapes_text(shapes: Sequence) -> str:
    return ", ".join(str(tuple(s) if isinstance(s, Sequence) else s) for s in shapes)
