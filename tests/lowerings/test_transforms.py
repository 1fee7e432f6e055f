"""Every planned program under JAX's transformations, with a batch in every operand or in some, against plain JAX."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd import ops
from gspmd.annotate import parse_equation
from gspmd.moe.local import run_local

MESH = {"x": 2, "y": 2}
BATCH = 3


@dataclass(frozen=True)
class Program:
    """A planned program, plain code for it, and where its operands lie; results are one array or a tuple."""

    planned: Callable
    plain: Callable
    specs: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


def equation(text: str, via: str | None = None, size: int = 4) -> Program:
    """An equation, each of its results by `jnp.einsum` in plain code."""
    parsed = parse_equation(text)
    specs = [spec for operand in parsed.operands for spec in operand.specs]

    def nested(arrays):
        held = iter(arrays)
        return [tuple(next(held) for _ in o.specs) if o.group else next(held) for o in parsed.operands]

    def plain(*arrays):
        held, sums = iter(zip(specs, arrays)), [0] * len(parsed.outputs)
        for term in parsed.terms:
            operands = [[next(held) for _ in operand.specs] for operand in term.operands]
            for number, (pair, out) in enumerate(zip(product(*operands), parsed.outputs)):
                letters = ",".join("".join(spec.dims) for spec, _ in pair) + "->" + "".join(out.dims)
                sums[number] += jnp.einsum(letters, *(x for _, x in pair))
        return tuple(sums)

    shapes = tuple((size,) * len(spec.dims) for spec in specs)
    planned = lambda *arrays: gspmd.einsum(text, *nested(arrays), via=via)  # noqa: E731
    return Program(planned, plain, tuple(map(str, specs)), shapes)


def _norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None]


def _loss(labels, logits):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1)[:, 0]


def _global_norm(x, w):
    return jnp.sqrt(jnp.sum(x * x) + jnp.sum(w * w))


def _two(x, w):
    return jnp.sin(x), x * w


GROUPS = (gspmd.Spec.parse("B_xE"),) * 2
LABELS, IDS = np.array([1, 3, 0, 2]), np.array([[3, 1], [0, 2]])
HEADS = ("B_xLH_yD", "B_xTKD", "B_xTKD")

PROGRAMS = {
    "product": equation("BE_x, E_xF_y -> BF_y"),
    "move": equation("BE_x -> B_x"),
    "group": equation("BE, (EF, EF) -> (BF, BF)"),
    "group that travels": equation("B_xE, (EF_x, EF_x) -> (BF_x, BF_x)", "BE, (EF_x, EF_x)"),
    "sums in a group": equation("BE_x, (E_xF, E_xH_y) -> (B_xF, BH_y)"),
    "group of three": equation("(EF_x, BE_y, E), E_x -> (F_x, B, )"),
    "sum": equation("BF_x, F_xE + BH_y, H_yE -> B_xE"),
    "norm": Program(lambda x, scale: ops.rms_norm(x, scale, "BE_x", "E_y"), _norm, ("BE_x", "E_y"), ((4, 4), (4,))),
    "softmax": Program(lambda x: ops.softmax(x, "BV_x", "V"), jax.nn.softmax, ("BV_x",), ((4, 4),)),
    "logsumexp": Program(
        lambda x: ops.logsumexp(x, "BV_x", "V"), lambda x: jax.nn.logsumexp(x, -1), ("BV_x",), ((4, 4),)
    ),
    "lookup": Program(
        lambda table: ops.embed(IDS, table, "BL, V_xE_y -> BLE_y"), lambda t: t[IDS], ("V_xE_y",), ((4, 4),)
    ),
    "loss": Program(
        lambda logits: ops.cross_entropy(logits, LABELS, "BV_x"),
        lambda logits: _loss(LABELS, logits),
        ("BV_x",),
        ((4, 4),),
    ),
    "attention": Program(
        lambda q, k, v: ops.attention(q, k, v, HEADS[0], HEADS[1]),
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
        HEADS,
        ((2, 2, 2, 4), (2, 2, 1, 4), (2, 2, 1, 4)),
    ),
    "local": Program(
        lambda x, w: run_local("two of a group", _two, GROUPS, GROUPS, x, w), _two, ("B_xE", "B_xE"), ((4, 4), (4, 4))
    ),
    "global norm": Program(
        lambda x, w: ops.global_norm((x, w), ("BE_x", "E_y")), _global_norm, ("BE_x", "E_y"), ((4, 4), (4,))
    ),
}
ONCE = ["group", "norm"]


def _draw(program: Program, batched) -> list[jax.Array]:
    """Operands on the mesh, with a batch in front of those that have one."""
    arrays, rng = [], np.random.default_rng(0)
    for spec, shape, has in zip(map(gspmd.Spec.parse, program.specs), program.shapes, batched):
        whole = rng.normal(size=(BATCH, *shape) if has else shape).astype("float32")
        arrays.append(gspmd.annotate(whole, gspmd.Spec(("N", *spec.dims), ((), *spec.axes)) if has else spec))
    return arrays


def _objective(results) -> jax.Array:
    """Return a number of all results, nonlinear, so that a cotangent counted twice is another number."""
    return sum((place + 1) * jnp.sum(jnp.sin(y)) for place, y in enumerate(jax.tree.leaves(results)))


def _local(tree):
    return jax.tree.map(np.asarray, tree)


def _close(got, want, tolerance=2e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), _local(got), want)


def _check(program: Program, derive, batched, lowering: str, make_mesh, axis_type: str) -> None:
    """Assert that `derive` makes the same of the planned program and of the plain one."""
    derived = derive(batched)
    with jax.set_mesh(make_mesh(MESH, axis_type)), gspmd.lowering(lowering):
        got = _local(jax.jit(derived(program.planned))(*_draw(program, batched)))
    _close(got, _plainly(program, derive, batched))


@cache
def _plainly(program: Program, derive, batched):
    """Return what `derive` makes of the plain program: once, however often the planned one is run."""
    with jax.set_mesh(jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])):
        arrays = _local(_draw(program, batched))
    return _local(jax.jit(derive(batched)(program.plain))(*arrays))


def _axes(batched):
    return tuple(0 if has else None for has in batched)


def gradient_of_vmap(batched):
    everything = tuple(range(len(batched)))
    return lambda f: jax.grad(lambda *xs: _objective(jax.vmap(f, _axes(batched))(*xs)), everything)


def vmap_of_gradient(batched):
    everything = tuple(range(len(batched)))
    return lambda f: jax.vmap(jax.grad(lambda *xs: _objective(f(*xs)), everything), _axes(batched))


def gradient_of_nested_vmaps(batched):
    """The outer batch in the operands that have one, the inner batch in the others; results have both."""

    def derive(f):
        inner = tuple(None if has else 0 for has in batched)
        twice = jax.vmap(jax.vmap(f, inner) if any(not has for has in batched) else f, _axes(batched))

        def objective(*xs):
            return _objective(twice(*(x if has else jnp.stack([x, 2 * x]) for x, has in zip(xs, batched))))

        return jax.grad(objective, tuple(range(len(batched))))

    return derive


def _patterns(program: Program) -> list[tuple[bool, ...]]:
    return [batched for batched in product((True, False), repeat=len(program.specs)) if any(batched)]


EVERY = [(name, batched) for name, program in PROGRAMS.items() for batched in _patterns(program)]


def _named(case) -> str:
    name, batched = case
    return f"{name}-{''.join('v' if has else '.' for has in batched)}"


def _mark(case):
    """A few patterns always run: of several results, and of what has one, the last operand's batch alone."""
    name, batched = case
    always = name == "group" or (name in ("norm", "group that travels", "local") and sum(batched) == 1)
    return pytest.param(case, marks=() if always else pytest.mark.slow, id=_named(case))


