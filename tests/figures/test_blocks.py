"""The blocks of devices: as JAX places them, in the figure and in the text; large meshes stay small pictures."""

import re

import jax
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import gspmd
from gspmd import Spec
from gspmd.figures import blocks_figure
from gspmd.figures.ownership import Ownership
from gspmd.figures.tensor import tensor_text
from tests.figures.svg import SVG, check_places, having, root, words

MESHES = ((2, 2, 2), (4, 2), (8,), (2, 4), (1, 8), (2, 1, 4))


@st.composite
def placements(draw):
    """A spec, a shape that it divides, and a mesh of eight devices."""
    mesh = dict(zip("xyz", draw(st.sampled_from(MESHES))))
    dims = "ABCDEF"[: draw(st.integers(0, 5))]
    axes = draw(st.permutations(tuple(mesh)))
    places = {axis: draw(st.sampled_from(("", *dims, "+"))) for axis in axes}
    sharded = tuple(tuple(axis for axis in axes if places[axis] == dim) for dim in dims)
    spec = Spec(tuple(dims), sharded, tuple(axis for axis in axes if places[axis] == "+"))
    return spec, tuple(8 * draw(st.integers(1, 3)) for _ in dims), mesh


@settings(max_examples=60)
@given(placements())
def test_blocks_are_those_of_jax(placement):
    spec, shape, mesh = placement
    held = Ownership(spec, shape, mesh)
    sharding = jax.NamedSharding(
        jax.make_mesh(tuple(mesh.values()), tuple(mesh)), spec.without_partial().partition_spec()
    )
    by_device = sharding.devices_indices_map(shape)
    devices = [*sharding.mesh.devices.flat]
    for number, device in enumerate(devices):
        expected = [index.indices(size)[:2] for index, size in zip(by_device[device], shape)]
        assert [(part.start, part.stop) for part in held.slices(number)] == expected
    same = [[by_device[a] == by_device[b] for a in devices] for b in devices]
    assert [[held.block(a) == held.block(b) for a in range(8)] for b in range(8)] == same


@settings(max_examples=40)
@given(placements())
def test_the_figure_says_what_devices_hold(placement):
    spec, shape, mesh = placement
    held = Ownership(spec, shape, mesh)
    ids = [10 + device for device in range(8)]
    figure = blocks_figure(spec, shape, mesh, devices=ids)
    drawn = having(root(figure), device=None)
    assert sorted(int(each.get("data-device")) for each in drawn) == ids
    for each in drawn:
        device = int(each.get("data-device")) - 10
        (block,) = having(each, block=None)
        frame = next(rect for rect in each.iter(f"{SVG}rect") if rect.get("class") == "cell")
        assert _place(block) == pytest.approx(_expected(held, device, _place(frame)), abs=0.011)
        assert int(block.get("data-block")) == held.block(device)
        assert block.get("data-summand") == (str(held.summand(device)) if spec.partial else None)
    check_places(figure)


@settings(max_examples=40)
@given(placements())
def test_the_text_names_the_devices_of_every_block(placement):
    spec, shape, mesh = placement
    held = Ownership(spec, shape, mesh)
    cells = [cell for line in tensor_text(held).splitlines()[1:] if "│" in line for cell in line.split("│")[1:-1]]
    assume(not any("…" in cell for cell in cells))
    for cell in cells:
        summands = [[*map(int, part.split())] for part in cell.split("+")]
        blocks = {held.block(device) for devices in summands for device in devices}
        assert len(blocks) == 1
        for summand, devices in enumerate(summands):
            assert {held.summand(device) for device in devices} == {summand}
    assert sorted(int(number) for cell in cells for number in re.findall(r"\d+", cell)) == [*range(8)]


def _place(rect) -> list[float]:
    return [float(rect.get(name)) for name in ("x", "y", "width", "height")]


def _expected(held, device, frame):
    """The place of a device's part of the tensor in a frame: by its slices, the last sharded dimension across."""
    (x, y, wide, high), across = frame, True
    part = [[0.0, 1.0], [0.0, 1.0]]  # across and down: begin and end, as shares
    for index, size, count in reversed([*zip(held.slices(device), held.shape, held.parts)]):
        if count > 1:
            # What is split before, in the other dimension of this way, is finer: it lies inside this part.
            begin, end = part[not across]
            low, step = index.start / size, (index.stop - index.start) / size
            part[not across] = [low + begin * step, low + end * step]
            across = not across
    (left, right), (top, bottom) = part
    return [x + left * wide, y + top * high, (right - left) * wide, (bottom - top) * high]


