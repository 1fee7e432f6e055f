"""Collectives of several TPU slices as they are lowered: their results on host devices, and the parts they run in."""

from itertools import permutations
from math import prod

import jax
import numpy as np
import pytest

from gspmd.lowerings import in_force
from gspmd.lowerings.blocking import tpu

MESHES = [((2, 2, 2), 2), ((4, 2), 2), ((2, 4), 2), ((2, 2, 2), 4), ((8,), 2), ((4, 2), 4), ((2, 2, 2), 1)]


def run(collective, x, mesh, before, after, slices):
    with in_force.on_slices(slices), jax.set_mesh(mesh):
        mapped = jax.shard_map(collective, in_specs=before, out_specs=after, check_vma=False)
        return np.asarray(jax.jit(mapped)(x))


@pytest.mark.parametrize(("sizes", "slices"), MESHES)
def test_every_order_of_axes_gives_the_same_numbers(sizes, slices, monkeypatch):
    """Gathers, reduce-scatters and all-reduces over any axes in any order, against numpy."""
    monkeypatch.setattr(tpu, "SMALL", 0)
    names = "abc"[: len(sizes)]
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh, axes = jax.make_mesh(sizes, tuple(names), axis_types=types), dict(zip(names, sizes))
    for count in range(1, len(names) + 1):
        for order in permutations(names, count):
            group = prod(axes[axis] for axis in order)
            for dimension in (0, 1):
                shape = [3, 5]
                shape[dimension] = 2 * group
                x = np.arange(prod(shape), dtype="float32").reshape(shape)
                spec = jax.P(*([None] * dimension), order)
                gather = lambda x, order=order, at=dimension: tpu.all_gather(x, order, at, axes)  # noqa: E731
                scatter = lambda x, order=order, at=dimension: tpu.reduce_scatter(x, order, at, axes)  # noqa: E731
                assert np.array_equal(run(gather, x, mesh, spec, jax.P(), slices), x)
                assert np.array_equal(run(scatter, x, mesh, jax.P(), spec, slices), x * group)
            y = np.arange(group * 64, dtype="float32").reshape(group, 64)
            reduce = lambda x, order=order: tpu.all_reduce(x, order, axes)  # noqa: E731
            assert np.array_equal(run(reduce, y, mesh, jax.P(), jax.P(), slices), y * group)


def parts(collective, axes, mesh, slices, size=2**24):
    """Return the primitives of a collective with their mesh axes, in the order of execution."""
    devices = jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh))
    with in_force.on_slices(slices), jax.sharding.use_abstract_mesh(devices):
        run = lambda x: collective(x, axes, mesh)  # noqa: E731
        mapped = jax.shard_map(run, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
        jaxpr = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((size // 4096, 4096), "bfloat16"))
    (inner,) = (each.params["jaxpr"] for each in jaxpr.eqns if "jaxpr" in each.params)
    return [
        (each.primitive.name, each.params.get("axis_name") or each.params.get("axes"))
        for each in inner.eqns
        if "axis_name" in each.params or "axes" in each.params
    ]


def gather(x, axes, mesh):
    return tpu.all_gather(x, axes, 0, mesh)


def test_what_crosses_slices_is_gathered_first_and_scattered_last():
    mesh = {"s": 2, "x": 4, "y": 4}
    for order in ("sxy", "xys", "xsy"):
        first, second = parts(gather, tuple(order), mesh, 2)
        assert first[1] == ("s",)
        assert {*second[1]} == {"x", "y"}
    scatter = lambda x, axes, mesh: tpu.reduce_scatter(x, axes, 1, mesh)  # noqa: E731
    # Over all of the 16 devices of a slice, more than 4, in two parts.
    assert [each[1] for each in parts(scatter, tuple("sxy"), mesh, 2)] == [("x",), ("y",), ("s",)]


def test_all_devices_of_a_slice_gather_in_two_parts():
    """A gather over more than 16 devices, all of a slice, would become an all-reduce there."""
    mesh = {"s": 2, "x": 8, "y": 4}
    assert [each[1] for each in parts(gather, tuple("xys"), mesh, 2)] == [("s",), ("y",), ("x",)]
    assert [each[1] for each in parts(gather, tuple("xy"), mesh, 2)] == [("y",), ("x",)]
    # One axis over two slices of 32: over the network, and in two parts within.
    assert len(parts(gather, ("x",), {"x": 64}, 2)) == 3


def test_few_bytes_are_reduced_at_once():
    reduce = lambda x, axes, mesh: tpu.all_reduce(x, axes, mesh)  # noqa: E731
    mesh = {"s": 2, "x": 4}
    assert len(parts(reduce, ("s", "x"), mesh, 2, size=4096)) == 1
    assert [name for name, _ in parts(reduce, ("s", "x"), mesh, 2)] == ["reduce_scatter", "psum", "all_gather"]
    assert len(parts(reduce, ("s",), mesh, 2)) == 1
    assert len(parts(reduce, ("s", "x"), mesh, 1)) == 1
