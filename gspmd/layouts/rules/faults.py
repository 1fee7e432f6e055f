"""Faults of a layout, which point into a line such as `ffn.w_in = E_xF_yz`; faults with the same cause are merged."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gspmd.annotate import Fault, Spec
from gspmd.annotate.errors import listed

# Number of other tensors that a merged fault names; further tensors are counted.
_NAMED = 3


@dataclass(frozen=True)
class Line:
    """A line of a layout, with its key and its text as an error shows them.

    Attributes:
      name: the key.
      text: the spec or the via; empty if the line is missing.
      section: the overriding section in which the line is written; empty for the layout's own table.
    """

    name: str
    text: str = ""
    section: str = ""

    @property
    def label(self) -> str:
        """The key; if the line is in an overriding section, this section comes first, in brackets."""
        return f"[{self.section}] {self.name}" if self.section else self.name

    def at_key(self, fact: str, remedy: str = "") -> Fault:
        """Return a fault that points at the key."""
        return Fault(f"{self.label} = {self.text}" if self.text else self.label, 0, len(self.label), fact, remedy)

    def at_text(self, fact: str, remedy: str = "") -> Fault:
        """Return a fault that points at the whole text, or at the key if there is no text."""
        return self.moved(Fault(self.text, 0, len(self.text), fact, remedy)) if self.text else self.at_key(fact, remedy)

    def at_dim(self, spec: Spec, dim: str, fact: str, remedy: str = "") -> Fault:
        """Return a fault that points at one dimension of the spec, including the mesh axes of the dimension.

        >>> print(Line("ffn.w_in", "E_xF_yz").at_dim(Spec.parse("E_xF_yz"), "F", "dimension F is a pity."))
            ffn.w_in = E_xF_yz
                          ^^^^
          dimension F is a pity.
        """
        whole, at = spec.without_partial(), spec.dims.index(dim)
        start, end = (len(str(whole.without(*spec.dims[i:]))) for i in (at, at + 1))
        return self.moved(Fault(str(spec), start, end, fact, remedy))

    def moved(self, fault: Fault) -> Fault:
        """Return a fault that points into this line, given a fault that points into the line's text alone."""
        by = len(self.label) + 3
        return replace(fault, text=f"{self.label} = {fault.text}", start=fault.start + by, end=fault.end + by)


def over(axes: Sequence[str]) -> str:
    """Return words that say over which mesh axes a dimension is sharded, to be put after the word "is".

    >>> over(("x", "y")), over(())
    ('sharded over x and y', 'not sharded')
    """
    return f"sharded over {listed(axes)}" if axes else "not sharded"


def one_for_each_cause(faults: Iterable[Fault]) -> list[Fault]:
    """Merge faults with the same cause into the first of these faults, and keep the order.

    The remedy of the first fault then ends with the number and the names of the other lines. For example, a batch that
    the mesh does not divide is one mistake, however many tensors have a batch. Two faults have the same cause if their
    `Fault.cause` is equal. If `Fault.cause` is None, the `fact` is compared instead.

    >>> several = [Fault(f"{name} = E_x", 0, 1, "the mesh has no axis x.") for name in ("a", "b", "c", "d", "e", "f")]
    >>> print(*one_for_each_cause(several))
        a = E_x
        ^
      the mesh has no axis x.
      The same in 5 more: b, c, d and 2 others.
    """
    groups: dict[tuple, list[Fault]] = {}
    for fault in faults:
        groups.setdefault(fault.cause or (fault.fact,), []).append(fault)
    return [_counted(first, more) for first, *more in groups.values()]


def _counted(first: Fault, more: list[Fault]) -> Fault:
    if not more:
        return first
    names = [fault.text.partition(" = ")[0] for fault in more]
    rest = len(names) - _NAMED
    named = names[:_NAMED] + ([f"{rest} other{'s' * (rest > 1)}"] if rest > 0 else [])
    said = f"The same in {len(names)} more: {listed(named)}."
    return replace(first, remedy=f"{first.remedy}\n  {said}" if first.remedy else said)
