"""The checks of every planned form: the results of one device, and no collective that the plan does not have."""

import re
from collections import Counter
from math import prod

import jax
import numpy as np
import pytest

import gspmd
from gspmd.hardware.links import wire_bytes
from gspmd.lowerings.partitioner import may_abort
from gspmd.ops._attention import blocks
from tests.references.compiled import group_size

_INSTRUCTION = re.compile(
    r"= (?P<type>\(.*?\)|\S+) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_ARRAY = re.compile(r"(?P<dtype>pred|[a-z]+\d+)\[(?P<shape>[\d,]*)\]")


def sent(text: str) -> dict[tuple[str, int], tuple[int, int]]:
    """Return what compiled HLO sends: for each kind and group size, the number of arrays, and one device's bytes."""
    counts, total = Counter(), Counter()
    for line in text.splitlines():
        found = _INSTRUCTION.search(line)
        if found:
            kind, group = found["kind"], 0 if "source_target_pairs" in line else group_size(line)
            arrays = [_bytes(array) for array in _ARRAY.finditer(found["type"])]
            if kind == "all-to-all":  # a tuple of the parts that one array is cut into
                arrays = [sum(arrays)]
            scale = group if kind == "reduce-scatter" else 1
            counts[kind, group] += len(arrays)
            total[kind, group] += sum(wire_bytes(kind, group, size * scale) for size in arrays)
    return {key: (counts[key], total[key]) for key in counts}


def _bytes(array: re.Match) -> int:
    size = prod(int(n) for n in array["shape"].split(",") if n)
    return size * (int(re.sub(r"\D", "", array["dtype"]) or 8) // 8)  # a boolean takes a byte


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark cases slow so that each runs under one type of mesh axes in the fast suite, the types in turn."""
    numbers: dict = {}
    for item in items:
        if {"check_form", "axis_type"} <= set(item.fixturenames):
            case = {name: value for name, value in item.callspec.params.items() if name != "axis_type"}
            cases = numbers.setdefault(item.function, [])
            if case not in cases:
                cases.append(case)
            turn = ("explicit", "auto")[cases.index(case) % 2]
            if item.callspec.params["axis_type"] != turn:
                item.add_marker(pytest.mark.slow)


@pytest.fixture
def check_form(make_mesh, place):
    """Return a function that compiles value and gradients of a form and compares both with plain code on one device.

    It asserts that the compiled collectives are the planned ones, in number and bytes, and returns those that are
    planned: {(kind, axes): count}.
    """

    def check(form, plain, arrays, specs, out, *, mesh, axis_type, lowering="blocking", wrt=(0,), tolerance=2e-5):
        cotangent = np.random.default_rng(1).normal(size=jax.eval_shape(plain, *arrays).shape).astype(np.float32)

        def both(function):
            def value_and_gradients(g, *arrays):
                def of(*some):
                    full = list(arrays)
                    for at, array in zip(wrt, some):
                        full[at] = array
                    return function(*full)

                y, transpose = jax.vjp(of, *(arrays[at] for at in wrt))
                return y, transpose(g.astype(y.dtype))

            return value_and_gradients

        want = jax.jit(both(plain))(cotangent, *arrays)
        mesh = make_mesh(mesh, axis_type)
        with jax.set_mesh(mesh), gspmd.lowering(lowering):
            placed = [place(mesh, array, spec) for array, spec in zip((cotangent, *arrays), (out, *specs))]
            program = jax.jit(both(form))
            compiled = program.lower(*placed).compile()
            planned = gspmd.trace(program, *placed).by_kind_and_axes()
        got = compiled(*placed)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want)
        assert got[0].sharding.is_equivalent_to(placed[0].sharding, got[0].ndim)
        for at, gradient in zip(wrt, got[1]):
            assert gradient.sharding.is_equivalent_to(placed[at + 1].sharding, gradient.ndim)
        if lowering == "blocking" or (lowering == "xla" and may_abort(mesh.shape)):  # rings merge arrays in one permute
            assert sent(compiled.as_text()) == _by_group(planned, dict(mesh.shape))
        return {key: count for key, (count, _) in planned.items()}

    return check


def _by_group(planned: dict, mesh: dict[str, int]) -> dict[tuple[str, int], tuple[int, int]]:
    grouped = {}
    for (kind, axes), (count, size) in planned.items():
        key = kind, 0 if kind == "collective-permute" else prod(mesh[axis] for axis in axes)
        before = grouped.get(key, (0, 0))
        grouped[key] = before[0] + count, before[1] + size
    return grouped


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Use blocks of about 128 logits, from 64 logits on; buckets are counted like heads."""
    jax.clear_caches()
    for name, value in (("LARGEST", 64), ("_BLOCK", 128), ("_LENGTHS", (2, 5)), ("_MULTIPLES", (2, 1))):
        monkeypatch.setattr(blocks, name, value)
    yield
    jax.clear_caches()
