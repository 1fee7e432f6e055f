"""`Layout.check` reports every fault of the table: its key, the notation, a caret, the fact and the remedy."""

import re
from dataclasses import replace

import pytest

from gspmd.annotate import LayoutError
from gspmd.layouts import Layout

SIZES = {"B": 8, "L": 32, "E": 64, "F": 128, "H": 8, "K": 8, "D": 8, "V": 256, "X": 8}
MESH = {"x": 2, "y": 2, "z": 2}


def fault(layout, sizes=SIZES, mesh=MESH) -> str:
    """The text of the one fault that a layout has, or that is found when it is made."""
    with pytest.raises(LayoutError) as error:
        (layout if isinstance(layout, Layout) else layout()).check(sizes, mesh)
    assert len(error.value.faults) == 1, str(error.value)
    return str(error.value.faults[0])


def overridden(**specs):
    return Layout.load("megatron-1d").override({key.replace("__", "."): spec for key, spec in specs.items()})


def test_the_message_in_full():
    with pytest.raises(LayoutError) as error:
        overridden(ffn__w_in="E_xF_y", ffn__w_gate="EH").check({**SIZES, "E": 65}, MESH)
    assert str(error.value) == (
        "cannot use layout 'megatron-1d' for the sizes B=8, L=32, E=65, F=128, H=8, K=8, D=8, V=256, X=8 on the mesh "
        "x=2,y=2,z=2: 2 faults\n"
        "    ffn.w_in = E_xF_y\n"
        "               ^^^\n"
        "  dimension E has size 65, which mesh axis x (size 2) does not divide.\n"
        "  Use a size that is a multiple of 2 (64 or 66), or leave E unsharded: 'EF_y'.\n"
        "    ffn.w_gate = EH\n"
        "                 ^^\n"
        "  ffn.w_gate must have dimensions E and F, but this has E and H.\n"
        "  Write 'EF' with the mesh axes that shard each dimension."
    )


