"""Loading, overriding, asking, and the meshes of a layout."""

import copy
import dataclasses
import pickle

import pytest

from gspmd.annotate import LayoutError
from gspmd.layouts import Layout
from gspmd.layouts.mesh import factorise
from gspmd.layouts.rules.keys import keys_of_override


def test_a_file_may_stand_on_a_preset(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "megatron-1d"\n[ffn]\nw_in = "E_xF_yz"\n[optimizer]\n"ffn.w_in" = "E_xF_yz"\nffn.w_out = "F_yzE_x"\n'
        '[lowering]\nffn = "xla"\n[mesh]\nfactor = ["x"]\n'
    )
    layout = Layout.load(path)
    assert (layout.name, layout["ffn.w_in"], layout["ffn.w_out"]) == (str(path), "E_xF_yz", "F_yzE")
    assert (layout.optimizer("ffn.w_in"), layout.optimizer("ffn.w_out")) == ("E_xF_yz", "F_yzE_x")
    assert (layout.lowering, layout.lowering_of("ffn"), layout.section("ffn").lowering) == (None, "xla", "xla")
    assert layout.mesh_for(4) == {"x": 4, "y": 1, "z": 1}
    layout.check({"B": 8, "E": 64, "F": 128}, {"x": 2, "y": 2})


def test_what_holds_in_both_phases_is_said_once(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "megatron-1d"\n[decode]\nffn.hidden = "B_xLF_y"\n'
        '[serving]\nffn.hidden = "B_xLF_yz"\nffn.residual = "B_xL_yE"\n'
    )
    layout = Layout.load(path)
    prefill, decode = layout.phase("prefill"), layout.phase("decode")
    assert (prefill["ffn.hidden"], decode["ffn.hidden"]) == ("B_xLF_yz", "B_xLF_y")
    assert (prefill["ffn.residual"], decode["ffn.residual"], layout["ffn.residual"]) == ("B_xL_yE",) * 2 + ("B_xLE",)
    assert (
        prefill.overrides["prefill"]["attention.key"] == Layout.load("megatron-1d").overrides["decode"]["attention.key"]
    )
    above = tmp_path / "above.toml"
    above.write_text('base = "./mine.toml"\n[serving]\nffn.hidden = "BLF"\n')
    for changed in (Layout.load(above), layout.override({"serving.ffn.hidden": "BLF"})):
        assert changed.phase("prefill")["ffn.hidden"] == changed.phase("decode")["ffn.hidden"] == "BLF"
    with pytest.raises(LayoutError, match=r"\[prefill\] ffn.hiden = BLF"):
        layout.override({"serving.ffn.hiden": "BLF"}).check()
    for order in (1, -1):  # as in a file, whatever comes first
        both = layout.override(dict([("serving.ffn.hidden", "BLF_x"), ("decode.ffn.hidden", "BLF")][::order]))
        assert [both.phase(name)["ffn.hidden"] for name in ("prefill", "decode")] == ["BLF_x", "BLF"]


