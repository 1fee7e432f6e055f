"""Read one spec character by character, and go on after a fault, so that one error can list all faults.

The grammar is that of `annotate/parser.py`.
"""

import re

from gspmd.annotate.diagnosis.nodes import (
    ARROW,
    CAPITALS,
    LETTERS,
    SEPARATOR,
    Axis,
    Dim,
    LocatedSpec,
)
from gspmd.annotate.errors import Fault, listed
from gspmd.annotate.parser import NAME, OPEN, axes_suffix, dim_text

_PARTIAL = re.compile(r"(?:\(\s*)?(partialsum|reduced)-")
_ENCLOSED = re.compile(r"\(\s*(?:partialsum|reduced)-\s*(\{[^{}()]*\}|[^{}(),+>]*)\s*\)")
_MISSPELT = re.compile(r"(?:part|unreduced)[a-z_]*-?[a-z]*")
_WORD = re.compile(r"[a-z0-9]+")
_LOWER_SUFFIX = re.compile(r"_[a-z]*")
_INSIDE_BRACES = re.compile(r"[^{}()>+]*")
_SUFFIX = re.compile(r"\{[^{}(),+>]*\}|[a-z0-9]*\??")
_STRAY = re.compile(rf"(?:(?!{ARROW.pattern})[^A-Za-z0-9_,+()\s])+|.", re.DOTALL | re.VERBOSE)
_ARROW_MEANT = "Write the arrow '->'."
_STRAY_REMEDY = {
    "-": _ARROW_MEANT,
    "=": _ARROW_MEANT,
    "*": "Write a product with a comma, as in 'A, B -> AB'.",
    "?": "Write 'E_?' to leave dimension E to the compiler.",
    "...": "Write out every dimension.",
}


