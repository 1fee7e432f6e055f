"""The error for text that the parser rejects: the text is read again, and every fault is listed.

If this second reader finds no fault in a text that the parser refuses, either the reader or the parser has a bug, and
an AssertionError names the text. A property test compares the reader with the parser.
"""

import string
import unicodedata
from collections.abc import Sequence
from typing import Any

from gspmd.annotate.diagnosis.nodes import ARROW
from gspmd.annotate.diagnosis.operands import EquationReader
from gspmd.annotate.diagnosis.reader import Reader
from gspmd.annotate.diagnosis.rules import form_faults
from gspmd.annotate.errors import Fault, SpecError, listed, report, shown

_EXAMPLES = {
    "spec": ("a spec", "B_xLE_yz"),
    "equation": ("an equation", "A_x, B -> A_xB"),
    "via": ("the specs of via=", "BLE_x, E_xF_yz"),
}


def unreadable(what: str, text: object) -> SpecError:
    """Return the error for text that is no valid `what` (spec, equation or via), or for an object that is not text."""
    if not isinstance(text, str):
        name, example = _EXAMPLES[what]
        if what == "spec" and (said := _of_jax(text)):
            return SpecError(f"cannot read a spec from {shown(text)}: {said}")
        return SpecError(
            f"cannot read {name} from {shown(text)}: it is not a string ({type(text).__name__}).\n"
            f"  Write a string such as {example!r}."
        )
    doing, faults_of = {
        "spec": (f"cannot read the spec {text!r}", spec_faults),
        "equation": (f"cannot read the equation {text!r}", equation_faults),
        "via": (f"cannot read via={text!r}", via_faults),
    }[what]
    faults = faults_of(text)
    if not faults:
        raise AssertionError(f"the parser refuses the {what} {text!r}, and no fault is found in it")
    return report(SpecError, doing, faults)


_ALIKE = str.maketrans("ΑΒΕΖΗΙΚΜΝΟΡΤΥΧουАВЕЅІЈКМНОРСТУХаеорсухіјѕ", "ABEZHIKMNOPTYXouABESIJKMHOPCTYXaeopcyxijs")
"""The Greek and Cyrillic letters that look like Latin ones."""


def _lookalikes(text: str) -> list[Fault]:
    """Return a fault for each character that is not a Latin letter but looks like one.

    A person who reads the text could not tell the character from the Latin letter.

    >>> print(_lookalikes("\u0392LE_x")[0].fact)
    'Β' is GREEK CAPITAL LETTER BETA, not the letter B.
    """
    faults = []
    for at, letter in enumerate(text):
        latin = "" if letter.isascii() else unicodedata.normalize("NFKC", letter).translate(_ALIKE)
        if len(latin) == 1 and latin.isascii() and latin.isalpha():
            fact = f"{letter!r} is {unicodedata.name(letter)}, not the letter {latin}."
            faults.append(Fault(text, at, at + 1, fact, f"Type '{latin}'."))
    return faults


def _of_jax(given: Any) -> str:
    """Return the fault and the remedy if a PartitionSpec, a sharding or a tuple of names is given, and otherwise "".

    >>> print(_of_jax(("batch", "length")))
    a spec is one string, with a capital letter for each dimension.
      Write 'BL', with the mesh axes that shard them, such as 'B_xL'.
    """
    given = getattr(given, "spec", given)  # the spec of a NamedSharding
    is_jax = type(given).__name__ in ("P", "PartitionSpec")  # by name, so that specs are read without JAX
    if not (is_jax or isinstance(given, tuple)):
        return ""
    entries = [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in given]
    if not all(isinstance(name, str) for entry in entries for name in entry):
        return ""
    if not is_jax and entries and all(len(entry) == 1 and len(entry[0]) > 1 for entry in entries):
        letters = "".join(_LETTERS.get(name, name[0].upper()) for (name,) in entries)
        marked = f"{letters[:1]}_x{letters[1:]}"
        fact = "a spec is one string, with a capital letter for each dimension."
        return f"{fact}\n  Write {letters!r}, with the mesh axes that shard them, such as {marked!r}."
    letters = string.ascii_uppercase
    spec = "".join(letter + _axes(entry) for letter, entry in zip(letters, entries))
    kind = "it is a PartitionSpec of JAX" if is_jax else "it is a tuple"
    remedy = f"Write {spec!r}, with your letters for {listed(letters[: len(entries)])}."
    return f"{kind}, which does not name dimensions.\n  {remedy}"


_LETTERS = {
    "batch": "B", "length": "L", "sequence": "L", "seq": "L", "embed": "E", "hidden": "E", "heads": "H", "mlp": "F",
    "feed_forward": "F", "vocab": "V", "kv": "K", "kv_heads": "K", "head_size": "D", "head_dim": "D", "expert": "X",
    "experts": "X", "layers": "N",
}  # fmt: skip
"""The letter that stands for each of Flax's usual names of logical axes."""


def _axes(axes: Sequence[str]) -> str:
    """Return the mesh axes of a dimension as a spec writes them."""
    if all(len(axis) == 1 for axis in axes):
        return f"_{''.join(axes)}" if axes else ""
    return f"_{{{','.join(axes)}}}"


def spec_faults(text: str) -> list[Fault]:
    """Return every fault of a text that should be one spec.

    If the text has letters of another script, only the faults of these letters are returned.
    """
    if alike := _lookalikes(text):
        return alike
    reader = Reader(text)
    reader.spec()
    first = True
    while reader.at < len(text):  # the rest of the text is read for its faults
        start = reader.at
        mark = reader.match(ARROW) or reader.peek()
        reader.at = start + len(mark)
        if first:
            fact = f"{mark!r} belongs to an equation, but a spec is one tensor."
            reader.fault(start, fact, "Write one spec, as in 'B_xLE_yz'.")
        first = False
        reader.spec()
    return reader.faults


def equation_faults(text: str) -> list[Fault]:
    """Return every fault of a text that should be an equation, in the order of the text; see `spec_faults`."""
    if alike := _lookalikes(text):
        return alike
    reader = EquationReader(text)
    sides = reader.sides()
    if len(sides) == 1:
        end = len(text.rstrip())
        remedy = "Write '->' and the spec of the result, as in 'A_x, B -> A_xB'."
        reader.fault(end, "an equation has an arrow, but this text has none.", remedy, end + 1)
    faults = [*reader.faults, *form_faults(text, sides[0], sides[1] if len(sides) > 1 else None)]
    return sorted(faults, key=lambda fault: fault.start)


def via_faults(text: str) -> list[Fault]:
    """Return every fault of a text that should be the left side of an equation, in text order; see `spec_faults`."""
    if alike := _lookalikes(text):
        return alike
    reader = EquationReader(text)
    terms = reader.terms()
    if reader.at < len(text):
        arrow, _ = reader.at, reader.arrow()
        reader.fault(
            arrow, "via= has only the operands' specs, without an arrow.", "Write the left side of the equation only."
        )
    return sorted([*reader.faults, *form_faults(text, terms, None, is_via=True)], key=lambda fault: fault.start)


def spans(text: str) -> tuple[tuple[int, int], ...]:
    """Return the start and the end of every spec in an equation, in reading order."""
    terms, results = EquationReader(text).sides()
    specs = [spec for term in (*terms, *results) for operand in term for spec in operand.specs]
    return tuple((spec.start, spec.end) for spec in specs)
