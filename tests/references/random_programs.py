"""Random small programs of equations, planned operations and transforms, run on a mesh and on one device.

Each step of a program takes one matrix, [B, E], in the spec in which the last step left it, and leaves it in another. A
seed determines a program; `str` prints it as a user would write it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

import gspmd
from gspmd.annotate import parse_equation
from gspmd.ops import rms_norm, softmax

SIZE = 12  # the size of every dimension: each mesh below divides it
MESHES = ((2, 2), (3, 2), (2, 3), (4,), (6,))
LOWERINGS = ("blocking", "xla", "looped", "auto")
KINDS = ("einsum", "einsum", "reshard", "group", "sum", "owed", "norm", "softmax", "tanh")
WRAPS = ("", "", "", "jit", "checkpoint", "cond", "scan", "scan of weights")
TRANSFORMS = ("value", "gradient", "gradient", "vmap", "second")
TOLERANCE = {"float32": 2e-4, "float64": 1e-9, "bfloat16": 6e-2}
NARROW = ("norm", "softmax")  # their arithmetic is float32, also for float64


@dataclass(frozen=True)
class Step:
    """One operation: its equations (or specs), the specs of its weights, and the transform around it."""

    kind: str
    texts: tuple[str, ...]
    weights: tuple[str, ...]
    wrap: str

    def __str__(self) -> str:
        return f"{self.wrap} {self.kind}: {'; '.join(self.texts)}".strip()


@dataclass(frozen=True)
class Program:
    """Everything that a failing draw has to report."""

    seed: int
    mesh: tuple[tuple[str, int], ...]
    axis_type: str
    lowering: str
    dtype: str
    transform: str
    start: str
    end: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh)
        where = f"{self.lowering}, {mesh} {self.axis_type}"
        head = f"program {self.seed}: {self.transform} of {self.dtype} {self.start}, {where}"
        return "\n  ".join([head, *map(str, self.steps)])


# -- drawing ----------------------------------------------------------------------------------------------------------


def draw(seed: int) -> Program:
    """Return the program of a seed."""
    rng = np.random.default_rng(seed)
    mesh = dict(zip("xy", MESHES[rng.integers(len(MESHES))]))
    axis_type, lowering = ("explicit", "auto")[rng.integers(2)], LOWERINGS[rng.integers(len(LOWERINGS))]
    dtype = rng.choice(["float32", "float64", "bfloat16"], p=[0.8, 0.1, 0.1])
    transform = TRANSFORMS[rng.integers(len(TRANSFORMS))]
    start = here = _spec(rng, mesh, "BE")
    steps = []
    for _ in range(rng.integers(1, 5)):
        kind, wrap = KINDS[rng.integers(len(KINDS))], WRAPS[rng.integers(len(WRAPS))]
        if wrap.startswith("scan") and (transform, lowering, axis_type) == ("second", "xla", "explicit"):
            wrap = "jit"  # here JAX raises an error (docs/compiler.md)
        twice = transform == "second" and lowering != "xla"
        if kind == "owed" and (axis_type == "auto" or transform == "vmap" or twice):  # these are refused
            kind = "einsum"
        there = here if wrap.startswith("scan") else _spec(rng, mesh, "BE")
        step = _step(rng, mesh, kind, here, there, wrap)
        steps.append(step)
        here = there if kind not in ("norm", "softmax", "tanh") else here
    return Program(seed, tuple(mesh.items()), axis_type, lowering, str(dtype), transform, start, here, tuple(steps))


def _spec(rng, mesh, dims: str, owed: str = "") -> str:
    """Return a spec of these dimensions, each mesh axis on one of them or on none."""
    axes = dict.fromkeys(dims, "")
    for axis in rng.permutation(list(mesh)):
        if axis != owed and rng.random() < 0.75:
            axes[dims[rng.integers(len(dims))]] += str(axis)
    return "".join(f"{dim}_{names}" if names else dim for dim, names in axes.items())


def _step(rng, mesh, kind: str, here: str, there: str, wrap: str) -> Step:
    out = there.replace("E", "F")
    weights = tuple(_spec(rng, mesh, dims) for dims in ("EF", "EF"))
    if kind == "einsum":
        return Step(kind, (f"{here}, {weights[0]} -> {out}",), weights[:1], wrap)
    if kind == "reshard":
        return Step(kind, (f"{here} -> {there}",), (), wrap)
    if kind == "group":
        return Step(kind, (f"{here}, ({weights[0]}, {weights[1]}) -> ({out}, {out})",), weights, wrap)
    if kind == "sum":
        return Step(kind, (f"{here}, {weights[0]} + {here}, {weights[1]} -> {out}",), weights, wrap)
    if kind == "owed":
        axis = str(rng.choice(list(mesh)))
        owes = f"{_spec(rng, mesh, 'BF', axis)} partialsum-{axis}"
        return Step(kind, (f"{here}, {weights[0]} -> {owes}", f"{owes} -> {out}"), weights[:1], wrap)
    if kind == "norm":
        return Step(kind, (here,), (_spec(rng, mesh, "E"),), wrap)
    return Step(kind, (here,), (), wrap)


# -- running ----------------------------------------------------------------------------------------------------------


class Ours:
    """The operations on the mesh."""

    einsum = staticmethod(gspmd.einsum)
    norm = staticmethod(rms_norm)
    softmax = staticmethod(softmax)


class Plain:
    """The same operations in plain JAX, on one device."""

    @staticmethod
    def einsum(text: str, *operands):
        equation = parse_equation(text)
        held, sums = iter(operands), [0] * len(equation.outputs)
        for term in equation.terms:
            arrays = [(o, next(held)) for o in term.operands]
            members = [list(zip(o.specs, x if o.group else (x,))) for o, x in arrays]
            for n, (pair, out) in enumerate(zip(product(*members), equation.outputs)):
                letters = ",".join("".join(spec.dims) for spec, _ in pair) + "->" + "".join(out.dims)
                sums[n] = sums[n] + jnp.einsum(letters, *(x for _, x in pair))
        return tuple(sums) if equation.group else sums[0]

    @staticmethod
    def norm(x, scale, spec, scale_spec):
        wide = x.astype(jnp.float32)
        root = jnp.sqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
        return (wide / root * scale.astype(wide.dtype)[None]).astype(x.dtype)

    @staticmethod
    def softmax(x, spec, dim):
        return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)


def _applied(step: Step, ops, h, weights):
    if step.kind == "group":
        a, b = ops.einsum(step.texts[0], h, tuple(weights))
        return a * jnp.tanh(b)
    if step.kind == "sum":
        return ops.einsum(step.texts[0], h, weights[0], h, weights[1])
    if step.kind == "norm":
        return ops.norm(h, weights[0], step.texts[0], step.weights[0])
    if step.kind == "softmax":
        return ops.softmax(h, step.texts[0], "E") * SIZE**0.5
    if step.kind == "tanh":
        return jnp.tanh(h)
    for text in step.texts:
        h, weights = ops.einsum(text, h, *weights), ()
    return h


def _run(program: Program, ops, flag, h, weights):
    held = iter(weights)
    for step in program.steps:
        h = _wrapped(step, ops, flag, h, list(islice(held, len(step.weights))))
    return h


def _wrapped(step: Step, ops, flag, h, weights):
    f = lambda h, weights: _applied(step, ops, h, weights)  # noqa: E731
    if step.wrap == "jit":
        return jax.jit(f)(h, weights)
    if step.wrap == "checkpoint":
        return jax.checkpoint(f)(h, weights)
    if step.wrap == "cond":
        return jax.lax.cond(flag, lambda: f(h, weights), lambda: 2 * f(h, weights))
    if step.wrap == "scan":
        return jax.lax.scan(lambda h, _: (f(h, weights), None), h, None, length=2)[0]
    if step.wrap == "scan of weights":
        stacked = [jnp.stack([w, 0.5 * w]) for w in weights]
        return jax.lax.scan(lambda h, weights: (f(h, weights), None), h, stacked, length=2)[0]
    return f(h, weights)


def _transformed(program: Program, ops):
    """Return the program under its transform: from (flag, toward, h, weights) to arrays."""

    def loss(toward, flag, h, weights):
        return (_run(program, ops, flag, h, weights) * toward).sum()

    def value(flag, toward, h, weights):
        return _run(program, ops, flag, h, weights)

    def gradient(flag, toward, h, weights):
        return jax.value_and_grad(lambda *some: loss(toward, flag, *some), argnums=(0, 1))(h, weights)

    def second(flag, toward, h, weights):
        def along(h, weights):
            slopes = jax.grad(lambda *some: loss(toward, flag, *some), argnums=(0, 1))(h, weights)
            return sum((slope * x).sum() for slope, x in zip(jax.tree.leaves(slopes), jax.tree.leaves((h, weights))))

        return jax.grad(along, argnums=(0, 1))(h, weights)

    def mapped(flag, toward, h, weights):
        many = [jnp.stack([w, 2 * w]) if n == 0 else w for n, w in enumerate(weights)]
        axes = [0 if n == 0 else None for n in range(len(weights))]

        def total(h, many):
            return jax.vmap(lambda h, ws: loss(toward, flag, h, ws), in_axes=(None, axes))(h, many).sum()

        if not weights:
            hs = jnp.stack([h, 2 * h])
            return jax.value_and_grad(lambda hs: jax.vmap(lambda h: loss(toward, flag, h, []))(hs).sum())(hs)
        return jax.value_and_grad(total, argnums=(0, 1))(h, many)

    return {"value": value, "gradient": gradient, "vmap": mapped, "second": second}[program.transform]


def check(program: Program) -> None:
    """Raise AssertionError, with the program, unless the results on the mesh equal those on one device."""
    if program.dtype == "float64":
        with jax.enable_x64(True):
            _check(program)
    else:
        _check(program)


def _check(program: Program) -> None:
    rng = np.random.default_rng(program.seed)
    specs = [spec for step in program.steps for spec in step.weights]
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), program.dtype)  # noqa: E731
    toward, h = normal(SIZE, SIZE), normal(SIZE, SIZE)
    weights = [normal(SIZE, SIZE) / SIZE**0.5 if "F" in spec else normal(SIZE) for spec in specs]
    want = jax.jit(_transformed(program, Plain))(True, toward, h, weights)
    names, shape = zip(*program.mesh)
    kind = jax.sharding.AxisType.Explicit if program.axis_type == "explicit" else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=jax.devices()[: prod(shape)])
    with jax.set_mesh(mesh), gspmd.lowering(program.lowering):
        lie = [program.end, program.start, *specs]
        placed = [gspmd.annotate(x, spec) for x, spec in zip([toward, h, *weights], lie)]
        got = jax.jit(_transformed(program, Ours))(True, placed[0], placed[1], placed[2:])
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(want)]
    narrow = program.dtype == "float64" and any(step.kind in NARROW for step in program.steps)
    dtype = "float32" if narrow else program.dtype
    for path, one, two in zip(paths, jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        one, two = (np.asarray(x, np.float64) for x in (one, two))
        bound = TOLERANCE[dtype] * max(float(np.abs(one).max()), 1e-3)
        assert one.shape == two.shape, f"{program}\n{path} has shape {two.shape}, not {one.shape}"
        assert np.all(np.abs(one - two) <= bound), f"{program}\n{path} is off by {np.abs(one - two).max()}"


def faults(seeds: Sequence[int]) -> list[str]:
    """Return the faults of the programs of these seeds, including errors."""
    found = []
    for seed in seeds:
        program = draw(seed)
        try:
            check(program)
        except AssertionError as error:
            found.append(str(error))
        except Exception as error:
            found.append(f"{program}\nraises {type(error).__name__}: {str(error)[:300]}")
    return found
