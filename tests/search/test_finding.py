"""`gspmd.search`: the cheapest layout of any program, against every layout of a small one and against the trace."""

from dataclasses import replace
from functools import partial
from itertools import permutations, product
from math import inf, prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

import gspmd
import gspmd_models as models
from gspmd import Spec
from gspmd.hardware.chips import chip
from gspmd.layouts import Layout
from gspmd.lowerings.in_force import planned_for
from gspmd.ops import attention
from gspmd.planner.unknown import UnknownSteps
from gspmd.search import NothingFits
from gspmd.search.answers.candidate import Candidate
from gspmd.search.finding import MeshProblem
from gspmd.search.lines import Lines
from gspmd.search.program import read
from gspmd.training import OptimizerConfig
from gspmd.training.step import Update
from gspmd_models import step
from gspmd_models.finetuning.config import LoraConfig
from gspmd_models.search.training import RelaxedTraining, TrainingProblem
from gspmd_models.search.workload import STEPS, Workload

CHIP = chip("tpu-v5e")
SIZES = {"B": 64, "E": 4096, "F": 8192}


def own(**lines):
    """A layout with a section of one's own."""
    table = {f"mine.{name}": text for name, text in lines.items()}
    return Layout("own", axes=("x",), factor=("x",), table=table)


def lies(layout, mesh, key, *shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, layout.spec(key).partition_spec()))


def one_product(layout, mesh):
    """Build one product of x and w, which meet at a line; the result is an argument of nothing else."""
    at = layout.section("mine")
    arguments = lies(layout, mesh, "mine.x", 64, 4096), lies(layout, mesh, "mine.w_in", 4096, 8192)
    return lambda x, w: at.einsum("x, w_in -> y", x, w), *arguments


PRODUCT = own(x="BE", w_in="EF", y="BF")


def placements(dims, mesh):
    """Every spec of a tensor: each mesh axis on one of its dimensions or on none, in every order."""
    for on in product((*dims, ""), repeat=len(mesh)):
        of = [[axis for axis, dim in zip(mesh, on) if dim == each] for each in dims]
        for orders in product(*map(permutations, of)):
            if all(SIZES[dim] % prod(mesh[axis] for axis in order) == 0 for dim, order in zip(dims, orders)):
                yield Spec(tuple(dims), orders)


def every_layout(mesh):
    """Every layout of `one_product`, with its planned seconds and the bytes of arguments, result and what is moved."""
    axes = AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Explicit,) * len(mesh))
    for x, w, y in product(*(placements(dims, mesh) for dims in ("BE", "EF", "BF"))):
        for joint in placements("BEF", mesh):
            via = f"{joint.without('F')}, {joint.without('B')}"
            layout = PRODUCT.override({"mine.x": x, "mine.w_in": w, "mine.y": y, "mine.in_via": via})
            with jax.sharding.use_abstract_mesh(axes), gspmd.lowering("blocking"), planned_for(CHIP):
                function, *arguments = one_product(layout, axes)
                seconds = gspmd.trace(function, *arguments).seconds
            meet = joint.without("F"), joint.without("B"), joint.without("E")
            pairs = zip(meet, (x, w, y))
            moved = [spec for spec, at in pairs if any(spec.axes_of(dim) != at.axes_of(dim) for dim in at.dims)]
            moved += [meet[2]] * (meet[2] not in moved and bool(joint.axes_of("E")))  # partial sums
            yield seconds, sum(2 * prod(spec.local_shape(SIZES, mesh)) for spec in (x, w, y, *moved))


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 4}])
def test_no_layout_of_all_is_cheaper(mesh):
    every = list(every_layout(mesh))
    assert len(every) == 3**3 * 4
    for limit in (None, *sorted({held for _, held in every})):
        memory = float("inf") if limit is None else limit
        found = gspmd.search(one_product, PRODUCT, mesh, chip=CHIP, memory=memory)
        least = min(seconds for seconds, held in every if held <= memory)
        assert found.planned_seconds == pytest.approx(least, rel=1e-6)
        assert found.priced_seconds == pytest.approx(found.planned_seconds, rel=1e-6)
        assert found.complete
        assert found.bytes <= memory
    with pytest.raises(NothingFits, match=r"no layout fits on mesh x=\d: the smallest holds .* on each device"):
        gspmd.search(one_product, PRODUCT, mesh, chip=CHIP, memory=0.9 * min(held for _, held in every))


def test_the_lines_where_operands_meet_are_written():
    found = gspmd.search(one_product, PRODUCT, {"x": 4}, chip=CHIP)
    assert "in_via" in found.toml()
    again = PRODUCT.override(found.lines)
    assert again["mine.in_via"] == found.layout["mine.in_via"]


