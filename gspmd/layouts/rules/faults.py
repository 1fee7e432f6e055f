"""Faults of a layout, which point into a line such as `ffn.w_in = E_xF_yz`; faults with one cause are merged."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gspmd.annotate import Fault, Spec
from gspmd.annotate.errors import listed

# Number of other tensors that a merged fault names; further tensors are counted.
_NAMED = 3


@dataclass(frozen=True)
class Line:
    """A line of a layout, with key and text as an error shows them.

    Attributes:
      name: the key.
      text: its spec or via; empty for a missing line.
      section: the overriding section of the line; empty in the table itself.
    """

    name: str
    text: str = ""
    section: str = ""

    @property
    def label(self) -> str:
        """The key, preceded by its overriding section in brackets if it has one."""
        return f"[{self.section}] {self.name}" if self.section else self.name

    def at_key(self, fact: str, remedy: str = "") -> Fault:
        """Return a fault that points at the key."""
        return Fault(f"{self.label} = {self.text}" if self.text else self.label, 0, len(self.label), fact, remedy)

    def at_text(self, fact: str, remedy: str = "") -> Fault:
        """Return a fault that points at the whole text."""
        return self.moved(Fault(self.text, 0, len(self.text), fact, remedy)) if self.text else self.at_key(fact, remedy)

    def at_dim(self, spec: Spec, dim: str, fact: str, remedy: str = "") -> Fault:
        """Return a fault that points at one dimension of the spec and its mesh axes.

        >>> print(Line("ffn.w_in", "E_xF_yz").at_dim(Spec.parse("E_xF_yz"), "F", "dimension F is a pity."))
            ffn.w_in = E_xF_yz
                          ^^^^
          dimension F is a pity.
        """
        whole, at = spec.without_partial(), spec.dims.index(dim)
        start, end = (len(str(whole.without(*spec.dims[i:]))) for i in (at, at + 1))
        return self.moved(Fault(str(spec), start, end, fact, remedy))

    def moved(self, fault: Fault) -> Fault:
        """Return a fault that points into a spec, moved to where the spec is in this line."""
        by = len(self.label) + 3
        return replace(fault, text=f"{self.label} = {fault.text}", start=fault.start + by, end=fault.end + by)


def over(axes: Sequence[str]) -> str:
    """Describe by which mesh axes a dimension is sharded, in words that follow "is".

    >>> over(("x", "y")), over(())
    ('sharded over x and y', 'not sharded')
    """
    return f"sharded over {listed(axes)}" if axes else "not sharded"


def one_for_each_cause(faults: Iterable[Fault]) -> list[Fault]:
    """Return the first fault of every cause, in order; its remedy ends with number and names of the other lines.

    For example, a batch that the mesh does not divide is one mistake, however many tensors have a batch. Faults have
    the same cause if their `Fault.cause` is equal or, if that is None, their `fact`.

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
