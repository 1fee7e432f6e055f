"""Whatever stands in the place of one argument of a public function: it is taken, or refused by one error of ours."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd import Spec, annotate, audit, layouts, moe, ops
from gspmd.annotate import mesh_split, parse_equation, parse_via, replicate, shard, spec_of, split

OURS = (gspmd.SpecError, gspmd.PlanError, gspmd.LayoutError)
SIZES, MESH = {"B": 8, "L": 1, "E": 16, "F": 16}, {"x": 2, "y": 2, "z": 2}
PRODUCT = "B_xE, EF_y -> B_xF_y"
WRONG = {
    "nothing": None,
    "a number": 5,
    "a huge number": 2**70,
    "no number": float("nan"),
    "text": "abc",
    "long text": "A" * 3000,
    "bytes": b"B_xE",
    "a list": [[1], [2, 3]],
    "a mapping": {"a": {"b": None}},
    "an object": object(),
    "an array": np.ones((2, 2)),
    "a long array": jnp.ones((8, 16, 2, 2, 2)),
    "an array of text": np.array(["a", "b"]),
    "an array of objects": np.array([None, "a"]),
    "complex numbers": jnp.ones((8, 16), "complex64"),
    "a key": jax.random.key(0),
    "a shape": jax.ShapeDtypeStruct((8, 16), "float32"),
    "a type": int,
}


def _calls():
    """Every public function with arguments that it takes."""
    x, w = np.ones((8, 16), np.float32), np.ones((16, 16), np.float32)
    q, k, cache = jnp.ones((2, 4, 4, 2)), jnp.ones((2, 4, 2, 2)), jnp.ones((1, 2, 8, 2, 2))
    spec, layout, numbers = Spec.parse("B_xE_y"), gspmd.Layout.load("megatron-1d"), np.arange(8)
    config = moe.MoEConfig(experts=4, router="switch")
    routing = moe.route(jnp.ones((2, 4, 4)), config)
    slots = jnp.ones((2, 4, routing.capacity, 8))
    ids, rows, limits = jnp.ones(8, "int32"), jnp.ones((8, 4)), {"window": 3, "softcap": 1.0}
    topology = audit.topology("tpu-v4:2x2x1") if _has_libtpu() else None
    calls = [
        (gspmd.plan, [PRODUCT, SIZES, MESH], {"dtype": "bfloat16", "chip": "tpu-v4", "via": "B, EF"}),
        (gspmd.plan, [PRODUCT, SIZES, MESH], {"lowering": "auto"}),
        (gspmd.einsum, ["BE, EF -> BF", x, w], {"lowering": "xla", "via": None, "wire_dtype": None, "precision": None}),
        (gspmd.einsum, ["BE, EF -> BF", x, w], {"lowering": "blocking", "via": None, "preferred_element_type": None}),
        (gspmd.reshard, [x, "BE -> B_xE"], {"lowering": "blocking"}),
        (annotate, [x, "B_xE"], {}),
        (gspmd.show, [jnp.asarray(x), "BE", None], {}),
        (gspmd.show, ["B_xE_y", SIZES, MESH], {}),
        (gspmd.lowering, ["looped"], {}),
        (gspmd.ledger, ["text"], {"mesh": MESH}),
        (Spec.parse, ["B_x"], {}),
        (Spec, [("B",), (("x",),), ()], {}),
        (spec.axes_of, ["B"], {}),
        (spec.with_axes, ["B", ("y",)], {}),
        (spec.with_partial, [("z",)], {}),
        (spec.without, ["B"], {}),
        (spec.without_trivial, [MESH], {}),
        (spec.rename, [{"B": "L"}], {}),
        (spec.local_shape, [(8, 8), MESH], {}),
        (spec_of, [x], {"dims": "BE"}),
        (replicate, [x], {}),
        (split, [x, 0, 2], {}),
        (shard, [x, numbers.reshape(8, 1)], {}),
        (mesh_split, [x, numbers.reshape(2, 4), [0, 1]], {}),
        (parse_equation, ["B -> B"], {}),
        (parse_via, ["B_x, E"], {}),
        (parse_equation(PRODUCT).check, [SIZES, MESH], {}),
        (gspmd.Layout.load, ["megatron-1d"], {}),
        (layout.get, ["ffn.w_in"], {}),
        (layout.section, ["ffn"], {}),
        (layout.gradient, ["ffn.w_in"], {}),
        (layout.optimizer, ["ffn.w_in"], {}),
        (layout.cache, ["attention.key"], {}),
        (layout.phase, ["decode"], {}),
        (layout.lowered, ["looped"], {}),
        (layout.lowering_of, ["ffn"], {}),
        (layout.mesh_for, [8], {"sizes": SIZES}),
        (layout.complete_mesh, [MESH], {}),
        (layout.override, [{"ffn.w_in": "E_xF"}], {}),
        (layout.check, [SIZES, MESH], {}),
        (layouts.rank, [["megatron-1d"]], {"sizes": SIZES, "mesh": MESH, "chip": "tpu-v4", "dtype": "int8"}),
        (layouts.rank, ["zero-3"], {"sizes": SIZES, "mesh": MESH, "objective": "seconds", "gated": False}),
        (audit.verify, [lambda a: a * 2, x], {"lowerings": ("blocking",), "gradients": False, "seed": 0}),
        (audit.topology, ["tpu-v4:0x0x0"], {}),
        (audit.check_compiler_options, [{"xla_cpu_enable_fast_math": True}], {"device": None}),
        (audit.timeline, [None, "tpu-v4", MESH], {"flops": 0}),
        (audit.compare, [None, None], {}),
        (audit.gantt.draw, [None, "gantt.png"], {}),
        (audit.gantt.figure, [None], {}),
        (audit.perfetto.write, [None, "trace.json"], {}),
        (audit.perfetto.trace, [None], {}),
        (ops.argmax, [x, "BE", "E"], {}),
        (ops.sample, [x, "BE", "E"], {"seeds": ids, "positions": ids, "temperature": 1.0, "top_k": 0, "top_p": 0.5}),
        (ops.softmax, [x, "BE", "E"], {}),
        (ops.logsumexp, [x, "BE", "E"], {}),
        (ops.rms_norm, [x, jnp.ones(16), "BE", "E"], {"epsilon": 1e-6}),
        (ops.layer_norm, [x, jnp.ones(16), jnp.ones(16), "BE", "E"], {"epsilon": 1e-6}),
        (ops.add_bias, [x, jnp.ones(16), "BE", "E"], {}),
        (ops.embed, [ids, w, "B, VE -> BE"], {}),
        (ops.attention, [q, k, k, "BLHD", "BTKD"], {"causal": True, "mask": None, "scale": 1.0, "offset": 0}),
        (ops.attention, [q, k, k, "BLHD", "BTKD"], limits | {"sinks": jnp.ones(4), "sinks_spec": "H"}),
        (ops.attention, [q, k, k, "BLHD", "BTKD"], {"slopes": (1.0, 0.5, 0.2, 0.1), "slopes_spec": "H"}),
        (
            ops.cached_attention,
            [q, k, k, cache[0], cache[0], "BLHD", "BLKD", "BTKD"],
            {"lengths": ids[:2], "scale": 1.0, "key_scales": cache[0, ..., 0], "value_scales": cache[0, ..., 0]},
        ),
        (ops.cached_attention, [q, k, k, k, k, "BLHD", "BLKD", "BTKD"], {"lengths": ids[:2], **limits}),
        (ops.write_cache, [cache, k[None], "BTKD", "BLKD"], {"lengths": ids[:2], "counts": ids[:2], "ring": True}),
        (ops.quantize_heads, [k], {}),
        (ops.zigzag_positions, [16, 4], {}),
        (ops.cross_entropy, [x, ids, "BV"], {"mask": None, "z_loss": 0.0}),
        (ops.global_norm, [{"a": x}, {"a": "BE"}], {}),
        (config.capacity, [16], {}),
        (moe.MoEConfig, [], {"experts": 4, "router": "switch", "k": None, "renormalize": True, "capacity_factor": 1.0}),
        (moe.route, [jnp.ones((2, 4, 4)), config], {"key": None, "mask": None}),
        (moe.dispatch, [jnp.ones((2, 4, 8)), routing, 4, routing.capacity], {"form": "sort"}),
        (moe.combine, [slots, routing], {"form": "sort"}),
        (moe.grouped_matmul, [rows, jnp.ones((2, 4, 4)), jnp.array([4, 4])], {"form": "blocks"}),
    ]
    if topology is not None:
        calls += [(topology.mesh, [{"x": 2, "y": 2}], {"axis_type": "explicit"}), (topology.rings, [None], {})]
    return calls


def _has_libtpu():
    import importlib.util

    return importlib.util.find_spec("libtpu") is not None


CALLS = {f"{getattr(call[0], '__qualname__', call[0])} {number}": call for number, call in enumerate(_calls())}


@pytest.mark.parametrize("name", CALLS)
def test_one_wrong_argument_is_taken_or_refused_by_one_short_error_of_ours(name, make_mesh, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fn, args, keywords = CALLS[name]
    places = [*range(len(args)), *keywords]
    for place in places:
        for what, wrong in WRONG.items():
            given = {**dict(enumerate(args)), **keywords, place: wrong}
            said = f"{name}: {what} for {place!r}"
            try:
                with jax.set_mesh(make_mesh(MESH)):
                    fn(*(given[at] for at in range(len(args))), **{key: given[key] for key in keywords})
            except OURS as error:
                message = str(error)
                assert len(message) < 8000, f"{said}: {message[:300]}"
                assert " at 0x" not in message, f"{said}: {message[:300]}"
                assert "\n  " in message, f"{said} has no remedy: {message}"
            except Exception as error:
                raise AssertionError(f"{said} raises {type(error).__name__}: {str(error)[:200]}") from error


@pytest.mark.skipif(not _has_libtpu(), reason="libtpu, the TPU compiler, is not installed")
def test_wrong_options_of_compile_offline_are_refused_before_anything_is_planned(monkeypatch):
    monkeypatch.setattr("gspmd.audit.offline.compilation.trace", lambda *_: pytest.fail("it was planned"))
    topology = audit.topology("tpu-v4:2x2x1")
    x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=jax.NamedSharding(topology.mesh({"x": 4}), jax.P("x")))
    wrong = {
        "compiler_options": ["x", 5, [1], {1: 2}, {"no_such_option": 1}],
        "donate_argnums": [None, 5, "x", ["x"], [0.5], (1,), np.ones((2, 2)), object()],
        "auto_layout_argnums": [5, "x", (None,), (7,), jax.ShapeDtypeStruct((8,), "float32")],
        "out_shardings": [5, "x", np.ones(2), {"a": int}],
        "progress": [None, "x", 5],
        "mesh": ["x", 5, {"x": 3}],
        "flops": ["x", -1, None],
        "topology": ["x", None, {"x": 4}],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(OURS) as error:
                audit.compile_offline(lambda x: x * 2, x, **{"topology": topology, name: value})
            assert "\n  " in str(error.value), f"{name}={value!r} has no remedy: {error.value}"


def test_every_public_function_is_tried():
    tried = {"trace", "compile_offline"} | {getattr(fn, "__name__", "") for fn, *_ in CALLS.values()}
    rooms = (gspmd, audit, ops, layouts, moe)
    public = {name for room in rooms for name in room.__all__ if inspect.isfunction(getattr(room, name))}
    assert public - tried <= {"expert_layer", "presets", "slices"}
