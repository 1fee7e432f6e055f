"""gspmd.jax_internals holds for the installed release, and nothing else reaches into JAX."""

import ast

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from gspmd import jax_internals
from gspmd.lowerings.transformations import hoisting
from gspmd.tracing.jaxprs import all_equations, without_dead_code
from tests.house import FILES, ROOT


def equations(f, *arrays):
    """The equations of a function's program, by primitive."""
    return {each.primitive.name: each for each in all_equations(jax.make_jaxpr(f)(*arrays).jaxpr)}


@jax.custom_batching.custom_vmap
def doubled(x):
    return 2 * x


@doubled.def_vmap
def _batched(size, batched, x):
    return 2 * x, True


@jax.custom_jvp
def with_tangent(x):
    return x


with_tangent.defjvp(lambda primals, tangents: (primals[0], tangents[0]))


@jax.custom_vjp
def with_cotangent(x):
    return x


with_cotangent.defvjp(lambda x: (x, None), lambda _, g: (g,))


def everything(x):
    """A program with an equation of every primitive whose parameters are read, but those that JAX alone makes."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    inside = jax.shard_map(lambda x: x, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    x = jnp.broadcast_to(x, (3, 4))[0].reshape(2, 2).reshape(4)
    x = lax.scan(lambda c, w: (c + w, None), x, jnp.ones((3, 4)))[0]
    x = lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x)
    x = lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
    x = doubled(with_tangent(with_cotangent(jax.jit(jnp.tanh)(x))))
    return jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(inside(x) @ x))))(x)


@pytest.mark.parametrize("primitive", sorted(jax_internals.PARAMETERS))
def test_parameters_of_equations_have_their_names(primitive):
    assert jax_internals.PARAMETERS[primitive] <= equations(everything, jnp.ones(4))[primitive].params.keys()


def parameters_read(tree):
    """The names in `params["name"]` and `params.get("name")`, whatever the parameters are of."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=of, slice=ast.Constant(value=str(name))):
                pass
            case ast.Call(func=ast.Attribute(value=of, attr="get"), args=[ast.Constant(value=str(name)), *_]):
                pass
            case _:
                continue
        if ast.unparse(of).split(".")[-1] == "params":
            yield name


def test_no_parameter_is_read_that_is_not_listed():
    listed = {"known"}.union(*jax_internals.PARAMETERS.values())  # the one is that of a primitive of ours
    readers = ("gspmd.tracing", "gspmd.lowerings", "gspmd.pipeline", "models.remat")
    files = [path for module, path in FILES.items() if module.startswith(readers)]
    read = {name for path in files for name in parameters_read(ast.parse(path.read_text()))}
    assert {"broadcast_dimensions", "dimension_numbers", "prevent_cse"} <= read
    assert read <= listed


def test_trace_looks_into_the_plain_calls_that_it_makes():
    plain = without_dead_code(jax.make_jaxpr(doubled)(jnp.ones(4)).jaxpr)
    assert [each.primitive.name for each in plain.eqns] == [jax_internals.CLOSED_CALL]
    assert [each.primitive.name for each in all_equations(plain)] == [jax_internals.CLOSED_CALL, "mul"]


def test_operands_of_a_scan_are_counted():
    def looped(carry, others, slices, constant):
        return lax.scan(lambda c, x: ((c[0] + x * constant, c[1] * 2), c[0]), (carry, others), slices)

    one = jnp.ones(4)
    scan = equations(looped, one, one, jnp.ones((3, 4)), one)["scan"]
    constants, carried = jax_internals.scan_operands(scan)
    assert (constants, carried) == (1, 2)
    assert len(scan.invars) == constants + carried + 1
    assert [len(var.aval.shape) for var in scan.outvars[carried:]] == [2]  # a stack of three


def test_dead_code_is_eliminated_by_our_rules_and_by_those_of_jax():
    both = Primitive("both")
    both.multiple_results = True
    both.def_abstract_eval(lambda *arrays: arrays)
    mlir.register_lowering(both, lambda _, *arrays: arrays)
    asked = []

    def rule(used, equation):
        asked.append(list(used))
        kept = [var for var, each in zip(equation.outvars, used) if each]
        read = [var for var, each in zip(equation.invars, used) if each]
        return list(used), equation.replace(invars=read, outvars=kept)

    jax_internals.set_dce_rule(both, rule)

    def program(x, y):
        first, second = both.bind(jnp.sin(x), jnp.cos(y))
        return jax.jit(lambda a, b: (a + 1, b * 2))(first, second)[1]

    jaxpr = jax.make_jaxpr(program)(1.0, 2.0).jaxpr
    left = {each.primitive.name for each in all_equations(jax_internals.without_dead_code(jaxpr))}
    assert asked == [[False, True]]
    assert {"cos", "mul", "both"} <= left
    assert not {"sin", "add"} & left

    (call,) = (each for each in jaxpr.eqns if each.primitive.name == "jit")
    less = jax_internals.without_unused_results(call, [False, True])
    assert [each.primitive.name for each in all_equations(less.params["jaxpr"].jaxpr)] == ["mul"]
    (sine,) = (each for each in jaxpr.eqns if each.primitive.name == "sin")
    assert jax_internals.without_unused_results(sine, [False]) is sine  # JAX has no rule for it


