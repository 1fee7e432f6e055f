"""Random products, moves and operations on meshes of every kind, to run in separate processes (own_process.py)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations, product
from math import prod
from types import SimpleNamespace

import jax
import numpy as np

import gspmd
from gspmd import ops
from gspmd.annotate import Spec
from gspmd.moe import MoEConfig, expert_layer
from gspmd.pipeline import in_rounds
from tests.references import random_equations, random_products
from tests.references.caches import random_case
from tests.references.random_equations import Case

# XLA has ended processes on meshes whose sizes are not powers of one prime, so there are more of those.
MESHES = ((2,), (3,), (4,), (5,), (6,), (4, 2), (2, 2, 2), *((3, 2), (2, 3)) * 4, (3, 1, 2))
LOWERINGS = ("xla", "xla", "blocking", "looped", "auto")
FORMS = ("product", "move", "product", "group", "product", "move", "product", "sum")


def drawn(seed: int) -> Case:
    """Return the product or move of a seed, with its mesh, its axis type and its lowering."""
    return random_products.draw(seed, FORMS[seed % len(FORMS)], MESHES, LOWERINGS)


def check_seed(seed: int) -> None:
    """Check the values and gradients of a seed's product or move against numpy."""
    case = drawn(seed)
    try:
        random_equations.check(case)
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error


def check_equation(equation: str, sizes: dict[str, int], mesh: dict[str, int], axis_type: str, lowering: str) -> None:
    """Check the values and gradients of an equation against numpy."""
    random_equations.check(Case(equation, tuple(sizes.items()), tuple(mesh.items()), axis_type, lowering))


# -- steps of plans ----------------------------------------------------------------------------------------------------


def planned_steps(mesh: dict[str, int], dims: str) -> set[tuple[str, str]]:
    """Return where every step of every move of such an array begins and ends, forwards and backwards."""
    specs = [Spec(tuple(dims), axes) for axes in _placements(tuple(mesh), len(dims))]
    sizes, found = dict.fromkeys(dims, prod(mesh.values())), set()
    for source, target in permutations(specs, 2):
        for step in gspmd.plan(f"{source} -> {target}", sizes=sizes, mesh=mesh).steps:
            found |= {(str(step.before), str(step.after)), (str(step.after), str(step.before))}
    return found


