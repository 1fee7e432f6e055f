"""The error of a text that the parser refuses: read it again, and list every fault.

If this reader finds no fault in a text that the parser refuses, one of the two is wrong: that is an AssertionError
which names the text. A property test compares the two.
"""

from gspmd.annotate.diagnosis.nodes import ARROW
from gspmd.annotate.diagnosis.operands import EquationReader
from gspmd.annotate.diagnosis.reader import Reader
from gspmd.annotate.diagnosis.rules import form_faults
from gspmd.annotate.errors import Fault, SpecError, report, shown

_EXAMPLES = {
    "spec": ("a spec", "B_xLE_yz"),
    "equation": ("an equation", "A_x, B -> A_xB"),
    "via": ("the specs of via=", "BLE_x, E_xF_yz"),
}


def unreadable(what: str, text: object) -> SpecError:
    """Return the error of a text refused as `what` ("spec", "equation" or "via"), or of an object that is not text."""
    if not isinstance(text, str):
        name, example = _EXAMPLES[what]
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


def spec_faults(text: str) -> list[Fault]:
    """Every fault of a text that should be one spec."""
    reader = Reader(text)
    reader.spec()
    first = True
    while reader.at < len(text):  # the rest of the text is read for its faults
        start = reader.at
        mark = reader.match(ARROW) or reader.peek()
        reader.at = start + len(mark)
        if first:
            fact = f"{mark!r} belongs to an equation, and a spec is one tensor."
            reader.fault(start, fact, "Write one spec, as in 'B_xLE_yz'.")
        first = False
        reader.spec()
    return reader.faults


def equation_faults(text: str) -> list[Fault]:
    """Every fault of a text that should be an equation, in its order."""
    reader = EquationReader(text)
    sides = reader.sides()
    if len(sides) == 1:
        end = len(text.rstrip())
        remedy = "Write '->' and the spec of the result, as in 'A_x, B -> A_xB'."
        reader.fault(end, "an equation has an arrow, and this has none.", remedy, end + 1)
    faults = [*reader.faults, *form_faults(text, sides[0], sides[1] if len(sides) > 1 else None)]
    return sorted(faults, key=lambda fault: fault.start)


def via_faults(text: str) -> list[Fault]:
    """Every fault of a text that should be the left side of an equation, in its order."""
    reader = EquationReader(text)
    terms = reader.terms()
    if reader.at < len(text):
        arrow, _ = reader.at, reader.arrow()
        reader.fault(arrow, "via= has the operands' specs, and no arrow.", "Write the left side of the equation only.")
    return sorted([*reader.faults, *form_faults(text, terms, None)], key=lambda fault: fault.start)


def spans(text: str) -> tuple[tuple[int, int], ...]:
    """The start and the end of every spec of an equation, in reading order."""
    terms, results = EquationReader(text).sides()
    specs = [spec for term in (*terms, *results) for operand in term for spec in operand.specs]
    return tuple((spec.start, spec.end) for spec in specs)
