"""Where operands meet in a model's equations: what a layout's vias say of a group of weights, or of one position."""

from typing import Any

from gspmd.annotate import Spec, parse_via


def heads_in(at: Any) -> str | None:
    """Where the residual meets w_q, w_k and w_v, which travel as one group; None leaves it to the planner.

    `in_via` places the residual and w_q, `key_via` places w_k and w_v. Without a `key_via` they follow w_q over E, and
    over their heads they keep those axes of `key` that the residual and E leave free.

    Args:
      at: the attention section of a layout.

    Example:
      >>> from gspmd.layouts import Layout
      >>> heads_in(Layout.load("weight-stationary-2d").section("attention"))
      'BLE_x, (E_xH_yzD, E_xKD_yz, E_xKD_yz)'
    """
    if at.in_via is None:
        return None
    residual, w_q = via_specs(at.in_via)
    w_k = _beside(residual, w_q, Spec.parse(at.key)) if at.key_via is None else via_specs(at.key_via)[1]
    return f"{residual}, ({w_q}, {w_k}, {w_k})"


def whole_length(via: str | None) -> str | None:
    """A via whose activation has its length whole, as where one position is taken out of a sequence.

    >>> whole_length("B_xL_yE, V_zE")
    'B_xLE, V_zE'
    """
    if via is None:
        return None
    left, right = via_specs(via)
    return f"{left.with_axes('L', ())}, {right}"


def via_specs(text: str) -> tuple[Spec, Spec]:
    """The two specs of a layout's via: where the activation goes, and where the weight goes."""
    left, right = parse_via(text)[0].operands
    return left.specs[0], right.specs[0]


def _beside(residual: Spec, w_q: Spec, key: Spec) -> Spec:
    taken = residual.used | set(w_q.axes_of("E"))
    heads = tuple(axis for axis in key.axes_of("K") if axis not in taken)
    return Spec(("E", "K", "D"), (w_q.axes_of("E"), heads, ()))
