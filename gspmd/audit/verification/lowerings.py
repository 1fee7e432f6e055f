"""`gspmd.audit.verify`: a function on the mesh under each lowering, against the same function on one device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd.annotate.equation import parse_equation
from gspmd.annotate.errors import PlanError, SpecError, shown
from gspmd.display.plain import printable
from gspmd.lowerings.default import checked, lowering
from gspmd.lowerings.program import program_of
from gspmd.ops._einsum import einsum

TOLERANCE = {"float64": 1e-11, "float32": 5e-5, "float16": 1e-2, "bfloat16": 4e-2}
"""How far a number may be from one device's, as a part of the largest in its array; other dtypes are held exactly."""


@dataclass(frozen=True, repr=False)
class Parting:
    """Where a lowering parts from one device.

    Attributes:
        lowering: under which.
        where: the array's place in the results, such as `"value[0]['logits']"`; empty where the function raised.
        absolute: largest difference.
        relative: that difference as a part of the largest number in one device's array.
        tolerance: what would have been allowed of that; 0 for exact.
        index: of the first element that differs by more.
        error: what the function raised.
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
            f"{self.lowering}: {self.where} is off by {self.absolute:.3g}, {self.relative:.2g} of its largest number "
            f"where {self.tolerance:.2g} is allowed{at}"
        )


@dataclass(frozen=True, repr=False)
class Verification:
    """What `verify` has found; true where every lowering gives what one device gives.

    Attributes:
        name: of the function.
        lowerings: those that it was run under.
        arrays: how many were compared under each.
        partings: where they part, in the order of the lowerings and of the results.
        equations: those of the function's equations that part by themselves, as (lowering, equation).
    """

    name: str
    lowerings: tuple[str, ...]
    arrays: int
    partings: tuple[Parting, ...]
    equations: tuple[tuple[str, str], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing parts."""
        return not self.partings

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_wrong(self) -> None:
        """Raises PlanError, with all that was found, unless everything is right."""
        if not self.ok:
            raise PlanError(str(self))

    def __repr__(self) -> str:
        return printable(f"Verification({self.name}: {'ok' if self.ok else f'{len(self.partings)} wrong'})")

    def __str__(self) -> str:
        if self.ok:
            under = ", ".join(self.lowerings)
            return printable(f"{self.name}: {self.arrays} arrays under {under} are those of one device")
        lines = [f"{self.name} is not under every lowering what it is on one device", *map(str, self.partings)]
        lines += [f"{name}: by itself, '{equation}' is wrong" for name, equation in self.equations]
        return printable("\n  ".join(lines))