def _placements(axes: tuple[str, ...], rank: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Return every way to place mesh axes on dimensions, once."""
    places = product([None, *range(rank)], repeat=len(axes))
    orders = [*permutations(range(len(axes)))]
    seen = {
        tuple(tuple(axes[n] for n in order if place[n] == dim) for dim in range(rank))
        for place, order in product(places, orders)
    }
    yield from sorted(seen)


def check_constraint(mesh: dict[str, int], source: str, target: str) -> None:
    """Check that plain JAX moves an array from one spec to another."""
    before, after = Spec.parse(source), Spec.parse(target)
    placed = _mesh(mesh, "auto")
    whole = np.arange(prod(mesh.values()) ** len(before.dims), dtype=np.float32)
    whole = whole.reshape((prod(mesh.values()),) * len(before.dims))
    x = jax.device_put(whole, jax.NamedSharding(placed, before.partition_spec()))
    to = jax.NamedSharding(placed, after.partition_spec())
    moved = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, to))(x)
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])


def _mesh(sizes: dict[str, int], axis_type: str) -> jax.sharding.Mesh:
    kind = jax.sharding.AxisType.Explicit if axis_type == "explicit" else jax.sharding.AxisType.Auto
    devices = jax.devices()[: prod(sizes.values())]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices)


# -- operations --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """An operation: its operands' specs and shapes, which of them are integers, and whether it has gradients."""

    name: str
    call: Callable[..., jax.Array]
    specs: tuple[Spec, ...]
    shapes: tuple[tuple[int, ...], ...]
    integers: tuple[int, ...] = ()
    has_gradients: bool = True


_SHAPE = (6, 12, 18)
_KINDS = ("embed", "embed", "add_bias", "rms_norm", "layer_norm", "softmax", "logsumexp", "cross_entropy")

# Every operation, with sizes that all of these meshes divide.
_EVEN = (24, 24, 24)
_EVEN_MESHES = (*((3, 2), (2, 3)) * 3, (4, 2), (2, 2, 2), (3, 1, 2), (6,), (8,))
_EVERY_KIND = (*_KINDS, "argmax", "sample", "global_norm", *("in_rounds", "attention", "experts") * 2)


def operation(seed: int) -> tuple[dict[str, int], str, Operation]:
    """Return the mesh, the axis type and the operation of a seed, for lowering `xla`."""
    rng = np.random.default_rng(seed)
    mesh = ({"x": 3, "y": 2}, {"x": 2, "y": 3})[rng.integers(2)]
    axis_type, kind = ("explicit", "auto")[rng.integers(2)], _KINDS[rng.integers(len(_KINDS))]
    return mesh, axis_type, _operation(kind, rng, tuple(mesh), _SHAPE)


def every_operation(seed: int) -> tuple[dict[str, int], str, str, Operation]:
    """Return the mesh, the axis type, the lowering and the operation of a seed, of all operations and lowerings."""
    rng = np.random.default_rng(seed)
    mesh = dict(zip("xyz", _EVEN_MESHES[rng.integers(len(_EVEN_MESHES))]))
    axis_type, lowering = ("explicit", "auto")[rng.integers(2)], ("xla", "blocking", "looped")[seed % 3]
    kind = _EVERY_KIND[rng.integers(len(_EVERY_KIND))]
    make = {"in_rounds": _in_rounds, "attention": _attention, "experts": _experts}.get(kind)
    asked = make(rng, tuple(mesh)) if make else _operation(kind, rng, tuple(mesh), _EVEN)
    return mesh, axis_type, lowering, asked


def _operation(kind: str, rng: np.random.Generator, axes: tuple[str, ...], shape: tuple[int, ...]) -> Operation:
    spec = lambda dims: random_products._spec(rng, tuple(dims), axes)  # noqa: E731
    dim, x = str(rng.choice(list("BLE"))), spec("BLE")
    if kind == "embed":
        ids, table = spec("BL"), spec("VE")
        equation = f"{ids}, {table} -> {x}"
        shapes = (shape[:2], (shape[2], shape[2]))
        return Operation(f"embed {equation}", lambda i, t: ops.embed(i, t, equation), (ids, table), shapes, (0,))
    if kind == "add_bias":
        bias = spec("LE")
        return Operation(f"{kind} {bias} {x}", lambda a, b: ops.add_bias(a, b, x, bias), (x, bias), (shape, shape[1:]))
    if kind == "rms_norm":
        row = spec("E")
        return Operation(f"{kind} {row} {x}", lambda a, b: ops.rms_norm(a, b, x, row), (x, row), (shape, shape[2:]))
    if kind == "layer_norm":
        row = spec("E")
        shapes = (shape, shape[2:], shape[2:])
        return Operation(f"{kind} {row} {x}", lambda a, b, c: ops.layer_norm(a, b, c, x, row), (x, row, row), shapes)
    if kind == "cross_entropy":
        rows = x.without("E")
        return Operation(f"{kind} {x}", lambda a, b: ops.cross_entropy(a, b, x), (x, rows), (shape, shape[:2]), (1,))
    if kind == "argmax":
        return Operation(f"{kind} {x} {dim}", lambda a: ops.argmax(a, x, dim), (x,), (shape,), has_gradients=False)
    if kind == "sample":
        row, filters = Spec(("B",), ((),)), {"top_k": int(rng.integers(9)), "top_p": float(rng.choice([0.5, 1.0]))}
        draw = lambda a, s, p: ops.sample(a, x, "E", seeds=s, positions=p, **filters)  # noqa: E731
        shapes = (shape, shape[:1], shape[:1])
        return Operation(f"{kind} {x} {filters}", draw, (x, row, row), shapes, (1, 2), has_gradients=False)
    if kind == "global_norm":
        other = spec("EL")
        norm = lambda a, b: ops.global_norm([a, b], [x, other])  # noqa: E731
        return Operation(f"{kind} {x} {other}", norm, (x, other), (shape, shape[1:]))
    return Operation(f"{kind} {x} {dim}", lambda a: getattr(ops, kind)(a, x, dim), (x,), (shape,))


def _in_rounds(rng: np.random.Generator, axes: tuple[str, ...]) -> Operation:
    layers, rounds = random_products._spec(rng, tuple("NEF"), axes), int(rng.integers(1, 4))
    return Operation(
        f"in_rounds {layers} {rounds}", lambda a: in_rounds(a, layers, rounds), (layers,), ((144, *_EVEN[:2]),)
    )


def _attention(rng: np.random.Generator, axes: tuple[str, ...]) -> Operation:
    """Return attention with queries sharded in any way, and keys likewise.

    Keys that are sharded along the sequence go round a ring.
    """
    query = random_products._spec(rng, tuple("BLH"), axes)
    query = Spec((*query.dims, "D"), (*query.axes, ()))
    batch, length, heads = (query.axes_of(dim) for dim in "BLH")
    shared = bool(rng.integers(2))  # one head of keys for all
    causal = not length and bool(rng.integers(2))  # on a ring this is another order of the sequence
    key = Spec(tuple("BTKD"), (batch, length, () if shared else heads, ()))
    of_keys = (*_EVEN[:2], 1 if shared else 24, 4)
    return Operation(
        f"attention {query} {key} causal={causal} {of_keys}",
        lambda q, k, v: ops.attention(q, k, v, query, key, causal=causal), (query, key, key),
        ((*_EVEN, 4), of_keys, of_keys),
    )  # fmt: skip


def _experts(rng: np.random.Generator, axes: tuple[str, ...]) -> Operation:
    """Return experts: tokens sharded along G go to experts sharded along X.

    Their features may be sharded over the other mesh axes.
    """
    order = [str(axis) for axis in rng.permutation(list(axes))]
    count = int(rng.integers(len(order) + 1))
    moved, features = tuple(order[:count]), tuple(order[count:]) if rng.integers(2) else ()
    spec = lambda dims, **at: Spec(tuple(dims), tuple(at.get(dim, ()) for dim in dims))  # noqa: E731
    section = {
        "groups": spec("GLE", G=moved), "dispatched": spec("GXCE", G=moved), "expert_input": spec("GXCE", X=moved),
        "hidden": spec("GXCF", X=moved, F=features), "router": spec("EX"), "w_in": spec("XEF", X=moved, F=features),
        "w_gate": spec("XEF", X=moved, F=features), "w_out": spec("XFE", X=moved, F=features),
    }  # fmt: skip
    form = str(rng.choice(["sort", "onehot", "dropless"]))
    config, names = MoEConfig(experts=24, router="switch", dispatch=form), ("router", "w_in", "w_gate", "w_out")

    def layer(x: jax.Array, *weights: jax.Array) -> jax.Array:
        placed = SimpleNamespace(**{name: str(at) for name, at in section.items()})
        return expert_layer(x, dict(zip(names, weights)), placed, config, activation="swiglu")[0]

    shapes = ((24, 6, 6), (6, 24), (24, 6, 24), (24, 6, 24), (24, 24, 6))
    told = f"experts {form} {section['dispatched']} -> {section['hidden']}"
    return Operation(told, layer, (section["groups"], *(section[name] for name in names)), shapes)


def check_operation(seed: int) -> None:
    """Check the value and the gradients of a seed's operation under lowering `xla` against those on one device."""
    mesh, axis_type, asked = operation(seed)
    _check(asked, mesh, axis_type, "xla")


def check_every_operation(seed: int) -> None:
    """Check the value and the gradients of a seed's operation, under its lowering, against those on one device."""
    mesh, axis_type, lowering, asked = every_operation(seed)
    try:
        _check(asked, mesh, axis_type, lowering)
    except Exception as error:
        raise AssertionError(f"{asked.name} on {mesh}, {axis_type}, {lowering}: {error}") from error


def check_lookup_in_stages(axis_type: str) -> None:
    """Check a lookup in a shard_map over one mesh axis, as in the stages of a pipeline, under lowering `xla`."""
    specs, rows = [Spec.parse("B_xyL"), Spec.parse("V_yE_x")], Spec.parse("B_xyLE")
    rng, axes = np.random.default_rng(0), ("x", "y")
    ids, table = rng.integers(24, size=(8, 3)).astype(np.int32), rng.normal(size=(24, 16)).astype(np.float32)

    def look(ids: jax.Array, table: jax.Array) -> jax.Array:
        return ops.embed(ids, table, f"{specs[0]}, {specs[1]} -> {rows}")

    def stage(ids: jax.Array, table: jax.Array) -> jax.Array:
        if axis_type == "auto":
            return look(ids, table)
        inside = tuple(spec.partition_spec() for spec in specs)
        return jax.sharding.explicit_axes(look, axes=axes, in_sharding=inside)(ids, table)

    stages = jax.shard_map(stage, in_specs=(jax.P(), jax.P()), out_specs=jax.P(), axis_names={"p"}, check_vma=False)
    if axis_type == "explicit":
        stages = jax.sharding.auto_axes(stages, axes=axes, out_sharding=rows.partition_spec())
    with jax.set_mesh(_mesh({"p": 2, "x": 2, "y": 2}, axis_type)), gspmd.lowering("xla"):
        placed = [gspmd.annotate(x, spec) for x, spec in zip((ids, table), specs)]
        np.testing.assert_array_equal(jax.jit(stages)(*placed), table[ids])


def check_cache(seed: int) -> None:
    """Check a seed's attention to a cache against numpy, on a mesh whose sizes are not powers of one prime."""
    case = random_case(seed, ({"x": 3, "y": 2}, {"x": 2, "y": 3})[seed % 2], factor=6)
    put = lambda mesh, x, spec: jax.device_put(x, jax.NamedSharding(mesh, Spec.parse(spec).partition_spec()))  # noqa: E731
    mesh, axis_type = case[0], ("explicit", "auto")[seed // 2 % 2]
    case[1].check(_mesh(mesh, axis_type), put, ("xla", "blocking", "looped")[seed % 3])


def _check(asked: Operation, mesh: dict[str, int], axis_type: str, lowering: str) -> None:
    want, got = (_run(asked, sizes, axis_type, lowering) for sizes in (dict.fromkeys(mesh, 1), mesh))
    for one, other in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        said = f"{asked.name} on {mesh}, {axis_type}"
        np.testing.assert_allclose(other, one, atol=1e-4 * max(1, np.abs(one).max()), err_msg=said)


def _run(asked: Operation, sizes: dict[str, int], axis_type: str, lowering: str) -> tuple:
    rng, mesh = np.random.default_rng(0), _mesh(sizes, axis_type)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in asked.shapes]
    for number in asked.integers:
        arrays[number] = rng.integers(18, size=asked.shapes[number]).astype(np.int32)
    real = [n for n in range(len(arrays)) if n not in asked.integers]

    def value_and_gradients(*arrays):
        def call(*some):
            held = dict(enumerate(arrays)) | dict(zip(real, some))
            return asked.call(*(held[n] for n in range(len(arrays))))

        if not asked.has_gradients:
            return call(*(arrays[n] for n in real))
        value, transpose = jax.vjp(call, *(arrays[n] for n in real))
        return value, transpose(2 * value)

    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        pairs = zip(arrays, asked.specs)
        placed = [jax.device_put(x, jax.NamedSharding(mesh, spec.partition_spec())) for x, spec in pairs]
        return jax.tree.map(np.asarray, jax.jit(value_and_gradients)(*placed))
