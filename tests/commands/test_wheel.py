"""The wheel, built and installed outside the checkout: its commands run in an empty folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
# What goes into a wheel, and what else the build reads.
PARTS = ("gspmd", "models", "configs", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for part in PARTS:  # a copy: a build leaves files behind
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tree / part)
    flags = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, str(tree)], check=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """A function (*flags) -> (process, folder) that runs the wheel's `gspmd` in an empty folder."""
    site, empty = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("empty")
    flags = ["--no-deps", "--quiet", "--no-compile", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, str(wheel)], check=True)
    environment = os.environ | {"PYTHONPATH": str(site)}

    def call(*argv):
        command = [sys.executable, str(site / "bin" / "gspmd"), *argv]
        return subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True), empty

    where = [sys.executable, "-c", "import gspmd, gspmd_models; print(gspmd.__file__, gspmd_models.__file__)"]
    found = subprocess.run(where, cwd=empty, env=environment, capture_output=True, text=True, check=True).stdout
    assert all(Path(path).is_relative_to(site) for path in found.split())
    return call


def test_it_holds_every_module_and_table_and_nothing_else(wheel):
    files = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {f"gspmd/configs/{path.name}" for path in (ROOT / "configs").glob("*.toml")}
    for room, name in (("gspmd", "gspmd"), ("models", "gspmd_models")):
        found = [
            path
            for path in (ROOT / room).rglob("*")
            if path.suffix in (".py", ".pyi", ".toml") or path.name == "py.typed" or path.parent.name == "static"
        ]
        wanted |= {f"{name}/{path.relative_to(ROOT / room).as_posix()}" for path in found}
    assert files == wanted


def test_a_config_by_name_is_trained(run):
    flags = ["--final-validation-batches", "1", "--sample-bytes", "8", "--devices", "8", "--platform", "cpu"]
    done, folder = run("train", "--config", "tiny", "--steps", "3", *flags)
    assert done.returncode == 0, done.stderr
    rows = (folder / "runs" / "001" / "metrics.jsonl").read_text().splitlines()
    assert sum('"loss"' in row for row in rows) == 3


def test_the_default_config_is_there(run):
    done, _ = run("train", "--data", "none/*.txt")
    assert done.returncode == 2
    assert done.stderr.endswith("ConfigError: cannot find the data:\n  no file matches 'none/*.txt'.\n")
    assert "Traceback" not in done.stderr


def test_a_plan_is_explained(run):
    done, _ = run("explain", "BE_x, EF -> BF", "--mesh", "x=2", "--sizes", "B=8,E=8,F=8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("BE_x, EF -> BF\n")
