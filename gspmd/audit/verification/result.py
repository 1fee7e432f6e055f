"""`Verification`: the differences between a function on a mesh and the same function on one device."""

from dataclasses import dataclass

from gspmd.annotate.errors import PlanError
from gspmd.display.plain import printable


@dataclass(frozen=True, repr=False)
class Parting:
    """A difference between the results under a lowering and the results on one device.

    Attributes:
        lowering: the name of the lowering.
        where: the path of the array in the results, such as `"value[0]['logits']"`; empty if the function raised an
            error.
        absolute: the largest absolute difference.
        relative: `absolute` divided by the largest absolute value of the array on one device.
        tolerance: the largest allowed value of `relative`; 0 if the arrays must be equal.
        index: the index of the first element that differs by more than the tolerance allows.
        error: the error that the function raised, or a description of a wrong shape or dtype; empty otherwise.
    """

    lowering: str
    where: str
    absolute: float = 0.0
    relative: float = 0.0
    tolerance: float = 0.0
    index: tuple[int, ...] = ()
    error: str = ""

    def __repr__(self) -> str:
        return f"<Parting {self}>"

    def __str__(self) -> str:
        if self.error:
            return printable(f"{self.lowering}: raises {self.error}")
        at = f", first at {list(self.index)}" if self.index else ""
        return printable(
            f"{self.lowering}: {self.where} is off by {self.absolute:.3g}, {self.relative:.2g} of its largest value, "
            f"where {self.tolerance:.2g} is allowed{at}"
        )


@dataclass(frozen=True, repr=False)
class Verification:
    """The result of `gspmd.audit.verify`.

    In a boolean context, the object is True if all lowerings give the same results as one device.

    Attributes:
        name: the name of the function.
        lowerings: the lowerings under which the function ran.
        arrays: number of arrays compared under each lowering.
        partings: the differences, sorted by lowering and, for each lowering, in the order of the results.
        equations: (lowering, equation) for each equation of the function that gives wrong results even when it is run
            alone.
    """

    name: str
    lowerings: tuple[str, ...]
    arrays: int
    partings: tuple[Parting, ...]
    equations: tuple[tuple[str, str], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no differences under any lowering."""
        return not self.partings

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_wrong(self) -> None:
        """Raise a PlanError that lists all differences, if there are any."""
        if not self.ok:
            raise PlanError(str(self))

    def __repr__(self) -> str:
        return printable(f"Verification({self.name}: {'ok' if self.ok else f'{len(self.partings)} wrong'})")

    def __str__(self) -> str:
        if self.ok:
            under = ", ".join(self.lowerings)
            return printable(f"{self.name}: {self.arrays} arrays agree with those on one device, under {under}")
        lines = [
            f"{self.name}: under some lowering the results differ from those on one device",
            *map(str, self.partings),
        ]
        lines += [
            f"{name}: '{equation}' gives wrong results even when it is run alone" for name, equation in self.equations
        ]
        return printable("\n  ".join(lines))
