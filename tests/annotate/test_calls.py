"""The calls of GShard and GSPMD: where every part of an array comes to lie."""

import jax
import numpy as np
import pytest

from gspmd import SpecError
from gspmd.annotate import mesh_split, replicate, shard, spec_of, split

VALUE = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
NUMBERS = np.arange(8)


@pytest.fixture
def mesh(make_mesh, axis_type):
    with jax.set_mesh(make_mesh({"x": 4, "y": 2}, axis_type)) as mesh:
        yield mesh or jax.sharding.get_mesh()


def _device_of(array, mesh, *indices) -> list[int]:
    """The numbers, in mesh order, of the devices that hold an element."""
    numbers = {device: n for n, device in enumerate(mesh.devices.flat)}
    holds = lambda s: all(i in range(*sl.indices(n)) for i, sl, n in zip(indices, s.index, array.shape))  # noqa: E731
    return sorted(numbers[s.device] for s in array.addressable_shards if holds(s))


def test_replicate(mesh):
    array = replicate(VALUE)
    assert str(spec_of(array)) == "AB"
    assert _device_of(array, mesh, 3, 3) == list(range(8))


@pytest.mark.parametrize(
    ("dimension", "parts", "expected"),
    [
        (0, 8, "A_xyB"),
        (1, 4, "AB_x"),
        (-1, 2, "AB_y"),
        (0, 1, "AB"),
    ],
)
def test_split(mesh, dimension, parts, expected):
    array = split(VALUE, dimension, parts)
    assert str(spec_of(array)) == expected
    np.testing.assert_array_equal(array, VALUE)


def test_split_puts_part_i_on_device_i(mesh):
    array = split(VALUE, 0, 8)
    assert [_device_of(array, mesh, i, 0) for i in range(8)] == [[i] for i in range(8)]


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        (NUMBERS.reshape(4, 2), "A_xB_y"),
        (NUMBERS.reshape(4, 2).T, "A_yB_x"),
        (NUMBERS.reshape(8, 1), "A_xyB"),
        (NUMBERS.reshape(1, 8), "AB_xy"),
        (NUMBERS.reshape(4, 2).T.reshape(1, 8), "AB_yx"),
    ],
)
def test_shard_puts_every_part_where_the_assignment_says(mesh, assignment, expected):
    array = shard(VALUE, assignment)
    assert str(spec_of(array)) == expected
    step = np.array(VALUE.shape) // assignment.shape
    for part in np.ndindex(assignment.shape):
        assert _device_of(array, mesh, *(part * step)) == [assignment[part]]


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ([0, 1], "A_xB_y"),
        ([1, 0], "A_yB_x"),
        ([-1, 0], "AB_x"),
        ([-1, -1], "AB"),
    ],
)
def test_mesh_split(mesh, mapping, expected):
    assert str(spec_of(mesh_split(VALUE, mesh, mapping))) == expected
    assert str(spec_of(mesh_split(VALUE, NUMBERS.reshape(4, 2), mapping))) == expected


def test_mesh_split_over_a_device_mesh_of_another_shape(mesh):
    assert str(spec_of(mesh_split(VALUE, NUMBERS, [-1, 0]))) == "AB_xy"
    assert str(spec_of(mesh_split(VALUE, NUMBERS.reshape(4, 2).T, [0, 1]))) == "A_yB_x"


def test_mesh_split_inside_jit(make_mesh):
    with jax.set_mesh(make_mesh({"x": 4, "y": 2}, "auto")):
        array = jax.jit(lambda v: mesh_split(v, NUMBERS.reshape(4, 2), [1, 0]))(VALUE)
        assert str(spec_of(array)) == "A_yB_x"


def test_unspecified_dims_are_left_to_the_compiler(make_mesh):
    with jax.set_mesh(make_mesh({"x": 4, "y": 2}, "auto")) as mesh:
        mesh = mesh or jax.sharding.get_mesh()
        array = jax.jit(lambda v: mesh_split(v, mesh, [-1, 0], unspecified_dims=[0]))(VALUE)
        assert spec_of(array).axes_of("B") == ("x",)
    with (
        jax.set_mesh(make_mesh({"x": 4, "y": 2})),
        pytest.raises(SpecError, match="under Explicit axes every dimension"),
    ):
        mesh_split(VALUE, NUMBERS.reshape(4, 2), [-1, 0], unspecified_dims=[0])


