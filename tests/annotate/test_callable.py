"""`gspmd.annotate` is a package, and is called as its function: neither hides the other."""

import copy
import functools
import inspect
import pickle
import pydoc
import subprocess
import sys

import jax
import numpy as np
import pytest

import gspmd
import gspmd.annotate as package
import gspmd.annotate.spec
from gspmd import annotate
from gspmd.annotate import annotate as function


def test_every_way_to_import_it():
    assert annotate is gspmd.annotate is package is sys.modules["gspmd.annotate"]
    assert package.annotate is function is gspmd.annotate.annotate
    assert inspect.isfunction(function)
    assert package.Spec is gspmd.Spec is gspmd.annotate.spec.Spec
    assert inspect.ismodule(package)
    assert all(getattr(package, name) is not None for name in package.__all__)
    assert {*package.__all__} <= {*dir(package)}
    with pytest.raises(AttributeError, match="has no attribute 'anotate'"):
        package.anotate  # noqa: B018


@pytest.mark.parametrize("first", [
    "import gspmd", "import gspmd.annotate", "import gspmd.annotate.annotation", "from gspmd.annotate import annotate",
    "import gspmd.annotate.gshard", "from gspmd import annotate", "import gspmd.annotate as a",
])  # fmt: skip
def test_whatever_is_imported_first(first):
    program = f"{first}\nimport gspmd\nprint(callable(gspmd.annotate), gspmd.annotate.Spec.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True Spec\n"


def test_it_is_called_as_the_function(make_mesh):
    value = np.arange(8.0)
    with jax.set_mesh(make_mesh({"x": 8})):
        for call in (gspmd.annotate, function, functools.partial(gspmd.annotate, spec="B_x")):
            placed = call(value) if isinstance(call, functools.partial) else call(x=value, spec="B_x")
            assert placed.sharding.spec == jax.P("x")
        # As an argument of JAX's own functions.
        assert jax.jit(gspmd.annotate, static_argnums=1)(placed, "B_x").sharding.spec == jax.P("x")
        assert len(jax.tree.map(functools.partial(gspmd.annotate, spec="B_x"), [value, value])) == 2
    with pytest.raises(TypeError, match="spec"):
        gspmd.annotate(value)


def test_its_signature_and_its_help():
    assert inspect.signature(gspmd.annotate) == inspect.signature(function)
    text = pydoc.plain(pydoc.render_doc(gspmd.annotate))
    assert "annotate(x: Any, spec: str | gspmd.annotate.spec.Spec) -> Any" in text
    assert "Place an array on the mesh of `jax.set_mesh` as its spec says." in text


def test_it_is_sent_and_copied():
    assert pickle.loads(pickle.dumps(gspmd.annotate)) is package
    assert copy.copy(gspmd.annotate) is copy.deepcopy(gspmd.annotate) is package
    assert pickle.loads(pickle.dumps(function)) is function
    assert hash(gspmd.annotate) == hash(package)
