"""Vias of a model's equations, from those of a layout: for a group of weights, or for one position of a sequence."""

from gspmd.annotate import Spec
from gspmd.annotate.equation import Via
from gspmd.layouts.section import SectionSpecs


def heads_in(at: SectionSpecs) -> Via | None:
    """The via of the residual and the group w_q, w_k, w_v; None leaves it to the planner.

    `in_via` places the residual and w_q, `key_via` places w_k and w_v. Without a `key_via` they are sharded as w_q is
    over E, and over K by those axes of `key` that neither the residual nor E uses.

    Args:
      at: the specs of the attention section of a layout.

    Example:
      >>> from gspmd.layouts import Layout
      >>> heads_in(SectionSpecs(Layout.load("weight-stationary-2d").attention))
      <Via 'BLE_x, (E_xH_yzD, E_xKD_yz, E_xKD_yz)'>
    """
    if at.in_via is None:
        return None
    residual, w_q = at.in_via.specs
    w_k = _beside(residual, w_q, at.key) if at.key_via is None else at.key_via.specs[1]
    return Via.of(residual, (w_q, w_k, w_k))


def whole_length(via: Via | None) -> Via | None:
    """A via whose activation has its length unsharded, for one position of a sequence.

    >>> from gspmd.annotate.equation import parse_via
    >>> whole_length(parse_via("B_xL_yE, V_zE"))
    <Via 'B_xLE, V_zE'>
    """
    if via is None:
        return None
    activation, weight = via.specs
    return Via.of(activation.with_axes("L", ()), weight)


def _beside(residual: Spec, w_q: Spec, key: Spec) -> Spec:
    taken = residual.used | set(w_q.axes_of("E"))
    heads = tuple(axis for axis in key.axes_of("K") if axis not in taken)
    return Spec(("E", "K", "D"), (w_q.axes_of("E"), heads, ()))
