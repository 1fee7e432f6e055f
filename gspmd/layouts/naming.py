"""Equations written with names of a layout's lines, such as `residual, w_in -> hidden`.

The via of an equation has the specs to which the operands are moved before they are multiplied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from gspmd.annotate import LayoutError, PlanError, Spec, SpecError
from gspmd.annotate.equation import Equation, Via, parse_equation, parse_via
from gspmd.annotate.errors import shown
from gspmd.layouts.rules.keys import KEYS, UnresolvedError, dims_of
from gspmd.planner.unknown import unknowns_in

LookUp = Callable[[str], str | None]
"""A function that returns the spec of the line with a given key, or None if the line is optional and absent."""

_NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)?")
_REST = re.compile(r"(?:[\s,()+]|->)*")

#: The key of the via that belongs to a weight; a tied table has the via of the output.
_VIAS = {key.dims[1]: key.name for key in KEYS.values() if key.kind == "via"}
_VIAS["embedding.table"] = _VIAS["output.table"]


def via_of(weight: str) -> str:
    """Return the key of the via that belongs to a weight.

    >>> via_of("ffn.w_in"), via_of("mixer.w_gate"), via_of("mixer.taps")
    ('ffn.in_via', 'mixer.gate_via', 'mixer.taps_via')
    """
    section, _, name = weight.partition(".")
    return _VIAS.get(weight, f"{section}.{name.removeprefix('w_')}_via")


def names_in(text: str) -> list[str]:
    """Return the names of lines in an equation, in reading order.

    >>> names_in("residual, w_in -> hidden")
    ['residual', 'w_in', 'hidden']
    """
    return _NAME.findall(text)


def named_equation(text: str, key_of: Callable[[str], str], look_up: LookUp) -> tuple[Equation, tuple[str, ...]]:
    """Parse an equation written with names of lines, and return the equation and the keys of these lines.

    The keys are in reading order.

    Args:
      text: the equation, such as `"residual, (w_in, w_gate) -> (hidden, hidden)"`.
      key_of: a function that returns the key of the line with a given name.
      look_up: a function that returns the spec of the line with a given key.

    Raises:
      LayoutError: a name in `text` is not a tensor of the layout.
      SpecError: `text` is not an equation, or the specs of its lines do not make a valid equation.

    Example:
      >>> lines = {"ffn.residual": "BLE_x", "ffn.w_in": "E_xF", "ffn.hidden": "BLF"}
      >>> named_equation("residual, w_in -> hidden", "ffn.{}".format, lines.get)
      (<Equation 'BLE_x, E_xF -> BLF'>, ('ffn.residual', 'ffn.w_in', 'ffn.hidden'))
    """
    if not isinstance(text, str) or not _REST.fullmatch(_NAME.sub("", text)):
        raise LayoutError(
            f"cannot read {shown(text)}: an equation of a section consists of the names of lines.\n"
            '  Write it as "residual, w_in -> hidden", with lines of other sections as "attention.query".'
        )
    keys: list[str] = []

    def spec(name: re.Match[str]) -> str:
        key = key_of(name[0])
        found = None if key.endswith("via") else look_up(key)
        if found is None:
            raise LayoutError(f"cannot read {text!r}: {key} is not a tensor of the layout.")
        keys.append(key)
        return found

    in_specs = _NAME.sub(spec, text)
    try:
        return parse_equation(in_specs), tuple(keys)
    except SpecError as error:
        raise SpecError(f"{error}\n  These are the specs of the lines {text!r}.", error.faults) from None


def pinned(equation: Equation, keys: Sequence[str], look_up: LookUp) -> Via | None:
    """Return the via that a layout has for an equation of its lines, or None to let the planner choose.

    Each via in a layout belongs to a weight. In [ffn], `in_via` is for `w_in`. It is also for `w_gate`, because the
    default spec of `w_gate` is the spec of `w_in`. In a custom section, `taps_via` is for the weight `taps` or
    `w_taps`.

    If a weight of a group has no via, its spec in the returned via is derived from the first weight's via. Its
    contracted dimensions are sharded like the contracted dimensions of the first weight in that via. Its other
    dimensions are sharded as in the output of its product, over mesh axes that are still unused.

    The result is None for a move, and if some product has no via for its weight. It is also None if the vias of a
    group move the operand that the weights share to different specs.

    Args:
      equation: the equation in specs.
      keys: the keys of the equation's lines in reading order, as `named_equation` returns them.
      look_up: a function that returns the spec of the line with a given key, or None if the line is absent.

    Raises:
      PlanError: the vias of a group move the operand that the weights share to different specs, and a search for a
        layout has yet to find one of these specs.
    """
    rest, products = iter(keys), []
    for term in equation.terms:
        operands = [[(next(rest), spec) for spec in operand.specs] for operand in term.operands]
        if len(operands) != 2 or len(operands[0]) != 1:
            return None  # a move, or one weight for several activations
        met: list[tuple[Spec, Spec]] = []
        first = operands[1][0][0]
        for (key, weight), result in zip(operands[1], equation.outputs):
            found = _via(key, look_up)
            if found is not None:
                met.append((found.specs[0], found.specs[1]))
            elif met and _section(key) == _section(first):
                met.append((met[0][0], _beside(*met[0], weight, result)))
            else:
                return None
        left, *others = dict.fromkeys(left for left, _ in met)
        if others and unknowns_in((left, *others)):  # the search needs one unknown spec for both
            raise PlanError(
                f"the vias of a group bring its operand to '{left}' and to '{others[0]}'.\n  Write one spec in both."
            )
        if others:
            return None
        weights = tuple(weight for _, weight in met)
        products.append((left, weights if term.operands[1].group else weights[0]))
    return Via.sum_of(products)


def _section(key: str) -> str:
    return key.partition(".")[0]


def _via(key: str, look_up: LookUp) -> Via | None:
    """Return the via that the layout writes for a weight, or None.

    If the layout writes no via for the weight itself, the result is the via of the weight from which it takes its
    default spec. This via does not apply if the two weights have different dimensions. It also does not apply if they
    are in different sections, where they multiply different activations.
    """
    default = KEYS[key].default if key in KEYS else None
    alike = default is not None and (_section(default) != _section(key) or dims_of(default) == dims_of(key))
    for each in (key, default if alike else None):
        if each is None or (_section(each) != _section(key) and via_of(each) != via_of(key)):
            continue
        try:
            text = look_up(via_of(each))
        except UnresolvedError:
            raise
        except LayoutError:  # a custom section without this via
            continue
        if text is not None:
            return parse_via(text)
    return None


def _beside(left: Spec, first: Spec, weight: Spec, result: Spec) -> Spec:
    """Return the spec in which a weight of a group is multiplied, if the layout writes no via for the weight.

    Args:
      left: the spec in which the operand that the weights share is multiplied.
      first: the spec in which the first weight of the group is multiplied.
      weight: the spec of the weight.
      result: the spec of the product with this weight.
    """
    axes = {dim: first.axes_of(dim) for dim in weight.dims if dim in left.dims}
    taken = left.used.union(*axes.values())
    for dim in weight.dims:
        if dim not in axes:
            axes[dim] = tuple(axis for axis in result.axes_of(dim) if axis not in taken)
    return Spec(weight.dims, tuple(axes[dim] for dim in weight.dims))
