"""One line of a layout, `ffn.w_in = E_xF_yz`, and the faults that point into it."""

from dataclasses import dataclass, replace

from gspmd.annotate import Fault, Spec


@dataclass(frozen=True)
class Line:
    """A key with what is written for it, as an error shows it.

    Attributes:
      name: the key.
      text: what is written; empty for a line that is missing.
      section: the overriding section it stands in; empty in the table itself.
    """

    name: str
    text: str = ""
    section: str = ""

    @property
    def label(self) -> str:
        """The key, with its section in front where it is not in the table itself."""
        return f"[{self.section}] {self.name}" if self.section else self.name

    def at_key(self, fact: str, remedy: str = "") -> Fault:
        """A fault of the key."""
        return Fault(f"{self.label} = {self.text}" if self.text else self.label, 0, len(self.label), fact, remedy)

    def at_text(self, fact: str, remedy: str = "") -> Fault:
        """A fault of all that is written."""
        return self.moved(Fault(self.text, 0, len(self.text), fact, remedy)) if self.text else self.at_key(fact, remedy)

    def at_dim(self, spec: Spec, dim: str, fact: str, remedy: str = "") -> Fault:
        """A fault of one dimension of the spec that is written, with its mesh axes.

        >>> print(Line("ffn.w_in", "E_xF_yz").at_dim(Spec.parse("E_xF_yz"), "F", "dimension F is a pity."))
            ffn.w_in = E_xF_yz
                          ^^^^
          dimension F is a pity.
        """
        whole, at = spec.without_partial(), spec.dims.index(dim)
        start, end = (len(str(whole.without(*spec.dims[i:]))) for i in (at, at + 1))
        return self.moved(Fault(str(spec), start, end, fact, remedy))

    def moved(self, fault: Fault) -> Fault:
        """The fault of a spec by itself, on this line."""
        by = len(self.label) + 3
        return replace(fault, text=f"{self.label} = {fault.text}", start=fault.start + by, end=fault.end + by)
