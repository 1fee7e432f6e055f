"""A layout that a training step cannot take is refused by `check`, with its line: microbatches, vias, rows."""

from itertools import product

import jax
import pytest

import gspmd
from gspmd import ops
from gspmd.annotate import LayoutError, PlanError, Spec
from gspmd.layouts import Layout, presets
from tests.layouts.test_check import MESH, SIZES, fault

PIPELINE = {"p": 2, "x": 3, "y": 1, "z": 1}


# -- microbatches ------------------------------------------------------------------------------------------------------


def test_a_microbatch_has_to_divide():
    layout = Layout.load("pipeline")
    layout.check({"B": 12}, PIPELINE).check({"B": 12, "M": 1}, PIPELINE).check({"B": 12, "M": 4}, PIPELINE)
    assert fault(layout, {"B": 12, "M": 3}, PIPELINE) == (
        "    embedding.tokens = B_xL\n"
        "                       ^^^\n"
        "  dimension B has size 4, which mesh axis x (size 3) does not divide.\n"
        "  Use a size that is a multiple of 3 (3 or 6), or leave B unsharded: 'BL'. "
        "That is the size of a microbatch, of which there are M=3.\n"
        "  The same in 11 more: attention.residual, attention.query, attention.key and 8 others."
    )


@pytest.mark.parametrize("count", [0, 5, 24])
def test_a_batch_is_cut_into_whole_microbatches(count):
    with pytest.raises(LayoutError) as error:
        Layout.load("zero-1").check({"B": 12, "M": count}, {"x": 1})
    assert f"    B=12, M={count}\n" in str(error.value)
    assert f"a batch of 12 cannot be cut into {count} microbatches." in str(error.value)


@pytest.mark.parametrize("groups", [{}, {"G": 16}])
def test_sequences_of_a_microbatch_are_its_groups(groups):
    layout, mesh = Layout.load("gshard"), {"x": 8}
    layout.check({"B": 16, "M": 2, "X": 8, **groups}, mesh)
    said = fault(layout, {"B": 16, "M": 4, "X": 8, **groups}, {"x": 4, "y": 2})
    assert "dimension B has size 4, which mesh axes" in said


def test_alternatives_are_those_of_a_microbatch():
    layout = Layout.load("replicated").override({"ffn.hidden": ("B_xyLF", "B_xLF_y")})
    sizes, mesh = {"B": 8, "F": 8}, {"x": 2, "y": 4}
    assert [layout.resolved({**sizes, "M": count}, mesh)["ffn.hidden"] for count in (1, 2)] == ["B_xyLF", "B_xLF_y"]


def test_m_may_be_a_dimension_of_ones_own():
    layout = Layout.load("replicated")
    own = layout.override({})
    object.__setattr__(own, "dimensions", {"M": "memories"})
    own.check({"B": 12, "M": 5})


# -- gradients that stay partial sums ----------------------------------------------------------------------------------


def test_the_message_of_a_via_that_takes_an_axis_away():
    layout = Layout.load("zero-2").override({"ffn.in_via": "BLE_y, E_yF"})
    assert fault(layout) == (
        "    ffn.in_via = BLE_y, E_yF\n"
        "                 ^^^^^^^^^^^\n"
        "  the gradient of ffn.w_in stays a partial sum over x, y and z ([gradients] says so), but the product "
        "leaves partial sums only over mesh axes that shard B or L, the dimensions that it sums.\n"
        "  Shard one of them over x, y and z here, or write in [gradients]: ffn.w_in = 'EF', ffn.w_gate = 'EF'."
    )
    layout.override({"gradients.ffn.w_in": "EF", "gradients.ffn.w_gate": "EF"}).check(SIZES, MESH)
    layout.check(SIZES, {"x": 1})  # nothing is summed over an axis of one device


@pytest.mark.parametrize(
    ("key", "via", "weight"),
    [
        ("attention.in_via", "B_xyLE, EH_zD", "attention.w_q"),
        ("attention.out_via", "B_xyLHD, HDE", "attention.w_o"),
        ("ffn.out_via", "B_xyLF_z, F_zE", "ffn.w_out"),
        ("output.in_via", "B_xyLE, V_zE", "embedding.table"),
    ],
)
def test_every_via_is_named(key, via, weight):
    said = fault(Layout.load("zero-2").override({key: via}))
    assert said.startswith(f"    {key} = {via}\n")
    assert f"the gradient of {weight} stays a partial sum over z" in said


