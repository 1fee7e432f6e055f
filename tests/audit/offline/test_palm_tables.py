"""Tables 1 and 2 of Pope et al. 2022 from compiled programs, by the functions of benchmarks/palm.py."""

from importlib import import_module, util

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"),
]


@pytest.fixture(scope="module")
def palm(benchmarks):
    """benchmarks/palm.py as a module."""
    return import_module("palm")


@pytest.mark.parametrize("row", range(3))
def test_the_longest_contexts_are_within_5_percent(palm, row):
    name, layout, measured = palm.LONGEST[row]
    found = palm.context(name, layout, 128)
    assert found["longest"] == pytest.approx(measured[128], rel=0.05)
    # of four times the rows a chip holds four times the bytes: its part of [N, B, K, T, D] has no other factor of B
    four = palm.SHARE * palm.slice64()[0].chip.hbm_bytes / (4 * found["per_token"])
    assert int(four) // palm.TILE * palm.TILE == pytest.approx(measured[512], rel=0.05)


@pytest.mark.parametrize("name", ["prefill-1-int8", "decode-64-int8", "prefill-512", "decode-512"])
def test_latencies_in_the_papers_layouts_are_within_10_percent(palm, name):
    row = palm.ROWS[name]
    found = palm.measured(row, row.layout, "blocking", 64)
    assert found["step"] * row.steps == pytest.approx(row.seconds, rel=0.1)
    layout, lowering, heads = row.faster[0]
    if name == "prefill-1-int8":  # the other three are faster by less work alone: no padded heads
        assert palm.measured(row, layout, lowering, heads)["step"] < found["step"]