@pytest.mark.turns(7)
@pytest.mark.parametrize("case", [*map(_mark, EVERY)])
def test_gradient_of_vmap(case, make_mesh):
    """JAX 0.10.2 gives a multiple where one result of a custom_vjp has a batch and another has none."""
    name, batched = case
    for axis_type, lowering in (("explicit", "blocking"), ("auto", "looped")):
        _check(PROGRAMS[name], gradient_of_vmap, batched, lowering, make_mesh, axis_type)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=_named)
def test_nested_vmaps_and_vmap_of_gradient(case, make_mesh):
    """Types of axes and lowerings take turns: each pattern meets both."""
    name, batched = case
    for derive, axis_type, lowering in (
        (gradient_of_nested_vmaps, "auto", "blocking"),
        (vmap_of_gradient, "explicit", "looped"),
    ):
        _check(PROGRAMS[name], derive, batched, lowering, make_mesh, axis_type)


def test_a_group_under_vmap_as_it_was_reported(make_mesh):
    """The shared operand and one member without a batch: twice the right gradient, in silence."""
    rng = np.random.default_rng(0)
    x, b, stack = (rng.normal(size=shape).astype("float32") for shape in ((4, 4), (4, 4), (2, 4, 4)))

    def total(x, compute):
        return jax.vmap(lambda a: sum(y.sum() for y in compute(x, a, b)))(stack).sum()

    want = jax.grad(total)(x, lambda x, a, b: (x @ a, x @ b))
    for lowering in ("blocking", "looped", "xla"):
        with jax.set_mesh(make_mesh({"x": 2})):
            planned = lambda x, a, b, n=lowering: gspmd.einsum("BE, (EF, EF) -> (BF, BF)", x, (a, b), lowering=n)  # noqa: E731
            got = jax.grad(total)(x, planned)
        np.testing.assert_allclose(got, want, rtol=1e-5)