def test_what_is_written_has_the_dimensions_and_the_lines_that_the_program_does_not_use(tmp_path):
    base = replace(
        own(x="BI", w_in="IF", y="BF", state="B_xI"), dimensions={"I": 'the "inputs" \U0001d44b of a product\x7f'}
    )
    found = gspmd.search(one_product, base, {"x": 4}, chip=CHIP)
    found.write(tmp_path / "found.toml")
    layout = Layout.load(tmp_path / "found.toml").check()
    assert (layout.dimensions, layout["mine.state"]) == (base.dimensions, "BI")
    assert 'state  = "BI"' in found.toml()
    assert found.toml().count("# not in the program that was searched") == 1
    assert gspmd.search(one_product, layout, {"x": 4}, chip=CHIP).seconds == found.seconds


def test_the_mesh_in_force_does_not_matter(make_mesh):
    alone = gspmd.search(one_product, PRODUCT, {"x": 4}, chip=CHIP)
    mesh = make_mesh({"x": 2, "y": 2})
    with jax.set_mesh(mesh):
        assert gspmd.search(one_product, PRODUCT, {"x": 4}, chip=CHIP).lines == alone.lines
        assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh


@pytest.mark.parametrize(("build", "mesh", "message"), [
    (3, {"x": 2}, r"cannot search an int: it is not a function\.\n  Pass a function of a layout and a mesh"),
    (one_product, (2, 2), r"cannot read a mesh from 2\.\n  Write \{'x': 4, 'y': 2\}, or a list of such meshes\."),
    (one_product, "x=2", r"cannot read a mesh from 'x=2'\."),
])  # fmt: skip
def test_what_is_no_program_and_no_mesh(build, mesh, message):
    with pytest.raises(gspmd.PlanError, match=message):
        gspmd.search(build, PRODUCT, mesh, chip=CHIP)


def test_fixed_lines_stay_as_they_are():
    found = gspmd.search(one_product, PRODUCT, {"x": 4}, chip=CHIP, fixed={"mine.x": "BE_x", "mine.y": "B_xF"})
    assert (found.layout["mine.x"], found.layout["mine.y"]) == ("BE_x", "B_xF")
    assert found.priced_seconds == pytest.approx(found.planned_seconds, rel=1e-6)


@pytest.mark.parametrize(
    ("x", "w_in", "y", "via", "beside"),
    [
        ("B_xE", "EF", "B_xF", "B_xE, EF", 0),
        ("B_xE", "E_xF", "B_xF", "B_xE, EF", 4096 * 8192),  # gathered weights
        ("BE_x", "E_xF", "B_xF", "BE_x, E_xF", 64 * 8192),  # partial sums
        ("BE", "EF", "BF", "BE_x, E_xF", 64 * 1024 + 1024 * 8192 + 64 * 8192),  # both operands cut, and partial sums
    ],
)
def test_memory_includes_what_a_product_moves(x, w_in, y, via, beside):
    lines = {"mine.x": x, "mine.w_in": w_in, "mine.y": y, "mine.in_via": via}
    found = gspmd.search(one_product, PRODUCT, {"x": 4}, chip=CHIP, fixed=lines)
    local = [prod(Spec.parse(spec).local_shape(SIZES, {"x": 4})) for spec in (x, w_in, y)]
    assert found.bytes == 2 * (sum(local) + beside)


def test_a_line_that_cannot_be_fixed_is_refused():
    with pytest.raises(gspmd.LayoutError, match=r"Did you mean 'mine\.w_in'"):
        gspmd.search(one_product, PRODUCT, {"x": 4}, chip=CHIP, fixed={"mine.w_im": "EF"})
    with pytest.raises(gspmd.LayoutError, match=r"cannot fix mine\.x = 'B_xE'"):
        gspmd.search(one_product, PRODUCT, {"x": 3}, chip=CHIP, fixed={"mine.x": "B_xE"})
    with pytest.raises(gspmd.LayoutError, match=r"optimizer\.mine\.x: the layout has no such line"):
        gspmd.search(one_product, PRODUCT, {"x": 4}, chip=CHIP, fixed={"optimizer.mine.x": "BE"})
    with pytest.raises(gspmd.LayoutError, match=r"gradients\.mine\.w_in: the search itself chooses when each gradient"):
        gspmd.search(one_product, PRODUCT, {"x": 4}, chip=CHIP, fixed={"gradients.mine.w_in": "EF"})