MESH_TEXT = "the mesh has x=4, y=2."
REFUSED = {
    "no axes make so many parts": (
        lambda mesh: split(VALUE, 0, 3),
        f"split: no mesh axes make 3 parts; {MESH_TEXT}\n"
        "  Split into a number of parts that is the product of some of its axes' sizes.",
    ),
    "no such dimension": (
        lambda mesh: split(VALUE, 2, 4),
        "split: the array has no dimension 2.\n  It has 2 dimensions, numbered from 0.",
    ),
    "rank of the assignment": (
        lambda mesh: shard(VALUE, NUMBERS),
        "shard: the device assignment has 1 dimensions, and the array has 2.\n"
        "  Write the device numbers in an array of as many dimensions, with size 1 where the array is not split.",
    ),
    "order of the assignment": (
        lambda mesh: shard(VALUE, [[0, 1], [2, 3], [4, 5], [7, 6]]),
        "shard: the device assignment does not follow the mesh, which has x=4, y=2.\n"
        "  It must have each number from 0 to 7 once, and its dimensions must run along mesh axes.",
    ),
    "too few devices": (
        lambda mesh: mesh_split(VALUE, NUMBERS[:4], [0, -1]),
        "mesh_split: the device mesh does not follow the mesh, which has x=4, y=2.\n"
        "  It must have each number from 0 to 7 once, and its dimensions must run along mesh axes.",
    ),
    "another mesh": (
        lambda mesh: mesh_split(VALUE, jax.make_mesh((2, 4), ("x", "y")), [0, 1]),
        "mesh_split: the device mesh is {'x': 2, 'y': 4}, and the current mesh is {'x': 4, 'y': 2}.\n"
        "  Pass the mesh of jax.set_mesh.",
    ),
    "length of the mapping": (
        lambda mesh: mesh_split(VALUE, mesh, [0]),
        "mesh_split: the mapping has 1 entries, and the array has 2 dimensions.\n"
        "  Write the dimension of the device mesh for each, and -1 where it is not split.",
    ),
    "no such dimension of the mesh": (
        lambda mesh: mesh_split(VALUE, mesh, [0, 2]),
        "mesh_split: the device mesh has no dimension 2.\n  It has 2 dimensions, numbered from 0.",
    ),
    "one dimension of the mesh twice": (
        lambda mesh: mesh_split(VALUE, mesh, [0, 0]),
        "mesh_split: dimension 0 of the device mesh splits two dimensions of the array.\n"
        "  A dimension of the mesh can split only one dimension of a tensor.",
    ),
    "split and unspecified": (
        lambda mesh: mesh_split(VALUE, mesh, [0, 1], unspecified_dims=[1]),
        "mesh_split: the mapping splits dimension 1, and unspecified_dims leaves it to the compiler.\n"
        "  Write -1 for it in tensor_split_dims_mapping.",
    ),
    "manual": (
        lambda mesh: mesh_split(VALUE, mesh, [0, 1], manual_mesh_dims=[1]),
        "mesh_split: manual_mesh_dims is not supported.\n"
        "  Write the manual part with jax.shard_map(..., axis_names={'x'}).",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(mesh, case):
    call, message = REFUSED[case]
    with pytest.raises(SpecError) as error:
        call(mesh)
    assert str(error.value) == message


def test_several_choices_of_axes_are_refused(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2, "y": 2, "z": 2})), pytest.raises(SpecError) as error:
        split(VALUE, 0, 4)
    assert str(error.value) == (
        "split: several mesh axes make 4 parts; the mesh has x=2, y=2, z=2.\n"
        "  Choose with annotate(), here 'A_xy', 'A_xz' or 'A_yz'."
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda: split(VALUE, 0, 1),
        lambda: shard(VALUE, [[0]]),
        lambda: mesh_split(VALUE, [0], [-1, -1]),
    ],
)
def test_without_a_mesh(call):
    with pytest.raises(SpecError, match=r"no mesh is set\.\n  Call it inside 'with jax\.set_mesh\(mesh\):'"):
        call()
