"""The names of a notebook's cells."""

import sys
from types import SimpleNamespace

import pytest

from gspmd.audit.ledgers.entries import short


def _shell(**compiler):
    return SimpleNamespace(compile=SimpleNamespace(**compiler))


@pytest.mark.parametrize(
    ("shell", "shown"),
    [
        (None, "ipykernel_7/12.py:3"),  # IPython is imported, but does not run this program
        (_shell(), "ipykernel_7/12.py:3"),  # before version 8
        (_shell(format_code_name={"/tmp/ipykernel_7/12.py": ("Cell", "In[5]")}.get), "In[5]:3"),
    ],
)
def test_a_source_line_names_its_cell(shell, shown, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert short("/tmp/ipykernel_7/12.py:3") == shown
    assert short("/home/me/project/train.py:8") == "project/train.py:8"


def test_without_ipython_a_source_line_has_the_end_of_its_path(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert short("/tmp/ipykernel_7/12.py:3") == "ipykernel_7/12.py:3"
    assert short("") == ""