def test_lines_that_are_given_and_cannot_be_together_are_both_named():
    layout = own(x="BE", w_a="EF", w_b="EF", y="BF")

    def build(layout, mesh):
        at = layout.section("mine")
        shapes = {"x": (64, 4096), "w_a": (4096, 8192), "w_b": (4096, 8192)}
        arguments = (lies(layout, mesh, f"mine.{name}", *shape) for name, shape in shapes.items())
        return lambda x, a, b: at.einsum("x, (w_a, w_b) -> (y, y)", x, (a, b)), *arguments

    # Both weights meet one operand, which lies at one place.
    given = {"mine.a_via": "BE, EF", "mine.b_via": "BE_x, E_xF"}
    said = r"cannot fix mine\.b_via = 'BE_x, E_xF': .* with mine\.a_via = 'BE, EF', given as well"
    with pytest.raises(gspmd.LayoutError, match=said):
        gspmd.search(build, layout, {"x": 4}, chip=CHIP, fixed=given)


def test_the_best_of_several_meshes_is_taken():
    meshes = [{"x": 8}, {"x": 2, "y": 4}]
    alone = [gspmd.search(one_product, PRODUCT, mesh, chip=CHIP) for mesh in meshes]
    found = gspmd.search(one_product, PRODUCT, meshes, chip=CHIP)
    assert found.seconds == min(each.seconds for each in alone)
    assert found.bound == min(each.bound for each in alone)
    assert found.complete
    stopped = gspmd.search(one_product, PRODUCT, meshes, chip=CHIP, stop=lambda: True)
    assert stopped.mesh == meshes[0]
    assert (stopped.bound, stopped.complete) == (0.0, False)
    with pytest.raises(gspmd.PlanError, match="no mesh to search"):
        gspmd.search(one_product, PRODUCT, [], chip=CHIP)


def test_lines_that_a_program_adds_lie_alike():
    layout = own(x="BE", y="BE", w_in="EF", w_out="FE", h="BF")

    def build(layout, mesh):
        at = layout.section("mine")

        def function(x, w_in, w_out):
            y = at.einsum("h, w_out -> y", jax.nn.relu(at.einsum("x, w_in -> h", x, w_in)), w_out)
            return x + y

        shapes = ("mine.x", 64, 512), ("mine.w_in", 512, 1024), ("mine.w_out", 1024, 512)
        return function, *(lies(layout, mesh, *each) for each in shapes)

    found = gspmd.search(build, layout, {"x": 4}, chip=CHIP)
    assert found.layout["mine.x"] == found.layout["mine.y"]
    assert found.priced_seconds == pytest.approx(found.planned_seconds, rel=1e-6)


def test_what_does_not_divide_is_whole():
    """All but the first column are a matrix of 511, which no device has an even part of."""
    layout = own(x="BE", y="BE")

    def build(layout, mesh):
        at = layout.section("mine")
        return lambda x: (at.move("x -> y", x), x[:, 1:]), lies(layout, mesh, "mine.x", 64, 512)

    found = gspmd.search(build, layout, {"x": 4}, chip=CHIP)
    assert found.layout["mine.x"] in ("BE", "B_xE")
    assert found.priced_seconds == pytest.approx(found.planned_seconds, rel=1e-6)


def test_a_fault_of_the_program_is_its_own():
    def build(layout, mesh):
        return lambda x: x.missing, lies(layout, mesh, "mine.x", 64, 4096)

    with pytest.raises(AttributeError, match="missing"):
        gspmd.search(build, PRODUCT, {"x": 4}, chip=CHIP)


def test_a_step_is_searched_on_one_device():
    found = gspmd.search(one_product, PRODUCT, {"x": 1}, chip=CHIP)
    assert found.layout["mine.w_in"] == "EF"
    assert found.complete


@pytest.mark.slow
def test_a_search_that_is_stopped_has_its_best():
    config = models.ModelConfig(layers=2, embed=64, heads=4, kv_heads=2, head_size=16, feed_forward=128)
    phase = TrainingProblem(Workload(config, CHIP, 8, 16), {"x": 2, "y": 2})
    whole = phase.question.answer(None, lambda: False)
    stopped = phase.question.answer(0.9 * whole.bytes, lambda: True)
    assert not stopped.complete
    assert whole.seconds <= stopped.seconds
    assert stopped.bound <= stopped.seconds
    assert stopped.bytes <= 0.9 * whole.bytes


# -- training steps of models, as `gspmd search` asks for them ---------------------------------------------------------