def verify(
    fn: Callable,
    *args: Any,
    lowerings: Sequence[str] = ("xla", "blocking", "looped"),
    gradients: bool = True,
    seed: int = 0,
) -> Verification:
    """Run a function on the current mesh under each lowering, and on one device, and say where they part.

    On one device the mesh has the same axes, each of size 1, so that the same equations hold. Floating results are
    compared up to `TOLERANCE` of the largest number of their array, all others exactly; every copy of an array counts.

    Args:
        fn: any function of arrays that `jax.jit` takes.
        args: its arguments; for a `jax.ShapeDtypeStruct`, random numbers are placed as its sharding says (integers are
            0 or 1).
        lowerings: the lowerings; equations of `fn` that name one of their own keep it.
        gradients: whether to compare the gradients of all floating arguments too, for random cotangents.
        seed: of everything that is drawn.

    Returns:
        A `Verification`, with `.ok`, `.partings`, `.raise_if_wrong()`; `print` says where they part. Where an equation
        of `fn` is wrong by itself, it is named.

    Raises:
        PlanError: there is no mesh, an argument is no array, something owes a partial sum, or `fn` raises on one
            device too.

    Example:
        >>> from gspmd import annotate
        >>> with jax.set_mesh(jax.make_mesh((1, 1), ("x", "y"))):
        ...     x, w = annotate(jnp.ones((4, 8)), "BE_x"), annotate(jnp.ones((8, 16)), "E_xF_y")
        ...     print(verify(lambda x, w: einsum("BE_x, E_xF_y -> BF_y", x, w), x, w))
        <lambda>: 3 arrays under xla, blocking, looped are those of one device
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    mesh, names = _mesh(name), tuple(map(checked, _several(name, lowerings)))
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise PlanError(f"cannot verify {name} with seed {shown(seed)}.\n  Give a whole number from 0 to 2^32 - 1.")
    args = jax.tree.map(lambda leaf: _argument(name, leaf, mesh, seed), args, is_leaf=_is_abstract)
    found, arrays = _partings(fn, name, args, mesh, names, gradients, seed)
    wrong = dict.fromkeys(parting.lowering for parting in found)
    equations = [(each, text) for each in wrong for text in _wrong_equations(fn, args, mesh, each, seed)]
    return Verification(name, names, arrays, tuple(found), tuple(equations))


def _partings(
    fn: Callable, name: str, args: Any, mesh: jax.sharding.Mesh, names: Sequence[str], gradients: bool, seed: int
) -> tuple[list[Parting], int]:
    """Where the lowerings part from one device, and how many arrays that says."""
    first = mesh.devices.reshape(-1)[:1].reshape((1,) * mesh.devices.ndim)
    one = jax.sharding.Mesh(first, mesh.axis_names, mesh.axis_types)
    try:
        wanted = _run(fn, _on(one, args), one, gradients, seed)
    except Exception as error:
        raise PlanError(
            f"cannot verify {name}: on one device, too, it raises {_said(error)}\n  Mend that first."
        ) from error
    found: list[Parting] = []
    for each in names:
        try:
            with lowering(each):
                got = _run(fn, args, mesh, gradients, seed)
        except Exception as error:
            found.append(Parting(each, "", error=_said(error)))
            continue
        found += [parting for path in wanted for parting in _part(each, path, got.get(path), wanted[path])]
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
            "  Call inside `with jax.set_mesh(mesh):`; gspmd.host.use_host_devices(8) gives devices to make one of."
        )
    return mesh


def _is_abstract(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, jax.ShapeDtypeStruct)


def _argument(name: str, leaf: Any, mesh: jax.sharding.Mesh, seed: int) -> Any:
    """An array of the mesh, or a number."""
    if isinstance(leaf, (bool, int, float, complex)):
        return leaf
    wordy = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUmM"
    if wordy or not isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        raise PlanError(
            f"cannot verify {name}: {shown(leaf)} is no array.\n"
            "  Give arrays, numbers, jax.ShapeDtypeStructs or trees of them; bind the rest with functools.partial."
        )
    partition = _partition(leaf)
    if partition.unreduced or partition.reduced:
        raise PlanError(f"cannot verify {name}: an argument owes a partial sum.\n  Make it in {name}, or settle it.")
    x = _drawn(leaf.shape, leaf.dtype, seed) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    return jax.device_put(x, jax.NamedSharding(mesh, partition))


def _partition(leaf: Any) -> jax.P:
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, jax.NamedSharding) else jax.P()


def _drawn(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    if jnp.issubdtype(dtype, jnp.inexact):
        return rng.normal(size=shape).astype(dtype)
    return rng.integers(0, 2, size=shape).astype(dtype)


def _on(one: jax.sharding.Mesh, args: Any) -> Any:
    put = lambda x: jax.device_put(x, jax.NamedSharding(one, _partition(x)))  # noqa: E731
    return jax.tree.map(lambda x: put(x) if isinstance(x, jax.Array) else x, args)


def _run(fn: Callable, args: Any, mesh: jax.sharding.Mesh, gradients: bool, seed: int) -> dict[str, jax.Array]:
    """The results, and the gradients of floating arguments, by where they stand."""
    leaves, tree = jax.tree.flatten(args)
    floating = [n for n, x in enumerate(leaves) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)]
    with jax.set_mesh(mesh):
        value = jax.jit(lambda leaves: fn(*jax.tree.unflatten(tree, leaves)))(leaves)
        found = {f"value{jax.tree_util.keystr(path)}": x for path, x in jax.tree_util.tree_leaves_with_path(value)}
        if any(_partition(x).unreduced for x in found.values()):
            raise PlanError("a result owes a partial sum.\n  Settle it in the function.")
        numbers = [n for n, x in enumerate(found.values()) if jnp.issubdtype(x.dtype, jnp.inexact)]
        if not (gradients and floating and numbers):
            return found

        def of(some: list[jax.Array], leaves: list) -> list[jax.Array]:
            whole = [some[floating.index(n)] if n in floating else x for n, x in enumerate(leaves)]
            results = jax.tree.leaves(fn(*jax.tree.unflatten(tree, whole)))
            return [results[n] for n in numbers]

        results = list(found.values())
        weights = [
            jax.device_put(_drawn(results[n].shape, results[n].dtype, seed + 1), results[n].sharding) for n in numbers
        ]
        turned = jax.jit(lambda some, leaves, weights: jax.vjp(lambda some: of(some, leaves), some)[1](weights)[0])
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(args)]
        gradient = turned([leaves[n] for n in floating], leaves, weights)
        return found | {f"gradient of argument{paths[n]}": x for n, x in zip(floating, gradient)}


def _part(name: str, where: str, got: jax.Array | None, wanted: jax.Array) -> Iterator[Parting]:
    """The parting of one array, if there is one: of its copies, that which is furthest off."""
    if got is None or got.shape != wanted.shape or got.dtype != wanted.dtype:
        kind = "nothing" if got is None else f"{got.dtype}{list(got.shape)}"
        yield Parting(name, where, error=f"nothing, but {where} is {kind}, not {wanted.dtype}{list(wanted.shape)}")
        return
    if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
        got, wanted = jax.random.key_data(got), jax.random.key_data(wanted)
    wide = np.complex128 if jnp.issubdtype(got.dtype, jnp.complexfloating) else np.float64
    exact = not jnp.issubdtype(got.dtype, jnp.inexact)
    right = np.asarray(wanted) if exact else np.asarray(wanted).astype(wide)
    tolerance = 0.0 if exact else TOLERANCE.get(str(jnp.finfo(got.dtype).dtype), 0.5)
    finite = np.abs(right[np.isfinite(right)].astype(np.float64 if exact else wide))
    largest = float(finite.max()) if finite.size else 0.0
    worst = None
    for shard in got.addressable_shards:
        mine, theirs = np.asarray(shard.data), right[shard.index]
        off = np.where(mine == theirs, 0.0, np.abs(mine.astype(wide) - theirs.astype(wide)))
        off = np.where(np.isnan(off) & ~(np.isnan(mine.astype(wide)) & np.isnan(theirs.astype(wide))), np.inf, off)
        wrong = np.argwhere(np.nan_to_num(off, nan=0.0, posinf=np.inf) > tolerance * largest)
        if len(wrong) and (worst is None or np.nanmax(off) > worst[0]):
            start = [each.start or 0 for each in shard.index]
            worst = float(np.nanmax(off)), tuple(int(n) + at for n, at in zip(wrong[0], start))
    if worst:
        yield Parting(name, where, worst[0], worst[0] / largest if largest else np.inf, tolerance, worst[1])


def _wrong_equations(fn: Callable, args: Any, mesh: jax.sharding.Mesh, name: str, seed: int) -> list[str]:
    """The equations of a function that part from one device when each runs by itself, on random numbers."""
    with jax.set_mesh(mesh), lowering(name):
        try:
            jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
        except Exception:  # it is a parting already
            return []
        found = dict.fromkeys(_equations(jaxpr))
        return [text for text, shapes in found if not _verified(text, shapes, name, seed)]


def _equations(jaxpr: Any) -> Iterator[tuple[str, tuple]]:
    """Every equation of a jaxpr, with its operands' shapes and dtypes."""
    for each in jaxpr.eqns:
        program = program_of(each)
        if program is not None:
            yield program.equation, tuple((x.aval.shape, x.aval.dtype) for x in each.invars)
            continue
        for value in jax.tree.leaves(each.params, is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def _verified(text: str, shapes: tuple, name: str, seed: int) -> bool:
    """Whether an equation is right by itself; one that cannot be asked counts as right."""
    try:
        equation = parse_equation(text)
    except SpecError:  # another planned operation
        return True
    specs = [spec for operand in equation.operands for spec in operand.specs]
    ranks = [len(spec.dims) for spec in specs] == [len(shape) for shape, _ in shapes]
    if not ranks or any(spec.partial or spec.is_open for spec in equation.specs):
        return True
    mesh = jax.sharding.get_mesh()
    flat = [
        jax.device_put(_drawn(shape, dtype, seed), jax.NamedSharding(mesh, spec.partition_spec()))
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
