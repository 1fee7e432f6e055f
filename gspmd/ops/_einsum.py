"""`gspmd.einsum` and `gspmd.reshard`, which run an equation as a program, and its gradient as two more equations."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import jax

from gspmd.annotate.arrays import check_type, refuse_elsewhere
from gspmd.annotate.equation import Equation, Via, parse_equation, parse_via
from gspmd.annotate.errors import SpecError
from gspmd.lowerings.call import Call, default_precision
from gspmd.lowerings.dispatch import program_of_call
from gspmd.lowerings.program import context
from gspmd.ops.interface.operands import flat_operands, of_one_kind


def einsum(
    equation: str | Equation,
    *operands: Any,
    lowering: str | None = None,
    via: str | Via | None = None,
    wire_dtype: Any = None,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Any:
    """Compute an equation on the current mesh, with the collectives of the equation's plan.

    Args:
        equation: the specs of the operands and of the result; see docs/notation.md.
        operands: arrays with the ranks and placements of the specs. For a group of specs, pass a tuple of arrays.
        lowering: `"xla"`, `"blocking"`, `"looped"`, `"looped:<schedule>"` or `"auto"`, which are explained at the
            context manager `gspmd.lowering`. The default is the lowering that the context manager has set.
        via: the specs to which the operands are moved before the local einsum. If it is None, the planner searches for
            these specs.
        wire_dtype: the dtype in which everything is sent; by default each array is sent in its own dtype. Only
            floating-point numbers may be sent in a different dtype, which must be floating-point too. Narrower dtypes
            round: float16 overflows above 65504, float8_e4m3fn above 448, and 8-bit dtypes keep a mantissa of two or
            three bits. This argument is not available under lowering `"xla"`.
        precision: the precision of the local products, as in `jax.lax.dot`; by default the precision that
            `jax.default_matmul_precision` has set.
        preferred_element_type: the dtype of the result; by default the dtype to which JAX promotes the operands. In
            every case, local products accumulate in float32 (int32 for integers), and partial sums are sent in the
            dtype of the result.

    Returns:
        The result, sharded as the equation says, or a tuple of results if the equation ends in a group.

    Raises:
        SpecError: the notation is wrong, an operand is not an array, shapes or sizes do not fit, or an array does not
            have the placement of its spec.
        PlanError: there is no mesh or no plan; or the dtypes cannot be multiplied; or `wire_dtype` cannot hold the
            numbers to send; or the einsum is differentiated in forward mode under a lowering other than `"xla"`.

    Example:
        >>> import numpy as np
        >>> from gspmd import annotate
        >>> mesh = jax.make_mesh((1, 1), ("x", "y"))
        >>> with jax.set_mesh(mesh):
        ...     x, w = annotate(np.ones((4, 8)), "BE_xy"), annotate(np.ones((8, 16)), "E_xF_y")
        ...     einsum("BE_xy, E_xF_y -> BF_yx", x, w).shape
        (4, 16)

    Source: Pope et al. 2022 (arXiv 2211.05102), §3.1; the planned gradient is our own.
    Differs: forward-mode differentiation works under lowering "xla" only.
    """
    equation = parse_equation(equation)
    flat, joint = of_one_kind(equation, flat_operands(equation, operands))
    sizes = equation.sizes(_shapes(equation, flat))
    ctx = context(lowering)
    names = tuple(str(x.dtype) for x in flat)
    result, wire = joint, None
    if any(option is not None for option in (wire_dtype, precision, preferred_element_type)):
        from gspmd.ops.interface.options import refuse_precision, result_dtype, wire_name

        result = result_dtype(equation, joint, preferred_element_type)
        wire = wire_name(equation, names, result, wire_dtype)
        refuse_precision(equation, precision)
    if precision is None:  # Part of the call, since plans and programs are kept by call.
        precision = default_precision()
    via = None if via is None else parse_via(via)
    call = Call(equation, tuple(sizes.items()), ctx, names, via, wire, precision, result)
    program = program_of_call(call)
    for number, (x, spec) in enumerate(zip(flat, call.operands)):
        doing = f"cannot use operand {number + 1} of '{equation}' as '{spec}'"
        if ctx.explicit:
            flat[number] = check_type(x, spec, doing)
        else:
            refuse_elsewhere(x, spec, doing)
    if any(spec.partial for spec in equation.outputs):
        from gspmd.lowerings.transformations.hoisting import never_hoisted

        # This is called outside of the program, because JAX may hoist the whole program out of a loop that is not
        # differentiated.
        flat = never_hoisted(*flat)
    results = program(*flat)
    return tuple(results) if equation.group else results[0]


def reshard(x: Any, equation: str | Equation, lowering: str | None = None) -> jax.Array:
    """Move an array from one placement to another, by the cheapest chain of collectives.

    Args:
        x: an array that is sharded as the left side of the equation says.
        equation: a move, such as `"BLE_xyz -> B_xyzLE"`. The move may also transpose the array, sum dimensions away and
            add up partial sums.
        lowering: the lowering, as in `gspmd.einsum`.

    Returns:
        The array, sharded as the right side of the equation says.

    Raises:
        SpecError: the equation is not a move, or does not fit the array.

    Example:
        >>> import numpy as np
        >>> from gspmd import annotate
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> with jax.set_mesh(mesh):
        ...     reshard(annotate(np.ones((4, 8)), "B_xE"), "B_xE -> BE_x").shape
        (4, 8)
    """
    equation = parse_equation(equation)
    if not equation.is_move:
        raise SpecError(
            f"cannot reshard by '{equation}', which has several operands.\n"
            "  Use gspmd.einsum, or a move such as 'BE_x -> B_xE'."
        )
    return einsum(equation, x, lowering=lowering)


def _shapes(equation: Equation, flat: Sequence[jax.Array]) -> list[tuple]:
    """Return the shape of each operand; for a group, return a tuple with the shape of each member."""
    held = iter([x.shape for x in flat])
    return [tuple(islice(held, len(o.specs))) if o.group else next(held) for o in equation.operands]