@pytest.mark.parametrize(("section", "value"), [("lowering", '"xla"'), ("ffn", '"EF"'), ("padding", "3")])
def test_a_section_with_a_value(section, value, tmp_path):
    file = tmp_path / "flat.toml"
    file.write_text(f'base = "megatron-1d"\n{section} = {value}\n')
    wanted = f"{section!r} is the name of a section, but here it has a value.\n  Write [{section}], and lines below it."
    assert wanted in fault(lambda: Layout.load(str(file)))


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"ffn__w_inn": "EF"}, "no layout has a key 'ffn.w_inn'.\n  Did you mean 'ffn.w_in'?"),
        (
            {"moe__scale_in": "XF"},
            "no layout has a key 'moe.scale_in'.\n  Write 'moe.b_in', its name after release 0.2.0.",
        ),
        ({"fnn__w_in": "EF"}, "no section of a layout is called 'fnn'.\n  Did you mean 'ffn'?"),
        ({"ffn__w_in": "FE"}, "ffn.w_in must have dimensions E and F, in this order, but here the order is F and E."),
        ({"ffn__w_in": "E_xF_w"}, "^^^\n  the mesh has no axis w."),
        ({"ffn__hidden": "B_xLF_x"}, "ffn.hidden = B_xLF_x\n                       ^"),
        ({"ffn__hidden": "B_xLF partialsum-y"}, "ffn.hidden is a partial sum, which only [gradients] may have."),
        ({"ffn__w_out": "F_{y"}, "the brace after 'F_' is not closed."),
        (
            {"ffn__residual": "B_xL_yzE"},
            "dimension L of ffn.residual is sharded over y and z, and that of attention.residual ('B_xLE') is "
            "not sharded; no equation moves one to the other.\n  "
            "Write ffn.residual = 'B_xLE', or change attention.residual.",
        ),
        (
            {"attention__query": "B_xLH_yzD", "attention__key": "B_xL_yKD"},
            "dimension L of attention.key is sharded over y, and that of queries ('B_xLH_yzD') is not sharded.",
        ),
        ({"attention__key": "BLK_yzD"}, "dimension B of attention.key is not sharded, and that of attention.query"),
        (
            {"attention__key": "B_xLK_zD"},
            "key/value heads are sharded over z, and query heads ('B_xLH_yzD') are sharded over",
        ),
        ({"moe__groups": "GLE"}, "dimension G of moe.dispatched is sharded over x, and that of moe.groups"),
        ({"moe__groups": "G_xL_yE"}, "dimension L of moe.groups must not be sharded, but it is sharded over y."),
        ({"ffn__in_via": "B_xLE, E_yF_z"}, "dimension E is not sharded in 'B_xLE', and sharded over y in 'E_yF_z'."),
        ({"ffn__in_via": "B_xLE, EF_x"}, "mesh axis x shards dimension B in 'B_xLE' and dimension F in 'EF_x'."),
        ({"ffn__in_via": "B_xLE"}, "ffn.in_via must be two specs, with the dimensions of ffn.residual and ffn.w_in."),
        ({"ffn__in_via": "B_xLE -> EF"}, "via= has only the operands' specs, without an arrow."),
        (
            {"attention__key_via": "BLE, EK_yzD"},
            "attention.key_via brings the residual to 'BLE', and attention.in_via brings it to 'B_xLE'.",
        ),
        ({"optimizer__ffn__w_in": "E_qF"}, "[optimizer] ffn.w_in = E_qF"),
        ({"optimizer__ffn__hidden": "BLF"}, "ffn.hidden is an activation, which this section cannot override."),
        (
            {"cache__attention__key": "BLKD"},
            "attention.key must have dimensions B, T, K and D, but this has B, L, K and D.",
        ),
        (
            {"attention__w_o": "H_yzDE_?"},
            "attention.w_o = H_yzDE_?\n                         ^^^\n"
            "  dimension E of attention.w_o is left to the compiler, "
            "which places activations only.\n  Name its mesh axes, or leave it unsharded: 'H_yzDE'.",
        ),
        (
            {"optimizer__ffn__w_in": "E_?F"},
            "[optimizer] ffn.w_in = E_?F\n                           ^^^\n  dimension E",
        ),
        ({"decode__ffn__residual": "BLE"}, "[decode] ffn.residual = BLE\n                            ^\n  dimension B"),
        ({"lowering__ffn": "blokcing"}, "no lowering is called 'blokcing'.\n  Did you mean 'blocking'?"),
        (
            {"lowering__ffn": "loop"},
            "no lowering is called 'loop'.\n  Did you mean 'looped'? Lowerings: auto, xla, blocking, looped, looped:",
        ),
        ({"lowering__ffn": "looped:pared"}, "no lowering is called 'looped:pared'.\n  Did you mean 'looped:paired'?"),
        ({"lowering__fnn": "xla"}, "no part of a layout is called 'fnn'."),
    ],
)
def test_one_fault(specs, message):
    assert message in fault(lambda: overridden(**specs))


def test_the_mesh_is_held_to_the_declared_axes():
    assert "the layout has no mesh axis w." in fault(overridden(), mesh={"x": 2, "w": 4})
    overridden().check(SIZES, {"x": 2})
    overridden().check()


def test_groups_are_as_many_as_sequences_unless_given():
    layout = Layout.load("gshard")
    layout.check({"B": 8, "X": 8}, {"x": 8})
    with pytest.raises(LayoutError, match="dimension G has size 4"):
        layout.check({"B": 8, "X": 8, "G": 4}, {"x": 8})


