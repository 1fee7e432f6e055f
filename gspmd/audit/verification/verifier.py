"""`gspmd.audit.verify`: comparison of a function under each lowering with the same function on one device."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from gspmd.annotate.equation import parse_equation
from gspmd.annotate.errors import PlanError, SpecError, shown
from gspmd.audit.verification.evaluation import difference, partition_of, random_array, values_and_gradients
from gspmd.audit.verification.result import Parting, Verification
from gspmd.lowerings.in_force import lowering
from gspmd.lowerings.names import checked
from gspmd.lowerings.program import program_of
from gspmd.ops._einsum import einsum
from gspmd.tracing.jaxprs import inner_jaxprs


def verify(
    fn: Callable,
    *args: Any,
    lowerings: Sequence[str] = ("xla", "blocking", "looped"),
    gradients: bool = True,
    seed: int = 0,
) -> Verification:
    """Compare a function under each lowering, on the current mesh, with the same function on one device.

    For the run on one device, the mesh has the same axes, each of size 1, so that the same equations are valid. For a
    floating-point array, the largest difference divided by the largest absolute value of the array may be at most the
    `TOLERANCE` of its dtype. All other arrays must be equal. If several devices hold copies of an array, every copy is
    compared.

    Args:
        fn: any function of arrays that `jax.jit` accepts.
        args: the arguments of `fn`. A `jax.ShapeDtypeStruct` is replaced by an array of random values with the same
            sharding; its values are 0 or 1 if the dtype is integer or boolean.
        lowerings: names of lowerings. An equation in `fn` that names its own lowering keeps this lowering.
        gradients: whether to also compare the gradients of all floating-point arguments, for random cotangents.
        seed: seed of all random numbers.

    Returns:
        A `Verification`, with `.ok`, `.partings` and `.raise_if_wrong()`. Printing it lists the differences, and the
        equations of `fn` that give wrong results even when they are run alone.

    Raises:
        PlanError: there is no mesh; an argument is not an array; an argument or a result is a partial sum; a name in
            `lowerings` is unknown; `seed` is not a whole number from 0 to 2^32 - 1; or `fn` raises an error even on one
            device.

    Example:
        >>> from gspmd import annotate
        >>> with jax.set_mesh(jax.make_mesh((1, 1), ("x", "y"))):
        ...     x, w = annotate(jax.numpy.ones((4, 8)), "BE_x"), annotate(jax.numpy.ones((8, 16)), "E_xF_y")
        ...     print(verify(lambda x, w: einsum("BE_x, E_xF_y -> BF_y", x, w), x, w))
        <lambda>: 3 arrays agree with those on one device, under xla, blocking, looped
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    mesh, names = _mesh(name), tuple(map(checked, _several(name, lowerings)))
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise PlanError(f"cannot verify {name} with seed {shown(seed)}.\n  Give a whole number from 0 to 2^32 - 1.")
    args = jax.tree.map(lambda leaf: _argument(name, leaf, mesh, seed), args, is_leaf=_is_abstract)
    partings, arrays = _partings(fn, name, args, mesh, names, gradients, seed)
    wrong = dict.fromkeys(each.lowering for each in partings)
    equations = [(each, text) for each in wrong for text in _wrong_equations(fn, args, mesh, each, seed)]
    return Verification(name, names, arrays, tuple(partings), tuple(equations))


def _partings(
    fn: Callable, name: str, args: Any, mesh: jax.sharding.Mesh, names: Sequence[str], gradients: bool, seed: int
) -> tuple[list[Parting], int]:
    """Return the differences of each lowering from one device, and the number of arrays compared for each lowering."""
    first = mesh.devices.reshape(-1)[:1].reshape((1,) * mesh.devices.ndim)
    one = jax.sharding.Mesh(first, mesh.axis_names, mesh.axis_types)
    try:
        wanted = values_and_gradients(fn, _on(one, args), one, gradients, seed)
    except Exception as error:
        raise PlanError(
            f"cannot verify {name}: it raises an error even on one device: {_said(error)}\n  Fix that first."
        ) from error
    found: list[Parting] = []
    for each in names:
        try:
            with lowering(each):
                got = values_and_gradients(fn, args, mesh, gradients, seed)
        except Exception as error:
            found.append(Parting(each, "", error=_said(error)))
            continue
        compared = (difference(each, path, got.get(path), wanted[path]) for path in wanted)
        found += [one for one in compared if one]
    return found, len(wanted)