# As large as models are: nothing is allocated, and picoseconds, in which tables count, are no part of the result.
LARGE = {
    "layers": 2, "embed": 2048, "heads": 16, "kv_heads": 4, "head_size": 128, "feed_forward": 8192, "vocabulary": 32000,
}  # fmt: skip
PLAIN = Update(OptimizerConfig(), STEPS)
UPDATES = {
    "adapters": ({"lora": LoraConfig(4, targets=("attention.w_q", "ffn.w_in"))}, PLAIN),
    "frozen": ({}, replace(PLAIN, frozen=("embedding.*", "attention.*"))),
    "moments of eight bits": ({}, replace(PLAIN, optimizer=OptimizerConfig(moments="int8", moments_block=16))),
    "parameters of sixteen bits": ({}, replace(PLAIN, parameter_dtype="bfloat16")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATES)
def test_what_had_no_price_is_found_as_it_is_traced(name):
    settings, update = UPDATES[name]
    work = Workload(models.ModelConfig(**LARGE, **settings), CHIP, 64, 512, update=update)
    mesh = {"x": 4, "y": 2}
    candidate = Candidate(TrainingProblem(work, mesh), 0.9 * CHIP.hbm_bytes)
    answer = candidate.solve()
    found = candidate.phase.question.answer(None, lambda: False)
    assert answer.seconds == pytest.approx(found.seconds, rel=1e-3)  # of nearly equal ones, that which holds less
    assert found.priced_seconds == pytest.approx(found.planned_seconds, rel=1e-6)
    step.check_step(work.config, found.layout, mesh, 64, 512, 1, update.frozen)


@pytest.mark.turns(1)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_bound_of_microbatches_is_one(count):
    """Hold the bound in seconds without a limit, and in bytes at the least limit that fits."""
    config = models.ModelConfig(**LARGE)
    work = Workload(config, CHIP, 64, 512, microbatches=count)
    mesh = {"x": 2, "y": 2}
    exact = Candidate(TrainingProblem(work, mesh), 0.9 * CHIP.hbm_bytes)
    bound = RelaxedTraining(work, mesh)
    from gspmd.search import Search

    assert Search(bound.between(2, 8)).best().seconds <= exact.free.seconds * (1 + 1e-9)
    assert Search(bound.between(count, count)).best().seconds <= exact.free.seconds * (1 + 1e-9)
    with pytest.raises(NothingFits) as fault:
        Search(bound.between(2, count, -1.0)).best()
    assert fault.value.nearest.bytes <= exact.least.bytes * (1 + 1e-9)


# -- what is refused in words ------------------------------------------------------------------------------------------


def refused(function, *arrays, layout=PRODUCT, **options):
    """The message of a search of a function of arrays that lie as lines say."""

    def build(layout, mesh):
        return lambda *xs: function(layout.section("mine"), *xs), *(lies(layout, mesh, *each) for each in arrays)

    with pytest.raises(ValueError, match=r"\w") as error:
        gspmd.search(build, layout, {"x": 4}, chip=CHIP, **options)
    assert "unknown" not in str(error.value)
    return str(error.value)


X, W = ("mine.x", 64, 4096), ("mine.w_in", 4096, 8192)


def test_what_cannot_be_searched_is_said():
    def either(at, x, w):
        one = lambda x, w: at.einsum("x, w_in -> y", x, w)  # noqa: E731
        return jax.lax.cond(x.sum() > 0, one, lambda x, w: 2 * one(x, w), x, w)

    assert "conditional has planned steps in several branches" in refused(either, X, W)

    def many(at, x, w):
        return jax.vmap(lambda scale: at.einsum("x, w_in -> y", scale * x, w))(jnp.arange(3, dtype=x.dtype))

    assert "jax.vmap" in refused(many, X, W)
    product = lambda at, x, w: at.einsum("x, w_in -> y", x, w)  # noqa: E731
    assert "the mesh has no axis q" in refused(product, X, W, fixed={"mine.x": "B_qE"})
    assert "its dimensions must be BE" in refused(product, X, W, fixed={"mine.x": "BF"})
    assert "cannot have a partial sum or reduced-" in refused(product, X, W, fixed={"mine.x": "BE partialsum-x"})


def test_a_users_own_error_stays():
    def build(layout, mesh):
        def function(x):
            raise ValueError("mine: cannot take unknown1")

        return function, lies(layout, mesh, *X)

    with pytest.raises(ValueError, match="mine: cannot take unknown1"):
        gspmd.search(build, PRODUCT, {"x": 4}, chip=CHIP)


@pytest.mark.parametrize("size", [0, -2, 2.5, True])
def test_sizes_of_a_mesh_are_whole_numbers(size):
    with pytest.raises(gspmd.PlanError, match="mesh axis x has size"):
        gspmd.search(one_product, PRODUCT, {"x": size}, chip=CHIP)


def test_a_mesh_that_cannot_be_searched_leaves_the_others_and_no_proof():
    found = gspmd.search(one_product, PRODUCT, [{"x": 4}, {"x": 3}], chip=CHIP, fixed={"mine.x": "B_xE"})
    assert found.mesh == {"x": 4}
    assert not found.complete


def test_what_nobody_needs_has_to_divide_too():
    """The program that runs computes it, though no result has it."""

    def build(layout, mesh):
        return lambda x: (x[:, 1:], layout.section("mine").move("x -> y", x))[1], lies(layout, mesh, "mine.x", 64, 512)

    found = gspmd.search(build, own(x="BE", y="BE"), {"x": 4}, chip=CHIP)
    assert found.layout["mine.x"] in ("BE", "B_xE")


@pytest.mark.parametrize(
    ("x", "y", "passed"),
    [
        ("B_xE", "B_xE", 0),
        ("B_xE", "BE_x", 2 * 16 * 4096),  # read and written, as the shards are
        ("B_xE", "BE", 16 * 4096 + 64 * 4096),
    ],
)
def test_only_a_move_that_moves_something_passes_over_memory(x, y, passed):
    layout = own(x="BE", y="BE")

    def build(layout, mesh):
        return lambda x: layout.section("mine").move("x -> y", x), lies(layout, mesh, "mine.x", 64, 4096)

    found = gspmd.search(build, layout, {"x": 4}, chip=CHIP, fixed={"mine.x": x, "mine.y": y})
    assert found.seconds - found.priced_seconds == pytest.approx(2 * passed / CHIP.stream_bandwidth)


def test_a_move_that_transposes_passes_over_memory():
    layout = own(x="BE", y="EB")

    def build(layout, mesh):
        return lambda x: layout.section("mine").move("x -> y", x), lies(layout, mesh, "mine.x", 64, 4096)

    found = gspmd.search(build, layout, {"x": 4}, chip=CHIP, fixed={"mine.x": "B_xE", "mine.y": "EB_x"})
    assert found.seconds - found.priced_seconds > 0


def test_flops_of_products_that_no_plan_has():
    """Passes and products of plain JAX, and inside of loops, as often as they run."""
    layout = own(x="BE", y="BE")

    def build(layout, mesh):
        def function(x):
            return jax.lax.scan(lambda x, _: (x @ jnp.ones((4096, 4096), x.dtype), None), x, length=8)[0]

        return function, lies(layout, mesh, *X)

    found = gspmd.search(build, layout, {"x": 1}, chip=CHIP)
    assert found.seconds > 8 * 2 * 64 * 4096 * 4096 / CHIP.bf16_flops


def test_a_gate_of_one_s_own_meets_its_operand_as_the_other_weight_does():
    layout = own(stream="BLE", w_in="EF", w_gate="EF", hidden="BLF")

    def build(layout, mesh):
        at = layout.section("mine")
        arguments = (
            lies(layout, mesh, "mine.stream", 8, 64, 256),
            *(lies(layout, mesh, f"mine.{name}", 256, 512) for name in ("w_in", "w_gate")),
        )
        into = "stream, (w_in, w_gate) -> (hidden, hidden)"
        return lambda x, *weights: at.einsum(into, x, weights), *arguments

    found = gspmd.search(build, layout, {"x": 2, "y": 2}, chip="tpu-v5e")
    assert found.complete
    assert found.layout["mine.in_via"] == found.layout["mine.gate_via"]
    assert found.priced_seconds == pytest.approx(found.planned_seconds, rel=1e-5)


# -- programs of one's own ---------------------------------------------------------------------------------------------


def layer(then, *shape, **lines):
    """A layout, and how a product is built that something is done with."""
    layout = own(stream="BLE", w="EF", hidden="BLF", **lines)

    def build(layout, mesh):
        at = layout.section("mine")
        arguments = lies(layout, mesh, "mine.stream", *shape, 64), lies(layout, mesh, "mine.w", 64, 64)
        return lambda x, w: then(at.einsum("stream, w -> hidden", x, w)), *arguments

    return build, layout


WHOLE = {
    "cumulative sum": lambda h: jnp.cumsum(h, 1),
    "sort": lambda h: jnp.sort(h, axis=1),
    "roll": lambda h: jnp.roll(h, 1, axis=1),
    "index": lambda h: h[:, jnp.array([3, 5])],
    "update": lambda h: h.at[:, 0].set(0),
    "loop": lambda h: jax.lax.scan(lambda c, t: (c + t, None), jnp.zeros_like(h[:, 0]), h.swapaxes(0, 1))[0],
    "last element": lambda h: h[:, -1:],
    "element of a running number": lambda h: jax.lax.dynamic_slice_in_dim(h, (h.sum() > 0).astype("int32"), 1, 1),
}
"""Functions that need the length whole; with a batch of one, everything else would shard it."""


@pytest.mark.parametrize("name", WHOLE)
def test_a_dimension_that_a_program_needs_whole_is_left_whole_and_no_other(name):
    build, layout = layer(WHOLE[name], 1, 4096)
    found = gspmd.search(build, layout, {"x": 2, "y": 2}, chip=CHIP)
    assert found.lines["mine.hidden"] == "BLF_xy"
    wide, _ = layer(WHOLE[name], 64, 4096)  # whose batch is sharded then
    assert gspmd.search(wide, layout, {"x": 2, "y": 2}, chip=CHIP).lines["mine.hidden"] == "B_xyLF"
    with pytest.raises(
        gspmd.LayoutError, match=r"does not allow L to be sharded there|the program cannot use this spec"
    ):
        gspmd.search(wide, layout, {"x": 2, "y": 2}, chip=CHIP, fixed={"mine.hidden": "BL_xF"})
    free, _ = layer(lambda h: h, 1, 4096)
    assert "L_" in gspmd.search(free, layout, {"x": 2, "y": 2}, chip=CHIP).lines["mine.hidden"]


def test_operands_that_broadcast_are_sharded_alike_and_keep_their_batch():
    build, layout = layer(lambda h: h, 64, 4096, scale="FN")

    def scaled(layout, mesh):
        _, x, w = build(layout, mesh)

        def program(x, w, scale):
            at = layout.section("mine")
            return (at.einsum("stream, w -> hidden", x, w)[..., None] * scale[None, None]).sum(-1)

        return program, x, w, lies(layout, mesh, "mine.scale", 64, 16)

    found = gspmd.search(scaled, layout, {"x": 2, "y": 2}, chip=CHIP)
    assert found.complete
    assert found.lines["mine.hidden"] in ("B_xyLF", "BL_xyF")  # which cost the same
    assert found.lines["mine.scale"] == "FN"  # no mesh axis shards both the length and N
    fixed = gspmd.search(scaled, layout, {"x": 2, "y": 2}, chip=CHIP, fixed={"mine.hidden": "B_xLF_y"})
    assert fixed.lines["mine.scale"].startswith("F_y")


def test_a_group_in_a_section_of_one_s_own_called_encoder():
    """Four lines are the most that a step may depend on: without vias, the group would depend on five."""
    lines = {"stream": "BLE", "w_q": "EHD", "w_k": "EHD", "w_v": "EHD", "heads": "BLHD"}
    layout = Layout("own", axes=("x",), factor=("x",), table={f"encoder.{name}": text for name, text in lines.items()})

    def build(layout, mesh):
        at, weights = layout.section("encoder"), ("w_q", "w_k", "w_v")
        arguments = [lies(layout, mesh, f"encoder.{name}", 256, 8, 64) for name in weights]
        into = "stream, (w_q, w_k, w_v) -> (heads, heads, heads)"
        return lambda x, *w: at.einsum(into, x, w), lies(layout, mesh, "encoder.stream", 8, 64, 256), *arguments

    found = gspmd.search(build, layout, {"x": 2, "y": 2, "z": 2}, chip=CHIP)
    assert found.complete
    assert found.priced_seconds == pytest.approx(found.planned_seconds, rel=1e-6)
    assert found.layout["encoder.q_via"] == found.layout["encoder.v_via"]


@pytest.mark.parametrize("mesh", [{"x": 4, "y": 2}, pytest.param({"x": 2, "y": 2, "z": 4}, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sizes", [(64, 32, 256), (1, 32, 255)], ids=["all divide", "some do not divide"])
def test_every_price_of_a_sum_is_that_of_its_plan(mesh, sizes):
    layout = own(stream="BLE", pooled="BE")

    def build(layout, mesh):
        move = partial(layout.section("mine").move, "stream -> pooled")
        return jax.grad(lambda x: (move(x) ** 2).sum()), lies(layout, mesh, "mine.stream", *sizes)

    lines = Lines.of(layout, {})
    problem = MeshProblem(build, read(build, lines), lines, mesh, CHIP)
    sums = [use.what for use in problem.uses if isinstance(use.what, UnknownSteps)]
    assert {what.name for what in sums} == {"operand 0", "result 0", "cotangent 0", "gradient 0"}
    for what in sums:
        _, table = problem.prices.table(what)
        planned = [
            problem.prices._planned_steps(what, problem.prices.known(picks)) for picks in np.ndindex(*table.shape)
        ]
        seconds = [inf if steps is None else sum(step.seconds for step in steps) for steps in planned]
        np.testing.assert_allclose(table.ravel(), seconds, rtol=0, atol=1e-11)


def test_a_mean_over_positions_of_one_row_is_searched():
    """A batch of one row is not sharded, whatever the search has read of its lines."""
    layout = own(stream="BLE", pooled="BE")

    def build(layout, mesh):
        move = partial(layout.section("mine").move, "stream -> pooled")
        return lambda x: jnp.tanh(move(jnp.tanh(x))), lies(layout, mesh, "mine.stream", 1, 64, 513)

    found = gspmd.search(build, layout, {"x": 2}, chip=CHIP)
    assert found.complete
    assert found.lines["mine.pooled"] == "BE"


def test_keys_of_one_s_own_are_where_their_queries_are():
    layout = own(stream="BLE", w_q="EHD", w_k="EKD", w_v="EKD", query="BLHD", key="BLKD")

    def build(layout, mesh):
        at = layout.section("mine")
        shapes = {"w_q": (256, 8, 64), "w_k": (256, 2, 64), "w_v": (256, 2, 64)}
        arguments = [lies(layout, mesh, f"mine.{name}", *shape) for name, shape in shapes.items()]

        def program(x, *weights):
            q, k, v = at.einsum("stream, (w_q, w_k, w_v) -> (query, key, key)", x, weights)
            return attention(q, k, v, at.spec("query"), at.spec("key"))

        return program, lies(layout, mesh, "mine.stream", 8, 64, 256), *arguments

    lines = Lines.of(layout, {})
    read(build, lines)
    query, key = (lines.spec(f"mine.{name}", dims) for name, dims in (("query", "BLHD"), ("key", "BLKD")))
    assert query.axes_of("B") == key.axes_of("B") != ()
    assert (query.axes_of("D"), key.axes_of("D"), key.axes_of("L")) == ((), (), ())
    assert query.axes_of("L")
    found = gspmd.search(build, layout, {"x": 2, "y": 2}, chip=CHIP)
    assert found.complete
    assert found.priced_seconds == pytest.approx(found.planned_seconds, rel=1e-6)


@pytest.mark.slow
def test_a_weight_of_products_in_both_directions_has_no_via_and_is_priced_where_the_planner_lets_them_meet():
    layout = own(stream="BE", w="EF", hidden="BF", back="BE")

    def build(layout, mesh):
        at = layout.section("mine")
        arguments = lies(layout, mesh, "mine.stream", 64, 256), lies(layout, mesh, "mine.w", 256, 512)
        return lambda x, w: at.einsum("hidden, w -> back", at.einsum("stream, w -> hidden", x, w), w), *arguments

    found = gspmd.search(build, layout, {"x": 2, "y": 2}, chip=CHIP)
    assert found.complete
    assert "mine.w_via" not in found.lines
    assert found.priced_seconds == pytest.approx(found.planned_seconds, rel=1e-6)
    with pytest.raises(gspmd.LayoutError, match=r"cannot fix mine\.w_via: the layout has no such line"):
        gspmd.search(build, layout, {"x": 2, "y": 2}, chip=CHIP, fixed={"mine.w_via": "BE, EF_x"})


@pytest.mark.slow
def test_keys_and_their_weight_whose_names_want_one_via():
    layout = own(stream="BLE", w_k="EHD", query="BLHD", k="BTHD", scores="BHLT")

    def build(layout, mesh):
        at = layout.section("mine")
        shapes = {"stream": (8, 64, 256), "w_k": (256, 8, 64), "k": (8, 64, 8, 64)}
        arguments = (lies(layout, mesh, f"mine.{name}", *shape) for name, shape in shapes.items())
        return lambda x, w, k: at.einsum("query, k -> scores", at.einsum("stream, w_k -> query", x, w), k), *arguments

    found = gspmd.search(build, layout, {"x": 2, "y": 2}, chip=CHIP)
    assert found.complete
    assert "mine.k_via" not in found.lines
    query, keys, scores = (gspmd.Spec.parse(found.lines[f"mine.{name}"]) for name in ("query", "k", "scores"))
    for dim in "BH":  # they meet where they lie
        assert query.axes_of(dim) == keys.axes_of(dim) == scores.axes_of(dim)
    assert found.priced_seconds == pytest.approx(found.planned_seconds, rel=1e-6)


def test_a_via_of_one_s_own_is_fixed_by_the_name_that_an_answer_writes():
    build, layout = layer(lambda h: h, 8, 64)
    free = gspmd.search(build, layout, {"x": 4}, chip=CHIP)
    assert "mine.w_via" in free.lines
    found = gspmd.search(build, layout, {"x": 4}, chip=CHIP, fixed={"mine.w_via": "BLE, EF_x"})
    assert found.lines["mine.w_via"] == "BLE, EF_x"
    assert found.seconds >= free.seconds
    with pytest.raises(gspmd.LayoutError, match=r"Did you mean 'mine\.w_via'"):
        gspmd.search(build, layout, {"x": 4}, chip=CHIP, fixed={"mine.v_via": "BLE, EF_x"})


def test_a_cache_by_lines_of_one_s_own_lies_with_its_heads_on_the_devices():
    layout = own(query="BLHD", key="BLKD", cache="BKTD")

    def build(layout, mesh):
        shapes = {"query": (8, 1, 8, 64), "key": (8, 1, 8, 64), "cache": (8, 8, 256, 64)}
        query, key, cache = (lies(layout, mesh, f"mine.{name}", *shape) for name, shape in shapes.items())
        specs = [layout.spec(f"mine.{name}") for name in shapes]

        def attend(q, k, v, keys, values, lengths):
            return gspmd.ops.cached_attention(q, k, v, keys, values, *specs, lengths=lengths)

        return attend, query, key, key, cache, cache, jax.ShapeDtypeStruct((8,), "int32")

    found = gspmd.search(build, layout, {"x": 2, "y": 4}, chip=CHIP)
    # Nothing is sent where all lie alike; batch or heads, and each device reads an eighth of the cache.
    query, key, cache = (gspmd.Spec.parse(found.lines[f"mine.{name}"]) for name in ("query", "key", "cache"))
    assert cache.used == {"x", "y"}
    assert not {*cache.axes_of("T"), *cache.axes_of("D")}
    assert query.axes_of("H") == key.axes_of("K") == cache.axes_of("K")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"microbatches": 0}, "microbatches is 0.\n  Give a whole number of 1 or more."),
        ({"memory": -1.0}, "memory is -1.0.\n  Give the bytes"),
        ({"mesh": {"X": 2}}, "a mesh axis is called 'X'.\n  Use a lowercase letter"),
        ({"mesh": {"x": 0}}, "mesh axis x has size 0"),
        ({"build": lambda layout, mesh: 3}, "build returned 3.\n  Return a function and its abstract arguments"),
    ],
)
def test_a_wrong_argument_is_one_message(arguments, message):
    build, layout = layer(lambda h: h, 8, 64)
    asked = {"build": build, "layout": layout, "mesh": {"x": 4}} | arguments
    with pytest.raises(gspmd.PlanError) as caught:
        gspmd.search(**asked, chip=CHIP)
    assert message in str(caught.value)