def test_a_layout_of_ones_own_axes(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(_plain().replace('"BLE"', '"B_{data}LE"'))
    layout = Layout.load(str(path)).check({"B": 8}, {"data": 4})
    assert layout["ffn.residual"] == "B_{data}LE"
    assert layout.complete_mesh({"data": 2}) == {"data": 2, "model": 1}


def _plain() -> str:
    table = {
        "embedding": {"table": "VE", "tokens": "BL"},
        "attention": {
            "residual": "BLE",
            "norm": "E",
            "w_q": "EHD",
            "w_k": "EKD",
            "query": "BLHD",
            "key": "BLKD",
            "w_o": "HDE",
        },
        "ffn": {"residual": "BLE", "norm": "E", "w_in": "EF", "hidden": "BLF", "w_out": "FE"},
        "output": {"norm": "E", "logits": "BLV"},
    }
    sections = [f"[{name}]\n" + "\n".join(f'{k} = "{v}"' for k, v in keys.items()) for name, keys in table.items()]
    return '[mesh]\naxes = ["data", "model"]\nfactor = ["data"]\n' + "\n".join(sections)


def test_what_is_left_out_is_stood_in_for(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(_plain())
    layout = Layout.load(path)
    assert (layout["ffn.w_gate"], layout["attention.w_v"], layout["output.table"]) == ("EF", "EKD", "VE")
    assert layout.get("ffn.in_via") is None
    assert layout.section("ffn").in_via is None
    layout.check({"B": 8})
    with pytest.raises(LayoutError, match=r"moe\.router is missing"):
        layout.check({"B": 8, "X": 4})


def test_override_is_a_new_layout():
    layout = Layout.load("zero-3")
    other = layout.override(
        {"ffn.w_in": "EF", "gradients.ffn.w_in": "E_xF", "decode.ffn.hidden": "BLF", "lowering.default": "xla"}
    )
    assert (layout["ffn.w_in"], other["ffn.w_in"]) == ("E_xyzF", "EF")
    assert (other.gradient("ffn.w_in"), other.optimizer("ffn.w_in"), other.lowering) == ("E_xF", "EF", "xla")
    assert (other["ffn.hidden"], other.phase("decode")["ffn.hidden"]) == ("B_xyzLF", "BLF")
    assert layout == Layout.load("zero-3")
    assert hash(layout) == hash(Layout.load("zero-3"))
    assert layout != other


def test_a_layout_and_its_parts_are_asked_by_attribute():
    layout = Layout.load("megatron-1d")
    assert layout.ffn == layout.section("ffn")
    assert layout.moe.w_gate == "XEF_yz"
    assert "ffn" in dir(layout)
    for copied in (copy.copy(layout), copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert (copied, copied.ffn.w_in) == (layout, "EF_yz")
    with pytest.raises(AttributeError, match=r"no part of a layout is called 'fnn'\.\n  Did you mean 'ffn'\?"):
        _ = layout.fnn
    assert not hasattr(layout, "__array__")


def test_a_layout_is_short_by_itself_and_a_table_when_printed():
    layout = Layout.load("megatron-1d").override({"decode.ffn.hidden": "BLF"})
    layout = dataclasses.replace(layout, table={**layout.table, "ffn.w_in": "<EF>"})  # escaped in HTML
    assert repr(layout) == "<Layout 'megatron-1d': 34 specs over x, y and z, 9 overridden>"
    lines = str(layout).splitlines()
    assert lines[0] == "megatron-1d"
    assert max(map(len, lines)) < 80
    assert [line for line in lines if line.startswith("[")] == [
        "[mesh]", "[embedding]", "[attention]", "[ffn]", "[moe]", "[output]", "[prefill]", "[decode]",
    ]  # fmt: skip
    assert "  hidden           B_xLF_yz" in lines
    assert "<td>w_in</td><td>&lt;EF&gt;</td>" in layout._repr_html_()


def test_sections_copy_and_pickle():
    section = Layout.load("megatron-1d").section("ffn")
    assert copy.deepcopy(section).w_in == pickle.loads(pickle.dumps(section)).w_in == "EF_yz"
    assert Layout.load("megatron-1d").section("output").table == "V_yzE"
    with pytest.raises(AttributeError, match=r"no layout has a key 'ffn\.w_inn'"):
        _ = section.w_inn


@pytest.mark.parametrize(
    ("devices", "mesh"), [(1, (1, 1, 1)), (6, (3, 2, 1)), (8, (2, 2, 2)), (64, (4, 4, 4)), (12, (3, 2, 2))]
)
def test_devices_are_dealt_out_by_prime_factors(devices, mesh):
    assert tuple(Layout.load("weight-stationary-2d").mesh_for(devices).values()) == mesh


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Layout.load("megatron"),
            "no layout is called 'megatron'.\n  Did you mean 'megatron-1d'? Presets: replicated",
        ),
        (lambda: Layout.load("no/such.toml"), "cannot read the layout file 'no/such.toml': there is no such file."),
        (lambda: Layout.load("zero-3")["ffn.win"], "no layout has a key 'ffn.win'.\n  Did you mean 'ffn.w_in'?"),
        (lambda: Layout.load("zero-3").section("fnn"), "no part of a layout is called 'fnn'.\n  Did you mean 'ffn'?"),
        (lambda: Layout.load("zero-3").mesh_for(0), "no mesh has 0 devices."),
        (lambda: Layout.load("zero-3").mesh_for(2.5), "no mesh has 2.5 devices.\n  Give a whole number of devices"),
        (lambda: Layout.load("zero-3").mesh_for(None), "no mesh has None devices."),
        (
            lambda: factorise(4, ("x", "y"), ("z",)),
            "no mesh is factored over axis 'z': it has x, y.\n  Name it in axes",
        ),
        (
            lambda: factorise(4, ("x", "y"), ()),
            "no mesh is made for 4 devices: the layout does not say over which mesh axes they are factored.\n"
            '  Write factor = ["x", "y"] in [mesh], or give the mesh.',
        ),
        (lambda: factorise(4, (), ("z",)), "no mesh is factored over axis 'z': it has none."),
        (lambda: Layout.load(None), "cannot load a layout from None.\n  Give the path of a TOML file, or the name"),
        (lambda: Layout.load(b"zero-3"), "cannot load a layout from b'zero-3'."),
        (lambda: Layout.load("a\0.toml"), "cannot read the layout file"),
        (
            lambda: Layout.load("zero-3").phase("decod"),
            "no phase of a layout is called 'decod'.\n  Did you mean 'decode'? Phases: prefill, decode.",
        ),
        (lambda: Layout.load("zero-3").phase(None), "no phase of a layout is called None.\n  Phases: prefill, decode."),
        (lambda: Layout.load("zero-3").section(3), "no part of a layout is called 3."),
        (lambda: Layout.load("zero-3")[3], "no layout has a key 3.\n  A key is a string"),
        (lambda: Layout.load("zero-3").get(["ffn"]), "no layout has a key ['ffn']."),
        (lambda: Layout.load("zero-3").override(None), "cannot override with None.\n  Pass a mapping"),
        (lambda: Layout.load("zero-3").override("ffn.w_in=EF"), "cannot override with 'ffn.w_in=EF'."),
        (lambda: Layout.load("zero-3").override({"ffn.w_in": None}), "cannot override 'ffn.w_in' with None."),
        (lambda: Layout.load("zero-3").override({3: "EF"}), "cannot override 3 with 'EF'."),
        (
            lambda: Layout.load("zero-3").complete_mesh({"x": 2, "w": 4}),
            "cannot use layout 'zero-3' on this mesh\n    x=2,w=4\n        ^^^\n  the layout has no mesh axis w.\n"
            "  It declares x, y and z.",
        ),
    ],
)
def test_errors_say_what_to_do(call, message):
    with pytest.raises(LayoutError) as error:
        call()
    assert message in str(error.value)