def test_a_block_of_many_devices_names_the_first_and_the_last():
    held = Ownership(Spec.parse("B_x partialsum-y"), (8,), {"x": 2, "y": 8, "z": 8})
    (row,) = (line for line in tensor_text(held).splitlines() if "│" in line)
    first, second = (cell.strip() for cell in row.split("│")[1:-1])
    assert first == "0 1 … 7 + 8 9 … 15 + … + 56 57 … 63"
    assert second == "64 65 … 71 + 72 73 … 79 + … + 120 121 … 127"


def test_a_mesh_of_a_billion_devices_is_shown():
    figure = gspmd.show("B_x", (2**30,), {"x": 2**30})
    assert str(figure).splitlines()[0] == "B_x  1073741824  on x=1073741824: 1,073,741,824 blocks of 1"
    copies = gspmd.show("B_y", (8,), {"x": 2**20, "y": 2, "z": 2**9})
    assert "│ 0 1 … 1073741311 │ 512 513 … 1073741823 │" in str(copies)


def test_axes_of_which_one_place_is_drawn_are_named():
    mesh = dict.fromkeys("abcdefgh", 2)
    document = root(blocks_figure(Spec.parse("B_aE_h"), (8, 8), mesh))
    drawn = [int(each.get("data-device")) for each in having(document, device=None)]
    assert len(drawn) == 64
    assert "64 of 256 devices are drawn, a=0 and b=0 only" in "".join(words(document))
    held = Ownership(Spec.parse("B_aE_h"), (8, 8), mesh)
    assert {(held.coordinates(device)["a"], held.coordinates(device)["b"]) for device in drawn} == {(0, 0)}


def test_a_scalar_keeps_its_notation():
    figure = blocks_figure(Spec.parse("partialsum-x"), (), {"x": 2, "y": 2})
    said = words(root(figure))
    assert "(partialsum-x)" in said[0]
    assert "whole on every device, 2 summands" in "".join(said)
    assert "whole on every device, 2 summands" in str(figure)


@pytest.mark.parametrize(
    ("spec", "sizes", "said"),
    [("B_x", (6,), "6"), ("B_z", (8,), "z"), ("BE", (8,), "BE"), ("B_?", (8,), "leaves a dimension to the compiler")],
)
def test_a_spec_that_does_not_fit_is_refused(spec, sizes, said):
    with pytest.raises(gspmd.SpecError, match=re.escape(said)):
        gspmd.show(spec, sizes, {"x": 4})
    if "_?" not in spec:
        with pytest.raises(gspmd.SpecError, match=re.escape(said)):
            blocks_figure(Spec.parse(spec), sizes, {"x": 4})


@pytest.mark.parametrize("mesh", [{"x": 1024}, {"x": 32, "y": 32}, {"a": 4, "b": 4, "c": 4, "d": 4, "e": 4}])
def test_a_large_mesh_is_a_small_picture(mesh):
    spec = Spec(("B", "E"), (tuple(mesh)[:1], tuple(mesh)[1:]))
    figure = blocks_figure(spec, (4096, 4096), mesh)
    drawn = [int(each.get("data-device")) for each in having(root(figure), device=None)]
    assert len(drawn) <= 64
    assert (min(drawn), max(drawn)) == (0, 1023)
    assert len(figure.svg) < 60_000
    assert f"{len(drawn)} of 1,024 devices are drawn" in figure.svg
    assert len(str(figure)) < 10_000
    check_places(figure)


def test_64_devices_are_all_drawn_within_a_column():
    figure = blocks_figure(Spec.parse("B_xLE_yz"), {"B": 512, "L": 1, "E": 18432}, {"x": 4, "y": 4, "z": 4})
    assert len(having(root(figure), device=None)) == 64
    assert figure.width < 400
    assert len(figure.svg) < 60_000


def test_summands_are_hatched_and_marked():
    document = root(blocks_figure(Spec.parse("B_x partialsum-y"), (8,), {"x": 2, "y": 2}))
    cells = having(document, device=None)
    assert ["+" in ["".join(text.itertext()) for text in cell.iter()] for cell in cells] == [True] * 4
    assert sum(each.get("class") == "hatch" for each in document.iter()) == 4