def test_microbatches_leave_gradients_partial_without_a_word_in_gradients():
    layout = Layout.load("data-parallel").override({"ffn.in_via": "BLE, EF_x", "ffn.out_via": "B_xLF, FE"})
    layout.check(SIZES, {"x": 2})
    said = fault(layout, {**SIZES, "M": 2}, {"x": 2})
    assert "stays a partial sum over x (all microbatches add to it)" in said
    layout.override({f"gradients.ffn.{key}": "EF" for key in ("w_in", "w_gate")}).check({**SIZES, "M": 2}, {"x": 2})


def test_keys_and_values_meet_the_residual_where_queries_do():
    layout = Layout.load("zero-2").override({"attention.in_via": "B_xyLE, EH_zD", "gradients.attention.w_q": "EHD"})
    said = fault(layout)
    assert "the gradient of attention.w_k stays a partial sum over z" in said
    assert "write in [gradients]: attention.w_k = 'EKD', attention.w_v = 'EKD'." in said
    said = fault(layout.override({"attention.key_via": "B_xyLE, EKD"}))
    assert said.startswith("    attention.key_via = B_xyLE, EKD\n")


def test_one_of_two_tables_may_be_the_one_that_meets_the_via():
    layout = Layout.load("zero-2").override({"output.in_via": "B_xyLE, V_zE"})
    assert "embedding.table = 'VE', output.table = 'VE'." in fault(layout)
    for table in ("embedding.table", "output.table"):
        layout.override({f"gradients.{table}": "VE"}).check(SIZES, MESH)


def test_stages_settle_gradients_themselves():
    vias = {"ffn.in_via": "BLE, EF_x", "ffn.out_via": "B_xLF, FE"}
    sizes, mesh = {"B": 12, "M": 2}, {"p": 2, "x": 2}
    Layout.load("pipeline").override(vias).check(sizes, mesh)
    assert "stays a partial sum over x" in fault(Layout.load("data-parallel").override(vias), sizes, {"x": 2})


def _vias():
    """Every via of B, L, E and E, F in which each of x and y shards one dimension, or none."""
    for places in product(["B", "L", "E", "F", ""], repeat=2):
        axes = {dim: tuple(axis for axis, at in zip("xy", places) if at == dim) for dim in "BLEF"}
        yield ", ".join(str(Spec(tuple(dims), tuple(axes[dim] for dim in dims))) for dims in ("BLE", "EF"))


@pytest.mark.parametrize("via", [*_vias()])
def test_what_is_refused_is_what_cannot_be_planned(via):
    mesh, sizes = {"x": 2, "y": 2}, dict.fromkeys("BLEF", 8)
    try:
        assert gspmd.plan("B_xyLE, EF reduced-xy -> B_xyLF", sizes=sizes, mesh=mesh, via=via).gradients
        planned = True
    except PlanError:
        planned = False
    layout = Layout.load("replicated").override(
        {"ffn.residual": "B_xyLE", "ffn.hidden": "B_xyLF", "attention.residual": "B_xyLE", "ffn.in_via": via}
        | {f"gradients.ffn.{key}": "EF partialsum-xy" for key in ("w_in", "w_gate")}
    )
    try:
        layout.check(sizes, mesh)
        taken = True
    except LayoutError:
        taken = False
    assert taken == planned


def test_a_bias_has_a_partial_gradient_over_its_rows_alone():
    """Before, this was an error of the trace: the source is not a partial sum over mesh axis y."""
    layout = Layout.load("megatron-sequence").override({"gradients.attention.b_q": "HD_x partialsum-y"})
    layout.check(SIZES, {"x": 4, "y": 2})  # of a model that may have no biases
    with pytest.raises(LayoutError) as error:
        layout.check(SIZES, {"x": 4, "y": 2}, trained=["attention.b_q"])
    assert str(error.value).endswith(
        "    [gradients] attention.b_q = HD_x partialsum-y\n"
        "                                ^^^^^^^^^^^^^^^^^\n"
        "  the gradient of attention.b_q is not a partial sum over y: it is summed over B and L of attention.query ="
        f" {layout['attention.query']}.\n  Write 'HD_x'."
    )


def passes(refusal, call, *args, **options):
    """Return whether a call is not refused."""
    try:
        call(*args, **options)
    except refusal:
        return False
    return True


