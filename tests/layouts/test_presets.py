"""The presets: that they load, fit small models on small meshes, and say what their papers say."""

import re

import pytest

from gspmd.annotate import Spec
from gspmd.layouts import Layout, presets
from gspmd.layouts.read import text_of
from gspmd.layouts.rules.keys import KEYS
from scripts.document_layouts import renewed

TINY = {"B": 8, "L": 32, "E": 64, "F": 128, "H": 8, "K": 8, "D": 8, "V": 256, "X": 8, "C": 10, "G": 8}


def test_all_presets_are_shipped():
    assert presets() == (
        "replicated", "data-parallel", "zero-1", "zero-2", "zero-3", "megatron-1d", "megatron-sequence",
        "megatron-folded", "context-parallel", "weight-stationary-1d", "weight-stationary-2d", "weight-gathered-x",
        "weight-gathered-xy", "weight-gathered-xyz", "gshard", "switch-expert-model", "pipeline",
    )  # fmt: skip


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("name", presets())
def test_preset_fits_a_tiny_model(name, devices):
    layout = Layout.load(name)
    mesh = layout.mesh_for(devices)
    product = 1
    for size in mesh.values():
        product *= size
    assert product == devices
    assert tuple(mesh) == layout.axes
    layout.check(TINY, mesh)


@pytest.mark.parametrize("name", presets())
def test_preset_writes_every_key_it_can(name):
    """All but those that follow another tensor, as biases and scales do, until somebody asks for another place."""
    layout = Layout.load(name)
    following = (
        "embedding.norm",
        "attention.key_via",
        "moe.router_noise",
        "moe.choice_bias",
        "moe.shared_",
        "pipeline.",
        "cross.",
    )
    # Those of latent attention follow w_q, w_k, query and key.
    following += tuple(f"attention.{name}" for name in ("latent", "q_latent_norm", "absorbed"))
    following += tuple(key for key in KEYS if re.search(r"\.w_\w_(up|down)$", key))
    names = r"b_\w+|scale_\w+|(norm_|router_)?bias|[qk]_norm(_all)?|relative|sinks|positions"
    following += tuple(key for key in KEYS if re.search(rf"\.({names})$", key))
    missing = [key for key in KEYS if key not in layout.table]
    assert [key for key in missing if not key.startswith(following)] == []


@pytest.mark.parametrize("name", presets())
def test_preset_opens_with_its_name_and_its_source(name):
    text = text_of(name)
    head = text[: text.index("[mesh]")]
    assert head.startswith(f"# {name}: ")
    assert "# Source: " in head
    assert "arXiv" in head
    assert "section" in head or "figure" in head


@pytest.mark.parametrize("name", presets())
def test_experts_are_reached_by_one_all_to_all_or_none(name):
    moe = Layout.load(name).section("moe")
    before, after = Spec.parse(moe.dispatched), Spec.parse(moe.expert_input)
    stays = before.axes_of("G")[: len(after.axes_of("G"))]
    moved = before.axes_of("G")[len(after.axes_of("G")) :]
    assert after.axes_of("G") == stays, "what moves stands minor"
    arrived = [after.axes_of(dim) for dim in "XCE" if after.axes_of(dim)]
    assert arrived == ([moved] if moved else []), "all of it goes to one dimension, in the same order"


@pytest.mark.parametrize("name", presets())
def test_groups_carry_what_the_batch_carries_before_the_moves(name):
    layout = Layout.load(name)
    batch = Spec.parse(layout["ffn.residual"]).axes_of("B")
    groups = Spec.parse(layout["moe.groups"]).axes_of("G")
    assert groups[: len(batch)] == batch
    assert Spec.parse(layout["ffn.residual"]).axes_of("E") in ((), groups[len(batch) :])


def test_prefill_and_decode_share_stored_weights():
    stationary, gathered = Layout.load("weight-stationary-2d"), Layout.load("weight-gathered-xyz")
    parameters = [key for key in KEYS if key.startswith(("ffn.w", "attention.w", "moe.w"))]
    assert [stationary[key] for key in parameters] == [gathered[key] for key in parameters]


def test_documentation_lists_every_key_and_shows_every_preset(pytestconfig):
    page = (pytestconfig.rootpath / "docs" / "layouts.md").read_text()
    assert page == renewed(page), "run: python scripts/document_layouts.py"
    assert all(f"`{key}`" in page for key in KEYS)
    assert all(text_of(name).strip() in page for name in presets())


def test_a_page_without_a_place_for_a_table_is_refused():
    with pytest.raises(ValueError, match=r"needs one <!-- begin dimensions --> \.\.\. <!-- end dimensions -->"):
        renewed("# Layouts\n")


def test_the_pages_example_runs(pytestconfig):
    import gspmd.layouts

    page = (pytestconfig.rootpath / "docs" / "layouts.md").read_text()
    names = {"gspmd": gspmd.layouts}
    exec(page.split("```python\n")[1].split("```")[0], names)
    assert names["layout"]["ffn.w_in"] == "EF_yz"


@pytest.mark.parametrize("name", ["weight-gathered-x", "weight-gathered-xyz"])
def test_weights_that_are_gathered_are_stored_where_weight_stationary_2d_keeps_them(name):
    gathered, stationary = Layout.load(name), Layout.load("weight-stationary-2d")
    apart = {key for key in gathered.table if KEYS[key].kind == "parameter" and gathered[key] != stationary[key]}
    assert apart <= {"embedding.table", "output.table", "attention.norm", "ffn.norm", "output.norm"}
