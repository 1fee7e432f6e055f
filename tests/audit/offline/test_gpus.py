"""benchmarks/gpus.py: published figures, the commands of its rows, and its page."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod

import jax
import pytest

from tests.audit.offline.plugins import needs_cuda_plugin

PETAFLOPS = {
    "1.7B": 4.4, "3.6B": 8.8, "7.5B": 18.2, "18.4B": 34.6, "39.1B": 70.8, "76.1B": 143.8, "145.6B": 227.1,
    "310.1B": 297.4, "529.6B": 410.2, "1008B": 502.0,
}  # fmt: skip
"""The last column of table 1 of Narayanan et al. 2021: all GPUs together."""
UTILIZATION = {"22B": (0.415, 0.29), "175B": (0.514, 0.318), "530B": (0.56, 0.297), "1T": (0.563, 0.321)}
"""Model FLOPs utilization of "present work", and its gain over full recomputation: Korthikanti et al. 2022, table 5."""
OTHERS = "llama-3.1-8b", "llama-3.1-8b, compiled", "llama-3.1-8b, 128 GPUs", "llama-3.1-70b"
NAMES = [*OTHERS, *PETAFLOPS, *(f"{name}, {remat}" for name in UTILIZATION for remat in ("full", "selective"))]
CHEAPEST = "1.7B"


@pytest.fixture(scope="module")
def gpus(benchmarks):
    """benchmarks/gpus.py as a module."""
    return import_module("gpus")


@dataclass
class Nodes:
    """Nodes of GPUs without the compiler that describes their devices."""

    num_devices: int

    def mesh(self, axes: Mapping[str, int], axis_type: str) -> jax.sharding.AbstractMesh:
        """The mesh that `Topology.mesh` makes, of no devices."""
        assert prod(axes.values()) == self.num_devices
        kinds = (jax.sharding.AxisType[axis_type.capitalize()],) * len(axes)
        return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_and_layout_of_a_row_fit_its_gpus(gpus, name):
    """The mesh covers the GPUs, and layout, schedule and sizes fit it; nothing is compiled."""
    settings = gpus.ROWS[name].settings
    assert gpus.offline.mesh_of(settings, Nodes(gpus.gpus_of(settings))).size == gpus.gpus_of(settings)


def test_every_row_is_tested(gpus):
    assert [*gpus.ROWS] == [*NAMES]


@pytest.mark.parametrize("name", PETAFLOPS)
def test_models_are_those_of_the_papers_names(gpus, name):
    """The parameters in the paper's first column, and TFLOP/s of a GPU that add up to its last."""
    row = gpus.ROWS[name]
    settings = row.settings
    assert settings.model.num_parameters / 1e9 == pytest.approx(float(name[:-1]), rel=0.035)
    assert row.published * gpus.gpus_of(settings) / 1000 == pytest.approx(PETAFLOPS[name], rel=0.005)


@pytest.mark.parametrize("name", UTILIZATION)
def test_seconds_are_those_of_the_papers_utilization(gpus, name):
    full, selective = gpus.ROWS[f"{name}, full"], gpus.ROWS[f"{name}, selective"]
    used, gain = UTILIZATION[name]
    of_peak = gpus.model_flops(selective.settings) / (gpus.gpus_of(selective.settings) * 312e12)
    assert of_peak / selective.published == pytest.approx(used, rel=0.01)
    assert full.published / selective.published - 1 == pytest.approx(gain, abs=0.005)


def test_megatron_counts_the_model_and_a_second_forward_pass(gpus):
    """Four thirds of a step's products, but for the logits, which are not computed again."""
    for name in PETAFLOPS:
        settings = gpus.ROWS[name].settings
        counted = gpus.megatron_flops(settings.model, settings.batch, settings.length)
        assert counted == pytest.approx(gpus.model_flops(settings) * 4 / 3, rel=0.03), name


def test_seconds_of_a_step(gpus):
    """Two rows of 8,192 tokens on each GPU at 5,762 tokens/s."""
    row = gpus.ROWS["llama-3.1-8b"]
    assert row.seconds(row.settings, 8) == pytest.approx(2 * 8192 / 5762)


def test_the_page_has_the_saved_figures(gpus):
    """`python benchmarks/gpus.py --check`, whose tables need no compiler."""
    page = gpus.PAGE.read_text()
    for name, text in gpus.tables(gpus.Kept(gpus.RESULTS).figures).items():
        assert gpus.marked(name, text) in page, f"run python benchmarks/gpus.py: the table {name} is not up to date"


def test_planned_seconds_are_renewed_without_compiling(gpus, tmp_path, monkeypatch):
    saved = gpus.Kept(gpus.RESULTS).figures[gpus.GATHERED_COMMAND]
    monkeypatch.setattr(gpus, "RESULTS", tmp_path / "figures.json")
    gpus.Kept(gpus.RESULTS)(gpus.GATHERED_COMMAND, lambda: saved | {"planned": 0.0})
    gpus.plan_again(gpus.GATHERED)
    assert gpus.Kept(gpus.RESULTS).figures == {gpus.GATHERED_COMMAND: saved}


def test_saved_figures_are_those_of_rows(gpus):
    """No row was changed without compiling it again, which would leave figures without a row."""
    commands = {row.command for row in gpus.ROWS.values()} | {gpus.GATHERED_COMMAND}
    assert set(gpus.Kept(gpus.RESULTS).figures) <= commands


def test_rows_without_figures_say_so(gpus):
    text = gpus.tables({gpus.ROWS["1.7B"].command: {"failure": "cannot: because."}})["rows"]
    assert "| 1.7B | 32 | 137 TFLOP/s | 3.53 s | | cannot: because. |" in text
    assert "| 3.6B | 64 | 138 TFLOP/s | 3.7 s | | not compiled |" in text


@needs_cuda_plugin
@pytest.mark.slow
def test_the_command_gives_the_saved_figures(gpus, tmp_path, monkeypatch):
    """The cheapest row, compiled by the command that the page shows."""
    monkeypatch.setattr(gpus.offline.host, "start", lambda *_: None)  # the tests' own devices have started already
    row, report = gpus.ROWS[CHEAPEST], tmp_path / "report.json"
    assert gpus.offline.run([*row.command.split()[2:], "--json", str(report)]) == 0
    found, saved = json.loads(report.read_text()), gpus.Kept(gpus.RESULTS).figures[row.command]
    assert found["step_seconds"] == pytest.approx(saved["step"], rel=1e-6)
    assert found["bytes_per_device"] == saved["bytes"]
