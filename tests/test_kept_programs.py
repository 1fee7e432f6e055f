"""Compiled programs that are kept: where, and that what is read back is what was compiled."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from gspmd import host

NAMES = ("jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_compilation_cache_include_metadata_in_key")


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """JAX's settings as at its start, and its cache on, until the end of the test; nothing is compiled meanwhile."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    jax.config.update("jax_enable_compilation_cache", True)
    monkeypatch.setenv("GSPMD_CACHE", str(tmp_path))
    yield host.keep_compiled
    for name, value in before.items():
        jax.config.update(name, value)


def test_they_are_in_the_cache_folder(kept, tmp_path, monkeypatch):
    said = kept()
    folder = Path(jax.config.jax_compilation_cache_dir)
    assert said == f"kept in {folder}"
    assert folder.parent == tmp_path / "compiled"
    assert folder.is_dir()
    assert jax.config.jax_compilation_cache_include_metadata_in_key
    monkeypatch.delenv("GSPMD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert host.cache_folder("compiled") == Path("/somewhere/gspmd/compiled")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert host.cache_folder("tokens") == Path.home() / ".cache" / "gspmd" / "tokens"


def test_a_folder_of_the_users_own_comes_first(kept, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    assert kept() == f"kept in {tmp_path / 'own'}"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert not (tmp_path / "compiled").exists()


def test_they_can_be_left_unkept(kept, tmp_path):
    assert kept(False) == "not kept"
    assert not jax.config.jax_enable_compilation_cache
    assert kept() == "not kept"  # as where JAX_ENABLE_COMPILATION_CACHE is false
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_written_ends_nothing(kept, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GSPMD_CACHE", str(tmp_path / "file"))
    assert kept().startswith(f"not kept: cannot write to '{tmp_path / 'file'}/compiled/")
    assert not jax.config.jax_enable_compilation_cache


_PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from gspmd import host
host.use_host_devices(8)
host.keep_compiled()
import jax, jax.numpy as jnp, numpy as np, gspmd
from jax._src import monitoring
hits = []
monitoring.register_event_listener(lambda name, **more: hits.append(name) if name.endswith("cache_hits") else None)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
mesh = jax.make_mesh((4, 2), ("x", "y"))
x, w = (np.random.default_rng(0).normal(size=(16, 16)).astype("float32") for _ in range(2))
with jax.set_mesh(mesh):
    placed = gspmd.annotate(x, "B_xE_y"), gspmd.annotate(w, "E_xF_y")
    loss = lambda x, w: jnp.sin(gspmd.einsum("B_xE_y, E_xF_y -> BF_xy", x, w, lowering="blocking")).sum()
    step = jax.jit(jax.value_and_grad(loss)).lower(*placed).compile()
    value, gradient = step(*placed)
print(float(value).hex(), np.asarray(gradient).tobytes().hex())
print(gspmd.ledger(step).to_json())
print(len(hits), file=sys.stderr)
"""


@pytest.mark.slow
def test_what_is_read_back_is_what_was_compiled(tmp_path):
    """The same bits, and the same ledger, whose op names and source lines are part of what is kept; no other word."""
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_PLATFORMS": "cpu"}

    def run(folder: Path, most: int = resource.RLIM_INFINITY):
        return subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(most)], env=environment | {"GSPMD_CACHE": str(folder)},
            capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip

    first, second = run(tmp_path / "kept"), run(tmp_path / "kept")
    assert first.stdout == second.stdout
    assert first.stderr == "0\n"
    assert second.stderr == "1\n"
    kept = [*(tmp_path / "kept" / "compiled").glob("*/*-cache")]
    assert len(kept) == 1
    for path in kept:
        path.write_bytes(path.read_bytes()[:100])
    damaged = run(tmp_path / "kept")
    assert (damaged.stdout, damaged.stderr) == (first.stdout, "0\n")
    full = run(tmp_path / "full", most=5000)
    assert (full.stdout, full.stderr) == (first.stdout, "0\n")