class Reader:
    """A position in a text, and the faults found so far."""

    def __init__(self, text: str):
        self.text, self.at = text, 0
        self.faults: list[Fault] = []

    # -- the smallest steps -------------------------------------------------------------------------------------------

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def space(self) -> None:
        while self.peek().isspace():
            self.at += 1

    def take(self, literal: str) -> bool:
        found = self.text.startswith(literal, self.at)
        self.at += len(literal) * found
        return found

    def match(self, pattern: re.Pattern) -> str:
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found.group() if found else ""

    def fault(self, start: int, fact: str, remedy: str = "", end: int | None = None) -> None:
        self.faults.append(Fault(self.text, start, self.at if end is None else end, fact, remedy))

    # -- a spec -------------------------------------------------------------------------------------------------------

    def spec(self) -> LocatedSpec:
        """Read a spec up to a separator (`,` `+` `->` or a parenthesis) or the end of the text."""
        self.space()
        spec = LocatedSpec(self.at, self.at)
        while self.at < len(self.text) and not self._at_separator(spec):
            self._piece(spec)
            spec.end = self.at
            self.space()
        self._clashes(spec)
        return spec

    def _at_separator(self, spec: LocatedSpec) -> bool:
        if self.peek() != "(":
            return SEPARATOR.match(self.text, self.at) is not None
        # A parenthesis opens a group, unless it encloses the partial sum of the spec at hand.
        return (_PARTIAL if spec.dims else _ENCLOSED).match(self.text, self.at) is None

    def _piece(self, spec: LocatedSpec) -> None:
        c = self.peek()
        if c in CAPITALS:
            self._dim(spec)
        elif _PARTIAL.match(self.text, self.at):
            self._partial(spec)
        elif c == "_":
            self._lone_underscore(spec)
        elif c in LETTERS:
            self._lower_case(spec)
        else:
            self._stray(spec)

    def _dim(self, spec: LocatedSpec) -> None:
        dim = Dim(self.peek(), self.at, self.at + 1)
        self.at += 1
        if self.take("_"):
            self._axes(dim, f"{dim.name}_", f"dimension {dim.name}")
            dim.end = self.at
        if spec.partial:
            self.fault(
                dim.start,
                f"dimension {dim.name} appears after the partial sum.",
                "Write every dimension first: the partial sum ends a spec.",
            )
            spec.broken = True
        spec.dims.append(dim)

    def _partial(self, spec: LocatedSpec) -> None:
        start = self.at
        enclosed = self.peek() == "("
        word = "reduced" if self.match(_PARTIAL).endswith("reduced-") else "partialsum"
        partial = Dim(word, start, self.at)
        self.space()
        self._axes(partial, f"{word}-", "the partial sum")
        if enclosed and not self._closes():
            remedy = f"Write it '{word}-x' or '({word}-x)'."
            self.fault(start, "the parenthesis of this partial sum is not closed.", remedy)
            spec.broken = True
        partial.end = self.at
        if spec.partial:
            fact = "a spec ends in 'partialsum-' or in 'reduced-', but this spec has both."
            remedy = "Leave one of them out."
            if spec.partial.name == word:
                fact = "a spec has one partial sum, and this is a second."
                remedy = f"Write the mesh axes of both together: '{word}-xy'."
            self.fault(start, fact, remedy)
            spec.broken = True
        spec.partial = partial if spec.partial is None else spec.partial

    def _closes(self) -> bool:
        at = self.at
        self.space()
        closed = self.take(")")
        self.at = self.at if closed else at
        return closed

    # -- the axes after '_', 'partialsum-' or 'reduced-' --------------------------------------------------------------

    def _axes(self, dim: Dim, before: str, owner: str) -> None:
        first, count = self.at, len(self.faults)
        while self._at_axis():
            if self.take("{"):
                dim.braced = True
                self._braces(dim, before, owner)
            else:
                dim.axes.append(Axis(self.peek(), self.at, self.at + 1))
                self.at += 1
        if len(self.faults) == count:
            self._suffix_faults(dim, first, before, owner)

    def _at_axis(self) -> bool:
        # In 'E_partialsum-x' the word is a partial sum, not a row of mesh axes that shard E.
        c = self.peek()
        in_suffix = c in LETTERS or c in tuple("0123456789{?")
        return in_suffix and not self.text.startswith(("partialsum-", "reduced-"), self.at)

    def _braces(self, dim: Dim, before: str, owner: str) -> None:
        start, closing = self.at - 1, self.match(_INSIDE_BRACES)
        if not self.take("}"):
            return self.fault(start, f"the brace after '{before}' is not closed.", f"Write '{before}{{data,model}}'.")
        at = start + 1
        for word in closing.split(","):
            place = at + len(word) - len(word.lstrip())
            dim.axes.append(Axis(word.strip(), place, place + len(word.strip())))
            at += len(word) + 1
        if not all(axis.name for axis in dim.axes):
            self.fault(
                start,
                f"the braces after '{before}' hold an empty name.",
                f"Name the mesh axes of {owner}, as in '{before}{{data,model}}'.",
            )
        for axis in dim.axes:
            if axis.name not in ("", OPEN) and not NAME.fullmatch(axis.name):
                self.fault(
                    axis.start,
                    f"{axis.name!r} is not the name of a mesh axis.",
                    "A name is a lower-case letter, then lower-case letters, digits and '_'.",
                    axis.end,
                )
        dim.axes = [axis for axis in dim.axes if axis.name]

    def _suffix_faults(self, dim: Dim, first: int, before: str, owner: str) -> None:
        suffix = self.text[first : self.at]
        names = [axis.name for axis in dim.axes]
        if not names:
            alone = f", or '{dim.name}' alone where it is unsharded" if before[-1] == "_" else ""
            self.fault(dim.start, f"'{before}' names no mesh axis.", f"Write '{before}x'{alone}.")
        elif OPEN in names and before[-1] == "-":
            self.fault(first, "a partial sum names its mesh axes: it cannot be left open.", f"Write '{before}x'.")
        elif OPEN in names and suffix != OPEN:
            rest = axes_suffix([n for n in names if n != OPEN]) or "x"
            self.fault(
                first,
                f"'?' leaves all of {owner} to the compiler, so no mesh axis goes with it.",
                f"Write '{before}?' or '{before}{rest}'.",
            )
        elif dim.braced and (suffix[0] != "{" or suffix.find("}") != len(suffix) - 1):
            self.fault(
                first,
                f"{owner} has mesh axes inside braces and outside.",
                f"Write them all in one pair of braces: '{before}{{{','.join(names)}}}'.",
            )
        elif not dim.braced and any(n.isdigit() for n in names):
            self.fault(
                first,
                f"{suffix!r} has a digit, and without braces every mesh axis is one letter.",
                f"If it is one name, write '{before}{{{suffix}}}'." if NAME.fullmatch(suffix) else "",
            )
        else:
            self._repeats(dim, first, before, suffix)

    def _repeats(self, dim: Dim, first: int, before: str, suffix: str) -> None:
        names = [axis.name for axis in dim.axes]
        twice = sorted({n for n in names if names.count(n) > 1}, key=names.index)
        if not twice:
            return
        which = f"mesh axis {twice[0]} appears" if len(twice) == 1 else f"mesh axes {listed(twice)} appear"
        self.fault(
            first,
            f"{which} twice in '{before}{suffix}'.",
            "Name each mesh axis once."
            if dim.braced
            else f"If {suffix!r} is the name of one mesh axis, write '{before}{{{suffix}}}'.",
        )

    # -- what is wrong ------------------------------------------------------------------------------------------------

    def _clashes(self, spec: LocatedSpec) -> None:
        """Report a dimension, or a mesh axis, that appears twice in one spec."""
        first: dict[str, Dim] = {}
        seen: dict[str, Dim] = {}
        for dim in [*spec.dims, *([spec.partial] if spec.partial else [])]:
            if dim.name in first:
                self.fault(
                    dim.start,
                    f"dimension {dim.name} appears twice in one spec.",
                    "Every dimension has a letter of its own.",
                    dim.end,
                )
            first.setdefault(dim.name, dim)
            for axis in dim.axes:
                other = seen.setdefault(axis.name, dim)
                if axis.name != OPEN and other is not dim:
                    self._repeated_axis(axis, other, dim)

    def _repeated_axis(self, axis: Axis, one: Dim, two: Dim) -> None:
        if two.name in ("partialsum", "reduced"):
            whose = "belongs to the partial sum" if two.name == "partialsum" else "belongs to 'reduced-'"
            fact = f"mesh axis {axis.name} shards dimension {one.name} and {whose} as well."
            remedy = "Each mesh axis appears once in a spec: drop it from one of the two."
        else:
            fact = f"mesh axis {axis.name} shards dimension {one.name} and dimension {two.name} as well."
            remedy = "A mesh axis shards one dimension of a tensor: drop it from one of them."
        self.fault(axis.start, fact, remedy, axis.end)

    def _lone_underscore(self, spec: LocatedSpec) -> None:
        start, last = self.at, spec.dims[-1] if spec.dims and not spec.partial else None
        self.at += 1
        word = self.match(_SUFFIX) or "x"
        found = self.text[start : self.at]
        if last is None:
            self.fault(start, f"{found!r} follows no dimension.", f"Write the dimension first: 'E_{word}'.")
        elif last.axes or last.end == start:
            self.fault(start, f"dimension {last.name} has a second '_'.", _joined(last, word))
        else:
            fact = f"a space separates dimension {last.name} from {found!r}."
            self.fault(start, fact, f"Write '{last.name}_{word}'.")
        spec.broken = True

    def _lower_case(self, spec: LocatedSpec) -> None:
        start, last = self.at, spec.dims[-1] if spec.dims and not spec.partial else None
        misspelt = self.match(_MISSPELT)
        word = misspelt or self.match(_WORD)
        if misspelt:
            remedy = "A partial sum is written 'partialsum-x'."
        elif last and last.end == start and not last.axes:
            remedy = f"To shard dimension {last.name}, write '{dim_text(last.name, [word])}'."
        elif last and last.axes and self.peek() != "_":
            remedy = _joined(last, word)
        else:
            self.match(_LOWER_SUFFIX)
            remedy = f"Dimensions are capital letters: write '{word.upper()}{self.text[start + len(word) : self.at]}'."
        self.fault(start, f"{self.text[start : self.at]!r} is neither a dimension nor the mesh axes of one.", remedy)
        spec.broken = True

    def _stray(self, spec: LocatedSpec) -> None:
        start, found = self.at, self.match(_STRAY)
        remedy = _STRAY_REMEDY.get(found, "A spec is written as 'B_xLE_yz'.")
        self.fault(start, f"{found!r} has no meaning in a spec.", remedy)
        spec.broken = True


def _joined(dim: Dim, word: str) -> str:
    names = [a.name for a in dim.axes]
    if OPEN in names or not NAME.fullmatch(word):
        return f"Write the mesh axes of dimension {dim.name} once, together."
    more = [word] if any(len(n) > 1 for n in names) else list(word)
    return f"Write the mesh axes of dimension {dim.name} together: '{dim_text(dim.name, [*names, *more])}'."