def test_arguments_without_a_sharding_are_named():
    def build(layout, mesh):
        at = layout.section("mine")
        arguments = jax.ShapeDtypeStruct((64, 4096), "bfloat16"), jax.ShapeDtypeStruct((4096, 8192), "bfloat16")
        return lambda x, w: at.einsum("x, w_in -> y", x, w), *arguments

    with pytest.raises(gspmd.PlanError, match=r"without a sharding, bfloat16\[64,4096\]") as caught:
        gspmd.search(build, PRODUCT, {"x": 4}, chip=CHIP, fixed={"mine.x": "B_xE"})
    assert "gspmd.annotate(argument, " in str(caught.value)


def test_a_mesh_of_jax_is_read():
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    assert gspmd.search(one_product, PRODUCT, mesh, chip=CHIP).mesh == {"x": 2, "y": 2}
    assert gspmd.search(one_product, PRODUCT, ({"x": size} for size in (1, 2)), chip=CHIP).mesh == {"x": 2}


@pytest.mark.parametrize(("refused", "most"), [("a", 8), ("e", 6), ("cd", 9), ("ae", 11)])
def test_gradients_that_jax_cannot_keep_as_partial_sums_are_reduced_at_once(refused, most):
    """JAX has no rule for partial sums in `w[::-1]`, nor JAX 0.10 in `-w`, which state-space models have."""
    layout = own(x="BE", **dict.fromkeys("abcde", "EF"))
    weights, builds = [f"mine.{name}" for name in "abcde"], []

    def build(layout, mesh):
        builds.append(mesh)

        def loss(params, x):
            found = 0.0
            for key, w in params.items():
                if key[-1] in refused:
                    found += jnp.square(jnp.flip(w)).sum()
                else:
                    found += gspmd.einsum("BE, EF -> BF", x, w).sum()
            return found

        def gradients(params, x):
            held = {key: Spec.parse(layout.gradient(key)) for key in weights}
            params = {key: gspmd.reshard(w, f"{layout[key]} -> {held[key].cotangent}") for key, w in params.items()}
            found = jax.grad(loss)(params, x)
            return {key: gspmd.reshard(g, f"{held[key]} -> {layout[key]}") for key, g in found.items()}

        return gradients, {key: lies(layout, mesh, key, 64, 64) for key in weights}, lies(layout, mesh, "mine.x", 8, 64)

    lines = Lines.of(layout.check(), {})
    read(build, lines)
    assert "".join(key[-1] for key in weights if not lines.may_owe(key)) == refused
    assert len(builds) <= most  # A half whose answer is known is not traced: each trace of a large model takes seconds.


def test_sizes_that_do_not_agree_are_the_error_of_the_program_itself():
    def build(layout, mesh):
        at = layout.section("mine")
        arguments = lies(layout, mesh, "mine.x", 64, 4096), lies(layout, mesh, "mine.w_in", 2048, 8192)
        return lambda x, w: at.einsum("x, w_in -> y", x, w), *arguments

    with pytest.raises(gspmd.SpecError, match=r"^cannot apply 'BE, EF -> BF' to arrays of shapes .*"):
        gspmd.search(build, PRODUCT, {"x": 4}, chip="tpu-v5e")