def test_missing_and_mistyped_lines(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[mesh]\naxes = ["x"]\nfactor = ["w"]\n[ffn]\nw_in = 3\nw_out = "FE"\nnorm = "E"\n')
    with pytest.raises(LayoutError) as error:
        Layout.load(path).check()
    text = str(error.value)
    assert "the layout declares no mesh axis w." in text
    assert 'ffn.w_in must be a string, but it is 3.\n  Write a spec in quotes: "EF", with its mesh axes.' in text
    assert "ffn.residual is missing: The residual stream around the feed-forward block." in text
    assert 'Write residual = "BLE" in [ffn], with its mesh axes.' in text
    assert "moe.router" not in text


def test_where_all_layers_have_experts_dense_ones_need_no_lines():
    table = {key: text for key, text in Layout.load("gshard").table.items() if not DENSE.match(key)}
    layout = replace(Layout.load("gshard"), table=table)
    layout.check({"B": 8, "X": 8, "F": 64}, {"x": 8})
    layout.check()
    with pytest.raises(LayoutError, match=r'ffn\.w_in is missing(.|\n)*Write w_in = "EF" in \[ffn\]'):
        layout.check({"B": 8, "F": 64}, {"x": 8})
    with pytest.raises(LayoutError, match=r'does not write ffn\.w_in(.|\n)*Write w_in = "EF" in \[ffn\]'):
        layout.spec("ffn.w_in")
    with pytest.raises(LayoutError, match=r"ffn\.hidden is missing"):
        replace(layout, table=table | {"ffn.w_in": "EF"}).check({"B": 8, "X": 8}, {"x": 8})


DENSE = re.compile(r"ffn\.(w_|hidden|.*via)")


def test_every_fault_at_once():
    layout = overridden(
        ffn__w_inn="EF", ffn__w_in="E", ffn__hidden="B_xLF_w", ffn__w_out="F", optimizer__ffn__w_in="E_w"
    )
    with pytest.raises(LayoutError) as error:
        layout.check({**SIZES, "H": 6}, {**MESH, "data": 2})
    text = str(error.value)
    for key in (
        "ffn.w_inn =",
        "ffn.w_in = E",
        "ffn.hidden =",
        "ffn.w_out =",
        "[optimizer] ffn.w_in",
        "attention.w_q =",
        "data=2",
    ):
        assert key in text


def test_one_fault_for_one_cause_and_the_rest_counted():
    with pytest.raises(LayoutError) as error:
        Layout.load("gshard").check({**SIZES, "B": 9, "G": 9}, {"x": 8})
    assert str(error.value).splitlines()[1:] == [
        "    embedding.tokens = B_xyzL",
        "                       ^^^^^",
        "  dimension B has size 9, which mesh axes x, y and z (size 8·1·1 = 8) do not divide.",
        "  Use a size that is a multiple of 8 (8 or 16), or leave B unsharded: 'BL'.",
        "  The same in 13 more: attention.residual, attention.query, attention.key and 10 others.",
    ]


def test_groups_of_another_number_are_another_cause():
    with pytest.raises(LayoutError) as error:
        Layout.load("gshard").check({**SIZES, "B": 9, "G": 18}, {"x": 8})
    assert [fault.fact.partition(",")[0] for fault in error.value.faults] == [
        "dimension B has size 9", "dimension G has size 18",
    ]  # fmt: skip


def test_an_axis_that_nothing_declares_is_one_fault(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "megatron-1d"\n[mesh]\naxes = ["x", "y"]\nfactor = ["x"]\n')
    assert "the mesh has no axis z." in fault(Layout.load(path), mesh={"x": 2, "y": 2})


def test_what_is_missing_is_one_fault_for_each_part(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[mesh]\naxes = ["x"]\nfactor = ["x"]\n')
    with pytest.raises(LayoutError) as error:
        Layout.load(path).check()
    assert len(error.value.faults) == 4
    assert "The same in 1 more: output.logits." in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([8], "cannot read sizes from [8].\n  Pass a mapping"),
        (3, "cannot read sizes from 3."),
        ({3: 8}, "cannot read sizes from {3: 8}."),
        ({"B": "8"}, "dimension B has size '8'.\n  A size is a whole number of at least 0."),
        ({"B": 2.5}, "dimension B has size 2.5."),
        ({"B": True}, "dimension B has size True."),
        ({"B": -8}, "dimension B has size -8."),
    ],
)
def test_sizes_that_are_none(sizes, message):
    with pytest.raises(LayoutError) as error:
        overridden().check(sizes)
    assert message in str(error.value)


@pytest.mark.parametrize("mesh", [3, "x=4", [4, 2], {"x": "4"}, {"x": 0}])
def test_a_mesh_that_is_none(mesh):
    with pytest.raises(ValueError, match=r"cannot read a mesh from|mesh axis x has size"):
        overridden().check(SIZES, mesh)


def test_the_layout_of_a_phase_is_held_to_its_own_sizes():
    """The other phase reads other rows and lengths, but its lines have to be right."""
    layout = Layout.load("megatron-1d").override({"prefill.attention.query": "B_xL_zH_yD"})
    mesh, sizes = {"x": 2, "y": 2, "z": 2}, {"B": 2, "L": 1, "H": 4}
    layout.phase("decode").check(sizes, mesh)
    with pytest.raises(LayoutError, match="dimension L has size 1, which mesh axis z"):
        layout.phase("prefill").check(sizes, mesh)
    with pytest.raises(LayoutError, match=r"\[prefill\] attention.query = BHLD"):
        layout.override({"prefill.attention.query": "BHLD"}).phase("decode").check(sizes, mesh)


def test_query_heads_that_part_groups_are_refused():
    """Heads 2 and 3 are of one group, since a key head serves 2, and lie on two devices, since each has 3."""
    layout = Layout.load("replicated").override({"attention.query": "BLH_xD"})
    with pytest.raises(LayoutError) as error:
        layout.check({"H": 6, "K": 3}, {"x": 2})
    assert str(error.value).partition("\n")[2] == (
        "    attention.query = BLH_xD\n"
        "                        ^^^\n"
        "  a device has 3 of 6 query heads, and 2 share each of the 3 key heads ('BLKD' in attention.key): some device "
        "would need parts of two groups.\n"
        "  Shard H over mesh axes whose size divides 3, or is a multiple of it, or do not shard H."
    )
    layout.check({"H": 6, "K": 6}, {"x": 2})
    layout.check({"H": 6, "K": 1}, {"x": 2})
    layout.check({"H": 6, "K": 3}, {"x": 3})
    layout.override({"attention.query": "BLH_xyD"}).check({"H": 6, "K": 3}, {"x": 3, "y": 2})
    layout.phase("decode").check({"H": 6, "K": 3}, {"x": 2})  # queries are moved to the cache


@pytest.mark.parametrize(
    ("lines", "fact"),
    [
        ({"cross.key": "B_xT_yK_zD"}, "dimension T of cross.key is sharded over y, and that of queries ('B_xLH_yzD') "),
        (
            {"cross.key": "B_xyTK_zD"},
            "dimension B of cross.key is sharded over x and y, and that of cross.query ",
        ),
        (
            {"cross.key": "B_xTK_zD"},
            "key/value heads are sharded over z, and query heads ('B_xLH_yzD') are sharded over y and z.",
        ),
        ({"encoder.cross.key": "B_xTKD"}, "cross.key is an activation, which this section cannot override."),
        ({"encoder.embedding.table": "VE"}, "embedding.table is a parameter, which this section cannot override."),
    ],
)
def test_one_written_line_of_two_stacks_is_held_against_the_defaults_of_others(lines, fact):
    with pytest.raises(LayoutError) as error:
        Layout.load("megatron-1d").override(lines).check()
    assert fact in str(error.value)


def test_the_length_of_a_source_is_cut_as_attention_without_order_allows():
    layout, sizes = Layout.load("context-parallel"), {"B": 8, "L": 20}
    mesh = {"x": 2, "y": 4, "z": 1}
    layout.stack("encoder").check(sizes, mesh)
    with pytest.raises(LayoutError, match="zigzag order cuts it into 8 chunks"):
        layout.check(sizes, mesh)