@pytest.mark.parametrize("places", [*product(["B", "L", "F", ""], repeat=2)])
def test_what_is_refused_of_a_bias_is_what_cannot_be_planned(places, make_mesh):
    axes = {dim: tuple(axis for axis, at in zip("xy", places) if at == dim) for dim in "BLF"}
    hidden = Spec(tuple("BLF"), tuple(axes[dim] for dim in "BLF"))
    base = Layout.load("replicated").override({"ffn.hidden": hidden})
    for owed, bias in product(["x", "y", "xy"], ["F", "F_x", "F_y"]):
        if set(owed) & set(Spec.parse(bias).used):
            continue
        layout, at = base.override({"gradients.ffn.b_in": f"{bias} partialsum-{owed}"}), f"{bias} reduced-{owed}"
        with jax.set_mesh(make_mesh({"x": 2, "y": 2})):
            x, b = (
                gspmd.annotate(jax.ShapeDtypeStruct(shape, "float32"), spec)
                for shape, spec in (((8, 8, 8), hidden), ((8,), at))
            )
            gradient = lambda x, b, at=at: jax.vjp(lambda b: ops.add_bias(x, b, hidden, at), b)[1](x)  # noqa: E731
            planned = passes(PlanError, gspmd.trace, gradient, x, b)
        taken = passes(LayoutError, layout.check, dict.fromkeys("BLEF", 8), {"x": 2, "y": 2}, trained=["ffn.b_in"])
        assert taken == planned, f"{hidden}, {bias} partialsum-{owed}"


@pytest.mark.parametrize("tokens", ["BL", "B_xL", "BL_y", "B_xyL"])
def test_what_is_refused_of_a_table_is_what_cannot_be_looked_up(tokens, make_mesh):
    for stream, (owed, table) in product(
        ["BLE", "B_yLE_x", "BL_xE"], [("y", "VE"), ("x", "VE"), ("y", "V_xE"), ("xy", "VE")]
    ):
        at = f"{table} reduced-{owed}"
        shapes = (((8, 8), "int32", tokens), ((8, 8), "float32", at), ((8, 8, 8), "float32", stream))
        with jax.set_mesh(make_mesh({"x": 2, "y": 2})):
            arrays = [gspmd.annotate(jax.ShapeDtypeStruct(shape, dtype), spec) for shape, dtype, spec in shapes]

            def gradient(ids, table, g, equation=f"{tokens}, {at} -> {stream}"):
                return jax.vjp(lambda table: ops.embed(ids, table, equation), table)[1](g)

            planned = passes(PlanError, gspmd.trace, gradient, *arrays)
        lines = {"embedding.tokens": tokens, "attention.residual": stream, "ffn.residual": stream}
        layout = Layout.load("replicated").override(
            {**lines, "gradients.embedding.table": f"{table} partialsum-{owed}"}
        )
        sizes, trained = dict.fromkeys("BLEV", 8), ["embedding.table"]
        taken = passes(LayoutError, layout.check, sizes, {"x": 2, "y": 2}, trained=trained)
        assert taken == planned, f"{tokens}, {at} -> {stream}"


def test_serving_has_no_gradients():
    layout = Layout.load("zero-2").override({"ffn.in_via": "BLE_y, E_yF"})
    assert "gradient of ffn.w_in" in fault(layout)
    layout.phase("decode").check(SIZES, MESH)


# -- rows of dropless --------------------------------------------------------------------------------------------------


def moves(mesh=None, **lines):
    layout = Layout.load("gshard").override({f"moe.{key}": text for key, text in lines.items()})
    layout.check(SIZES, mesh or {"x": 2, "y": 2})
    with pytest.raises(LayoutError) as error:
        layout.check(SIZES, mesh or {"x": 2, "y": 2}, dropless=True)
    return error.value.faults


@pytest.mark.parametrize(
    ("lines", "dims", "remedy"),
    [
        ({"hidden": "G_yX_xCF"}, "G and X", "GX_xyzCF"),
        ({"hidden": "GX_xC_yF"}, "X and C", "GX_xyzCF"),
        ({"hidden": "GXCF_x"}, "X", "GX_xyzCF"),
        ({"in_via": "GXCE, XEF_xy"}, "X", "GX_xyzCE, X_xyzEF"),
        ({"out_via": "G_xXCF_y, XF_yE"}, "G and X", "GX_xyzCF, X_xyzFE"),
    ],
)
def test_rows_stay_where_they_arrive(lines, dims, remedy):
    [found] = moves(**lines)
    [(key, text)] = lines.items()
    assert found.text == f"moe.{key} = {text}"
    assert found.fact == f"rows of dispatch 'dropless' must stay where they arrive, but {dims} would move."
    assert found.remedy.startswith(f"Write '{remedy}', as in moe.expert_input")


def test_rows_arrive_whole():
    [found, *_] = moves(expert_input="GX_xyC_zE", mesh={"x": 2, "z": 2})
    assert found.text == "moe.expert_input = GX_xyC_zE"


@pytest.mark.parametrize("name", presets())
def test_no_preset_moves_rows_or_loses_a_gradient(name):
    layout = Layout.load(name)
    mesh = layout.mesh_for(8, sizes := {**SIZES, "B": 32, "N": 8, "M": 2})
    layout.check(sizes, mesh)
