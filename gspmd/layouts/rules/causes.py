"""Merge faults with one cause: a batch that does not divide is one mistake, in however many tensors."""

from collections.abc import Iterable
from dataclasses import replace

from gspmd.annotate import Fault
from gspmd.annotate.errors import listed

# The number of further tensors that a merged fault names; the others are counted.
_NAMED = 3


def one_for_each_cause(faults: Iterable[Fault]) -> list[Fault]:
    """Return the first fault of every cause, in order; its remedy ends with the number and names of the others.

    Faults have one cause if their `Fault.cause` is equal, or else their fact.

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