def _plain(c, w):
    return c * jnp.sin(hoisting.never_hoisted(w)[0])


def _of_a_recomputed_invariant(c, w):
    """A `jax.checkpoint` of what is the same at every step, which JAX would take out of the loop whole."""
    return c * jax.checkpoint(lambda w: jnp.sin(hoisting.never_hoisted(w)[0]))(w)


def _of_both(c, w):
    """Two nested checkpoints of two operands, one of which is the same at every step, as is one result."""

    @jax.checkpoint
    @jax.checkpoint
    def both(c, w):
        c, w = hoisting.never_hoisted(c, w)
        return c, jnp.sin(w)

    c, sine = both(c, w)
    return c * sine


BODIES = {
    "plain": _plain,
    "recomputed": jax.checkpoint(_plain),
    "invariant": _of_a_recomputed_invariant,
    "both": _of_both,
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_partial_evaluation_asks_our_rules(body):
    """An operation that is never hoisted stays in a differentiated loop, though it is the same at every step."""

    def loss(x, w):
        return lax.scan(lambda c, _: (body(c, w), None), x, None, length=3)[0]

    jaxpr = jax.make_jaxpr(jax.grad(loss))(1.0, 2.0).jaxpr
    outside = {each.primitive.name for each in jaxpr.eqns}
    assert hoisting.NEVER_HOISTED in {each.primitive.name for each in all_equations(jaxpr)}
    assert not outside & {"sin", "remat2", "checkpoint", hoisting.NEVER_HOISTED}


def test_the_cluster_that_jax_detects(monkeypatch):
    for name in ("OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST", "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT"):
        monkeypatch.delenv(name, raising=False)
    slurm = {"JOB_ID": "4096", "STEP_NODELIST": "node[1-2]", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert jax_internals.detected_processes(1) == ("node1:61440", 2, 1)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "other:1234")
    assert jax_internals.detected_processes(1) == ("other:1234", 2, 1)
    for name in slurm:
        monkeypatch.delenv(f"SLURM_{name}")
    assert jax_internals.detected_processes(1) is None


def test_no_other_file_reaches_into_jax():
    """Private modules, rules of partial evaluation and of dead code: only where the releases of JAX are known."""
    allowed = {"gspmd.jax_internals"}
    found = set()
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            reaches = any("jax._src" in name or name == "jax.interpreters.partial_eval" for name in names)
            reaches |= isinstance(node, ast.Attribute) and node.attr == "_src"
            if reaches and module not in allowed:
                found.add(str(path.relative_to(ROOT)))
    assert not found, f"these use what JAX does not promise; it belongs to gspmd/jax_internals.py: {sorted(found)}"


def test_cudnn_is_assumed_only_where_it_is_not(monkeypatch):
    module = jax_internals.fused_attention_stablehlo

    def missing():
        raise RuntimeError("no library")

    for ask, version in ((missing, 90800), (lambda: 91100, 91100)):
        monkeypatch.setattr(module, "check_cudnn_version", ask)
        jax_internals.assume_cudnn(90800)
        jax_internals.assume_cudnn(90900)  # The first time counts.
        assert module.check_cudnn_version() == version


def test_the_mesh_in_force_has_its_devices_also_under_jit_and_shard_map():
    assert jax_internals.concrete_mesh() is None
    mesh, seen = jax.make_mesh((2, 4), ("x", "y")), []

    def inner(x):
        seen.append(jax_internals.concrete_mesh())
        return x

    def outer(x):
        seen.append(jax_internals.concrete_mesh())
        return jax.shard_map(inner, in_specs=jax.P(), out_specs=jax.P())(x)

    with jax.set_mesh(mesh):
        jax.make_jaxpr(jax.jit(outer))(jax.ShapeDtypeStruct((8,), "float32"))
    assert seen == [mesh, mesh]