def _several(name: str, lowerings: Any) -> Sequence[str]:
    if isinstance(lowerings, str) or not isinstance(lowerings, Sequence):
        raise PlanError(
            f"cannot verify {name} under {shown(lowerings)}.\n  Give several lowerings, such as ('xla', 'blocking')."
        )
    return lowerings


def _mesh(name: str) -> jax.sharding.Mesh:
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise PlanError(
            f"cannot verify {name}: there is no mesh.\n"
            "  Call inside `with jax.set_mesh(mesh):`; gspmd.host.use_host_devices(8) gives devices for a mesh."
        )
    return mesh


def _is_abstract(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, jax.ShapeDtypeStruct)


def _argument(name: str, leaf: Any, mesh: jax.sharding.Mesh, seed: int) -> Any:
    """Return an argument as an array on the mesh; a Python number is returned unchanged."""
    if isinstance(leaf, (bool, int, float, complex)):
        return leaf
    numberless = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUmM"
    if numberless or not isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        raise PlanError(
            f"cannot verify {name}: {shown(leaf)} is not an array.\n"
            "  Give arrays, numbers, jax.ShapeDtypeStructs or trees of them; bind the rest with functools.partial."
        )
    partition = partition_of(leaf)
    if partition.unreduced or partition.reduced:
        remedy = f"Make it in {name}, or reduce it with gspmd.reshard."
        raise PlanError(f"cannot verify {name}: an argument is a partial sum.\n  {remedy}")
    x = random_array(leaf.shape, leaf.dtype, seed) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    return jax.device_put(x, jax.NamedSharding(mesh, partition))


def _on(one: jax.sharding.Mesh, args: Any) -> Any:
    put = lambda x: jax.device_put(x, jax.NamedSharding(one, partition_of(x)))  # noqa: E731
    return jax.tree.map(lambda x: put(x) if isinstance(x, jax.Array) else x, args)


def _wrong_equations(fn: Callable, args: Any, mesh: jax.sharding.Mesh, name: str, seed: int) -> list[str]:
    """Return the equations of a function that give wrong results when each is run alone on random values.

    A result is wrong if it differs from the result on one device.
    """
    with jax.set_mesh(mesh), lowering(name):
        try:
            jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
        except Exception:  # The whole function failed in the same way, which is reported already.
            return []
        equations = dict.fromkeys(_equations(jaxpr))
        return [text for text, shapes in equations if not _verified(text, shapes, name, seed)]


def _equations(jaxpr: Any) -> Iterator[tuple[str, tuple]]:
    """Yield every equation in a jaxpr, with the shapes and dtypes of its operands."""
    for each in jaxpr.eqns:
        program = program_of(each)
        if program is not None:
            yield program.equation, tuple((x.aval.shape, x.aval.dtype) for x in each.invars)
            continue
        for inner in inner_jaxprs(each):
            yield from _equations(inner)


def _verified(text: str, shapes: tuple, name: str, seed: int) -> bool:
    """Return whether an equation that is run alone on the mesh gives the same results as on one device.

    The answer is True for an equation that cannot be run alone.
    """
    try:
        equation = parse_equation(text)
    except SpecError:  # Another planned operation.
        return True
    specs = [spec for operand in equation.operands for spec in operand.specs]
    ranks = [len(spec.dims) for spec in specs] == [len(shape) for shape, _ in shapes]
    if not ranks or any(spec.partial or spec.is_open for spec in equation.specs):
        return True
    mesh = jax.sharding.get_mesh()
    flat = [
        jax.device_put(random_array(shape, dtype, seed), jax.NamedSharding(mesh, spec.partition_spec()))
        for spec, (shape, dtype) in zip(specs, shapes)
    ]

    def alone(*arrays):
        held = iter(arrays)
        nested = [tuple(next(held) for _ in o.specs) if o.group else next(held) for o in equation.operands]
        return einsum(equation, *nested)

    try:
        return not _partings(alone, text, tuple(flat), mesh, (name,), True, seed)[0]
    except PlanError:
        return True


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