# -- higher derivatives -----------------------------------------------------------------------------------------------


def gradient_of_gradient(batched):
    everything = tuple(range(len(batched)))

    def derive(f):
        first = jax.grad(lambda *xs: _objective(f(*xs)), everything)
        return jax.grad(lambda *xs: _objective(first(*xs)), everything)

    return derive


def hessian(batched):
    return lambda f: jax.hessian(lambda *xs: _objective(f(*xs)), tuple(range(len(batched))))


def gradient_of_scan(batched):
    """Three calls, one after the other, each on operands a little smaller, recomputed going back."""

    def derive(f):
        def objective(*xs):
            step = jax.checkpoint(lambda carry, scale: (carry + _objective(f(*(scale * x for x in xs))), None))
            return jax.lax.scan(step, 0.0, jnp.array([1.0, 0.5, 0.25]))[0]

        return jax.grad(objective, tuple(range(len(batched))))

    return derive


_DERIVED = [(name, derive) for name in PROGRAMS for derive in (gradient_of_gradient, hessian, gradient_of_scan)]


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("name", "derive"),
    [
        pytest.param(name, derive, marks=() if name in ONCE else pytest.mark.slow, id=f"{name}-{derive.__name__}")
        for name, derive in _DERIVED
    ],
)
def test_higher_derivatives_and_scans(name, derive, make_mesh):
    program = PROGRAMS[name]
    count = len(program.specs)
    for axis_type, lowering in (("explicit", "looped"), ("auto", "blocking")):
        _check(program, derive, (False,) * count, lowering, make_mesh, axis_type)


# -- forward mode -----------------------------------------------------------------------------------------------------


FORWARD = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp of jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "jit of jvp": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "jit of jacfwd": lambda f, x: jax.jit(jax.jacfwd(f))(x),
    "jvp of vmap": lambda f, x: jax.jvp(jax.vmap(f), (x[None],), (x[None],)),
    "jvp of scan": lambda f, x: jax.jvp(lambda x: jax.lax.scan(lambda c, _: (c, f(x)), 0, length=2)[1], (x,), (x,)),
    "jit of grad of jvp": lambda f, x: jax.jit(jax.grad(lambda x: jnp.sum(jax.jvp(f, (x,), (x,))[1])))(x),
}


@pytest.mark.parametrize("how", FORWARD)
def test_forward_mode_is_one_error_of_ours(how, make_mesh):
    with jax.set_mesh(make_mesh(MESH)):
        x, w = gspmd.annotate(np.ones((4, 4), "float32"), "BE_x"), gspmd.annotate(np.ones((4, 4), "float32"), "E_xF")
        planned = lambda x: gspmd.einsum("BE_x, E_xF -> BF", x, w, lowering="blocking")  # noqa: E731
        with pytest.raises(gspmd.PlanError) as error:
            FORWARD[how](planned, x)
        right = lambda x: gspmd.einsum("BE_x, E_xF -> BF", x, w, lowering="xla")  # noqa: E731
        FORWARD[how](right, x)
    assert str(error.value) == (
        "cannot differentiate 'BE_x, E_xF -> BF' forward: its lowering plans reverse mode only.\n"
        "  Use lowering='xla', or jax.vjp and jax.jacrev."
    )
