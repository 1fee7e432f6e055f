"""The notebooks of docs/tour/ run, and print what is kept in them."""

from importlib import util

import pytest

from tests.audit.offline.plugins import HAS_CUDA_PLUGIN

pytest.importorskip("nbclient", reason="nbclient, which runs notebooks, is not installed")
pytest.importorskip("ipykernel", reason="ipykernel, which runs notebooks, is not installed")

from nbformat.v4 import new_code_cell, new_notebook, new_output

from tests.notebooks import NAMES, TOUR, outputs, read, run

SLOW = {"looped", "own-model", "will-it-fit"}  # they compile for TPUs and GPUs, search, or train
TPU = {"looped", "will-it-fit"}


@pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.slow if each in SLOW else ()) for each in NAMES])
def test_a_notebook_prints_what_it_keeps(name):
    if name in TPU and util.find_spec("libtpu") is None:
        pytest.skip("libtpu, the TPU compiler, is not installed")
    if name == "will-it-fit" and not HAS_CUDA_PLUGIN:
        pytest.skip("JAX's plugin for CUDA, the compiler for GPUs, is not installed")
    now, kept = outputs(run(name)), outputs(read(name))
    assert now == kept, f"renew the outputs with `python -m tests.notebooks {name}`, and look at them"


def test_every_notebook_is_of_the_tour():
    assert {path.stem for path in TOUR.glob("*.ipynb")} == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_kept_without_errors_or_folders(name):
    cells = [cell for cell in read(name).cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in cells)
    for cell in cells:
        assert not any(output.output_type == "error" for output in cell.outputs)
        assert not any("/tmp/" in str(output) or str(TOUR.parents[1]) in str(output) for output in cell.outputs)
        assert not any("ipykernel_" in str(output) for output in cell.outputs)  # Sources are named `In[5]:7`.


def test_a_kept_picture_that_is_stale_is_noticed():
    def shown(picture):
        data = {"text/plain": "<Figure>", "text/html": f"<svg>{picture} in 2.5 s</svg>"}
        return new_notebook(cells=[new_code_cell("show", outputs=[new_output("display_data", data)])])

    assert outputs(shown("new")) != outputs(shown("old"))
    assert outputs(shown("new")) == ["<Figure><svg>new …</svg>"]