@pytest.mark.parametrize(("text", "message"), [
    ("[mesh\n", "cannot read the layout file"),
    ('base = "megatron"', "no layout is called 'megatron'"),
    ("base = 3", "cannot have the base 3"),
])  # fmt: skip
def test_files_that_cannot_be_read(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(LayoutError, match=message):
        Layout.load(path)


def test_a_base_is_looked_for_beside_its_file(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "below.toml").write_text('base = "../under.toml"\n[ffn]\nw_out = "F_yE"\n')
    (tmp_path / "under.toml").write_text('base = "megatron-1d"\n[ffn]\nw_in = "EF_y"\n')
    monkeypatch.chdir("/")
    layout = Layout.load(tmp_path / "deep" / "below.toml")
    assert (layout.ffn.w_in, layout.ffn.w_out, layout.ffn.hidden) == ("EF_y", "F_yE", "B_xLF_yz")
    (tmp_path / "under.toml").unlink()
    with pytest.raises(LayoutError) as error:
        Layout.load(tmp_path / "deep" / "below.toml")
    assert f"cannot read the layout file '{tmp_path}/deep/../under.toml': there is no such file" in str(error.value)
    assert str(error.value).startswith(f"the layout '{tmp_path}/deep/below.toml' has the base '../under.toml': ")


def test_an_unknown_key_of_the_mesh_is_named(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "megatron-1d"\n[mesh]\nfactr = ["x"]\n')
    with pytest.raises(LayoutError, match=r"unknown key 'factr' in \[mesh\]\.\n  Did you mean 'factor'\?"):
        Layout.load(path)


def test_devices_that_divide_are_named_where_those_that_were_asked_for_do_not():
    sizes = {"B": 8, "E": 32, "X": 8}
    with pytest.raises(LayoutError) as error:
        Layout.load("zero-3").mesh_for(7, sizes)
    assert len(error.value.faults) == 2
    assert str(error.value).splitlines()[-1] == "  With 4 or 8 devices, the mesh divides them."
    for devices in (4, 8):
        Layout.load("zero-3").mesh_for(devices, sizes)


def test_a_mesh_of_very_many_devices_is_found_at_once():
    assert Layout.load("zero-3").mesh_for(2**30, {"B": 2**31, "E": 2**30}) == {"x": 2**30, "y": 1, "z": 1}


def test_a_file_may_not_stand_on_itself(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "{path}"')
    with pytest.raises(LayoutError, match="cannot have the base"):
        Layout.load(str(path))


def test_one_lowering_for_every_part_goes_before_what_the_layout_asks():
    layout = Layout.load("zero-3").override({"lowering.ffn": "xla"})
    assert layout.lowering_of("ffn") == "xla"
    assert layout.lowered("blocking").lowering_of("ffn") == "blocking"


def test_the_repr_of_a_section_does_not_list_the_whole_layout():
    assert repr(Layout.load("megatron-1d").ffn) == "<Section 'ffn' of a layout: 8 specs>"


def test_a_gradient_is_partial_only_where_its_product_has_the_rows_apart():
    """Keys that all heads share are made of whole sequences, though the residual stream is cut along L."""
    whole = {"attention.w_k": "EKD", "attention.key": "B_xLKD"}
    taken = Layout.load("megatron-sequence").override(whole).for_loss(microbatches=2)
    wanted = {"w_k": "EKD reduced-x", "k_norm": "D reduced-x", "q_norm": "D reduced-xyz", "norm": "E reduced-xyz"}
    assert {name: taken[f"attention.{name}"] for name in wanted} == wanted


def test_a_gradient_that_lies_as_its_parameter_by_the_file_is_no_partial_sum():
    """Without the line it is one, of several microbatches."""
    layout = Layout.load("megatron-1d")
    taken = layout.override({"gradients.ffn.w_in": layout["ffn.w_in"]}).for_loss(microbatches=2)
    assert (taken["ffn.w_in"], taken["ffn.w_out"]) == ("EF_yz", "F_yzE reduced-x")


def test_the_last_norm_has_the_rows_of_the_residual_stream():
    """The logits may lie over other axes than the stream that is normed for them."""
    taken = Layout.load("zero-3").override({"output.logits": "BLV_xyz", "output.norm": "E"}).for_loss(microbatches=2)
    assert taken["output.norm"] == "E reduced-xyz"


@pytest.mark.parametrize("change", ["stored_as", "for_loss", "inside", "one_position"])
def test_variants_of_a_layout_with_an_encoder_are_layouts(change):
    """They change the lines of both stacks, and write none that [encoder] does not take."""
    layout = Layout.load("megatron-1d").override({"encoder.ffn.w_in": "E_xF_yz", "encoder.embedding.tokens": "B_xL_y"})
    given = {"stored_as": (layout,), "for_loss": (2,), "inside": (["x"],), "one_position": ()}[change]
    changed = getattr(layout, change)(*given)
    assert changed.overrides["encoder"].keys() <= keys_of_override("encoder").keys()
    wanted = {
        "stored_as": ("ffn.w_in", "E_xF_yz"), "for_loss": ("ffn.w_gate", "EF_yz reduced-x"),
        "inside": ("ffn.w_in", "EF_yz"), "one_position": ("embedding.tokens", "B_xL"),
    }  # fmt: skip
    key, spec = wanted[change]
    assert changed.stack("encoder")[key] == spec


@pytest.mark.parametrize(("key", "spec", "said"), [
    ("ffn.w_in", "E_F", "    ffn.w_in = E_F\n"),
    ("decode.ffn.hidden", "BLF_x | BL_F", "    decode.ffn.hidden = BL_F\n"),
    ("ffn.in_via", "B_xLE EF", "    ffn.in_via = B_xLE EF\n"),
    ("ffn.w_in", ("EF_x", "E(F"), "    ffn.w_in = E(F\n"),
])  # fmt: skip
def test_a_spec_that_cannot_be_read_is_refused_at_once(key, spec, said):
    with pytest.raises(LayoutError) as error:
        Layout.load("megatron-1d").override({key: spec})
    assert str(error.value).startswith(f"cannot override {key!r}")
    assert said in str(error.value)
