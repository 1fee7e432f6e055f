"""Lists of specs, of which sizes and mesh choose one."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspmd.annotate import LayoutError, Spec
from gspmd.layouts import Layout, presets, rank

SIZES = {"B": 8, "L": 1, "T": 32, "E": 64, "F": 128, "H": 8, "K": 1, "D": 8, "V": 256}
MESH = {"x": 2, "y": 2, "z": 2}
QUERY = ["B_xyzLHD", "B_yzLH_xD", "B_zLH_xyD", "BLH_xyzD"]
KEY = ["B_xyzLKD", "B_yzLKD", "B_zLKD", "BLKD"]
LAYOUT = Layout.load("weight-stationary-2d").override({"attention.query": QUERY, "attention.key": KEY})


@given(
    st.sampled_from(presets()),
    st.integers(1, 64),
    st.sampled_from([(8, 8), (8, 2), (64, 8), (48, 1), (12, 3)]),
    st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=3, max_size=3),
)
def test_the_first_place_at_which_every_list_divides_is_taken(name, batch, heads, axes):
    layout = Layout.load(name).phase("decode")
    mesh, sizes = dict(zip("xyz", axes)), SIZES | {"B": batch, "H": heads[0], "K": heads[1]}

    def divides(text: str) -> bool:
        spec = Spec.parse(text)
        return all(sizes[dim] % prod(mesh[axis] for axis in held) == 0 for dim, held in zip(spec.dims, spec.axes))

    lists = {key: text for key, text in layout.table.items() if isinstance(text, tuple)}
    count = max(map(len, lists.values()), default=0)
    places = [at for at in range(count) if all(divides(texts[at]) for texts in lists.values())]
    if lists and not places:
        with pytest.raises(LayoutError, match=r"none of the \d+ alternatives of \[attention\] fits: 1\. "):
            layout.resolved(sizes, mesh)
        return
    resolved = layout.resolved(sizes, mesh)
    assert {key: resolved[key] for key in lists} == {key: texts[places[0]] for key, texts in lists.items()}
    assert {key: text for key, text in resolved.table.items() if key not in lists}.items() <= layout.table.items()


def test_smaller_batches_take_fewer_axes_and_the_choice_is_told():
    chosen = {batch: LAYOUT.resolved(SIZES | {"B": batch}, MESH) for batch in (8, 4, 6, 1)}
    assert {batch: layout["attention.query"] for batch, layout in chosen.items()} == dict(zip((8, 4, 6, 1), QUERY))
    assert chosen[4].chosen == ("[attention] 2 of 4: query B_yzLH_xD, key B_yzLKD",)
    assert chosen[4].cache() == "B_yzTKD"
    assert chosen[4].check(SIZES | {"B": 4}, MESH) is chosen[4]
    assert LAYOUT.check(SIZES | {"B": 1}, MESH) is LAYOUT
    assert Layout.load("megatron-1d").resolved(SIZES, MESH) is not LAYOUT
    plain = Layout.load("zero-3")
    assert plain.resolved(SIZES, MESH) is plain


@pytest.mark.parametrize("name", ["megatron-1d", "megatron-sequence", "megatron-folded"])
def test_where_key_heads_are_fewer_than_devices_z_shards_the_batch_of_attention_and_cache(name):
    layout, mesh = Layout.load(name).phase("decode"), {"x": 1, "y": 8, "z": 2}
    sizes = SIZES | {"H": 64, "K": 8}
    chosen = {batch: layout.resolved(sizes | {"B": batch}, mesh) for batch in (8, 1)}
    assert [chosen[8][f"attention.{key}"] for key in ("query", "key", "w_k")] == ["B_xzLH_yD", "B_xzLK_yD", "EK_yD"]
    assert chosen[8].cache() == "B_xzTK_yD"
    assert [chosen[1][f"attention.{key}"] for key in ("query", "key", "w_k")] == ["B_xLH_yzD", "B_xLK_yD", "EK_yD"]
    many = layout.resolved(sizes | {"K": 64}, mesh)
    assert [many[f"attention.{key}"] for key in ("query", "key", "w_k")] == ["B_xLH_yzD", "B_xLK_yzD", "EK_yzD"]


def test_what_was_overridden_since_is_no_longer_told_as_chosen():
    chosen = LAYOUT.resolved(SIZES | {"B": 4}, MESH)
    assert chosen.override({"attention.key": "B_zLKD"}).chosen == ("[attention] 2 of 4: query B_yzLH_xD",)
    assert chosen.override({"ffn.w_in": "EF"}).chosen == chosen.chosen
    assert chosen.override({"attention.key": KEY, "attention.query": "BLHD"}).chosen == ()
    assert LAYOUT.resolved(SIZES, MESH).phase("decode").chosen == ()  # it has lists of its own, and none is chosen yet


def test_one_position_of_lists_is_a_list():
    lists = {"ffn.hidden": ["B_xL_yF_z", "BL_yF_z"], "ffn.in_via": ["B_xL_yE, EF_z", "BLE, EF_z"]}
    layout = Layout.load("replicated").override(lists)
    short = layout.one_position()
    assert short.table["ffn.hidden"] == ("B_xLF_z", "BLF_z")
    assert short.table["ffn.in_via"] == ("B_xLE, EF_z", "BLE, EF_z")
    sizes = {"B": 1, "L": 2, "F": 8}
    assert short.resolved(sizes, MESH).table == layout.resolved(sizes, MESH).one_position().table
    assert short.resolved(sizes, MESH)["ffn.hidden"] == "BLF_z"


@pytest.mark.parametrize(
    "ask",
    [lambda: LAYOUT["attention.query"], lambda: LAYOUT.attention.query, lambda: LAYOUT.get("attention.query")],
)
def test_reading_a_list_before_it_is_resolved_is_an_error(ask):
    with pytest.raises(LayoutError) as error:
        ask()
    assert str(error.value) == (
        "cannot read attention.query: sizes and mesh choose one of its 4 alternatives (B_xyzLHD, B_yzLH_xD, B_zLH_xyD, "
        "BLH_xyzD).\n  Call layout.resolved(sizes, mesh) first, with the sizes that you pass to layout.check."
    )


def test_where_none_divides_every_reason_is_given():
    with pytest.raises(LayoutError) as error:
        LAYOUT.resolved(SIZES | {"B": 1, "H": 6}, MESH)
    assert str(error.value).splitlines()[1:] == [
        "    attention.query = B_xyzLHD | B_yzLH_xD | B_zLH_xyD | BLH_xyzD",
        "                      ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "  none of the 4 alternatives of [attention] fits: 1. B is 1, over 8 shards; 2. B is 1, over 4 shards; "
        "3. B is 1, over 2 shards; 4. H is 6, over 8 shards.",
        "  Add one with B and H unsharded, or over fewer mesh axes.",
    ]
    with pytest.raises(LayoutError, match=r"none of the 4 alternatives of \[attention\] fits"):
        LAYOUT.check(SIZES | {"B": 1, "H": 6}, MESH)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"attention.key": KEY[:3]}, "key has 3 alternatives, and attention.query has 4; they are chosen together."),
        ({"attention.query": [*QUERY[:3], "BLDH"]}, "query must have dimensions B, L, H and D, in this order"),
        ({"attention.query": [*QUERY[:3], "B_qLHD"]}, "^^^\n  the mesh has no axis q."),
        ({"attention.key": ["B_xyzLKD", "B_xLKD", "B_zLKD", "BLKD"]}, "B of attention.key is sharded over x, and"),
        ({"decode.attention.query": ["BLHD", "BLHD_x"]}, "dimension D of attention.query must not be sharded"),
    ],
)  # fmt: skip
def test_faults_of_alternatives_that_are_not_taken_are_found_too(specs, message):
    with pytest.raises(LayoutError) as error:
        LAYOUT.override(specs).check(SIZES, MESH)
    assert message in str(error.value)


RESIDUALS = {"attention.residual": ["B_xyzLE"] * 2 + ["B_xLE"] * 2, "ffn.residual": ["B_xyzLE", "B_xLE"]}


def test_lists_of_two_sections_meet_as_the_sizes_choose_them():
    layout = Layout.load("replicated").override(RESIDUALS)
    assert layout.check() is layout
    for batch, residual in ((8, "B_xyzLE"), (2, "B_xLE")):
        single = layout.check(SIZES | {"B": batch}, MESH).resolved(SIZES | {"B": batch}, MESH)
        assert {single["attention.residual"], single["ffn.residual"]} == {residual}
    lone = layout.override({"ffn.residual": ["B_xyzLE", "B_xLE", "B_yLE"]})
    with pytest.raises(
        LayoutError, match=r"dimension B of ffn\.residual is sharded over y, and that of attention\.residual"
    ):
        lone.check(SIZES, MESH)
    with pytest.raises(LayoutError, match=r"sharded over x, y and z, and that of attention\.residual"):
        layout.override({"attention.residual": ["B_xLE", "B_xyzLE"]}).check(SIZES, MESH)


def test_lists_of_two_sections_of_a_phase_meet_as_the_sizes_choose_them():
    layout = Layout.load("replicated").override({f"decode.{key}": texts for key, texts in RESIDUALS.items()})
    assert layout.check(SIZES, MESH) is layout
    assert layout.phase("decode").check(SIZES, MESH).resolved(SIZES, MESH)["ffn.residual"] == "B_xyzLE"
    alike = {"decode.attention.residual": ["B_yLE"] * 2, "decode.ffn.residual": "B_yLE"}
    assert layout.override(alike).check(SIZES, MESH).phase("decode")["ffn.residual"] == "B_yLE"


def test_lists_of_a_phase_are_chosen_for_its_sizes():
    layout = Layout.load("weight-gathered-x").override({"cache.attention.key": "B_xT_yzKD | BTKD"})
    assert layout.resolved(SIZES, MESH)["attention.query"] == "B_xyzLHD"
    decode = layout.phase("decode").resolved(SIZES | {"B": 4, "T": 6, "K": 8}, MESH)
    assert (decode["attention.query"], decode["attention.key"], decode.cache()) == ("B_xzLH_yD", "B_xzLK_yD", "BTKD")
    assert decode.chosen[1] == "[cache] 2 of 2: attention.key BTKD"
    layout.check(SIZES, MESH)


def test_a_file_writes_lists(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "megatron-1d"\n[attention]\nquery = ["B_xyLHD", "B_xLH_yzD"]\nkey = ["B_xyLKD", "B_xLK_yzD"]\n'
    )
    layout = Layout.load(path)
    assert layout.table["attention.query"] == ("B_xyLHD", "B_xLH_yzD")
    assert layout == layout.override(
        {"attention.query": "B_xyLHD|B_xLH_yzD", "attention.key": ["B_xyLKD", "B_xLK_yzD"]}
    )
    assert layout.resolved(SIZES | {"K": 8, "B": 2}, MESH)["attention.key"] == "B_xLK_yzD"
    path.write_text('base = "megatron-1d"\n[attention]\nquery = []\n')
    with pytest.raises(LayoutError, match=r"attention\.query must be a string or a list of strings, but it is \[\]"):
        Layout.load(path).check()


def test_rank_takes_the_alternative_that_fits():
    layout = Layout.load("megatron-1d").override({"ffn.hidden": ["B_xLF_yz", "B_xLF"], "ffn.residual": ["B_xLE"] * 2})
    sizes = {"B": 8, "L": 4, "E": 64, "F": 64}
    assert (
        rank(layout, sizes=sizes, mesh=MESH)[0].wire_bytes == rank("megatron-1d", sizes=sizes, mesh=MESH)[0].wire_bytes
    )
