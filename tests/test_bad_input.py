"""Whatever stands in a file that is read, or behind a flag: taken, or refused by one error of ours, in bounded time.

A few draws are fast, and many slow ones, four times as many with DRAWS=4; DRAWS_SEED draws others.
"""

import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

import gspmd
import gspmd_models as models
from gspmd.commands import configs
from gspmd.commands.automatic import kept
from gspmd.commands.automatic.found import FoundLayout
from gspmd.commands.file import File
from gspmd.commands.flags import EarlyFlags, _carried_over
from gspmd.commands.settings import RunSettings
from gspmd.layouts import Layout, presets
from gspmd.layouts.read import text_of
from gspmd.moe import MoEConfig
from gspmd.training import ConfigError, data
from gspmd.training.checkpoints import kept_settings, load_settings, restore
from gspmd.training.data.sources import Faults, records
from gspmd.training.reporting import metrics
from gspmd.training.toml import from_mapping, load_toml
from gspmd_models import checkpoints
from gspmd_models.checkpoints.files import Files
from tests.commands.outcomes import Commands
from tests.references import mutations, volume

OURS = (ConfigError, gspmd.SpecError, gspmd.PlanError, gspmd.LayoutError, checkpoints.CheckpointError)
CONFIG = models.ModelConfig(vocabulary=320, embed=16, layers=2, feed_forward=32, tied=False, scale_embedding=False)
#: Seconds that a file of some kB may take, on a machine that does other things too.
LIMIT = 20


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """A public checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint") / "public"
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
    model = models.build(CONFIG, Layout.load("replicated"), mesh, jax.random.key(0))
    checkpoints.save(model, folder, tokenizer=checkpoints.byte_tokenizer(), length=512)
    return folder


def as_layout(path: Path) -> None:
    layout = Layout.load(path)
    layout.check(CONFIG.sizes(8, 16), layout.mesh_for(8))


def as_settings_of_a_run(path: Path) -> None:
    from_mapping(RunSettings, _carried_over(load_settings(path.parent), EarlyFlags()))


def as_json_lines(path: Path) -> None:
    faults = Faults()
    list(records(path, "text", faults))
    faults.refuse("cannot read:")


def as_metrics(path: Path) -> None:
    metrics.read(path.parent)
    metrics.best_validation(path.parent)


def as_model(path: Path) -> None:
    checkpoints.model_config(path.parent)
    checkpoints.tokenizer(path.parent)


def as_tokenizer(path: Path) -> None:
    if b'"merges"' not in path.read_bytes() or b"[]" in path.read_bytes():  # of others the library prints its panic
        checkpoints.tokenizer(path.parent).encode("hello")


def as_index_of_tokens(path: Path) -> None:
    """Tokens that are there are the right ones, whatever the index says."""
    text = path.parents[2] / "text.txt"
    corpus = data.load([str(text)], cache=path.parents[1])
    assert bytes(corpus.train[:5]) == b"hello"
    assert len(corpus.train) + len(corpus.validation) == text.stat().st_size
    corpus.describe()


def as_kept_layout(path: Path) -> None:
    if (found := kept.load(path.stem)) is not None:
        str(found)


SETTINGS = kept_settings(RunSettings(model=models.ModelConfig(moe=MoEConfig(experts=4))))
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TENSOR = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
LINE = {"step": 3, "loss": 2.5, "val_bits_per_byte": 1.0, "load": [[1, 2]]}
RUN = {"data": {"stream": {}, "position": {}, "skipped": 0}, "shapes": {"a": [1]}, "optimizer": {}}


def files_of(folder: Path, public: Path) -> dict[str, tuple[Path, object, Callable[[Path], object]]]:
    """Every kind of file that is read: where it lies, what stands in it, as text or as JSON has it, and its reader."""
    own = shutil.copytree(public, folder / "public")
    shards = shutil.copytree(public, folder / "shards")
    (shards / "model.safetensors").rename(shards / "part.safetensors")
    (folder / "text.txt").write_text("hello world\n" * 3000)
    data.load([str(folder / "text.txt")], cache=folder / "tokens")
    tokens = next((folder / "tokens").glob("*/index.json"))
    found = kept.save("asked", FoundLayout("[mesh]\n", "x=8", {"training step": 1.0}, "cpu", 2.0)).place
    asked = Path(found.removeprefix("kept in ")).with_suffix(".json")
    for name in ("run", "runs/checkpoints/5/run"):
        (folder / name).mkdir(parents=True)
    config = json.loads((own / "config.json").read_text())
    config |= {"rope_scaling": ROPE | {"original_max_position_embeddings": 512}}
    names = dict.fromkeys(Files(public).tensors, "part.safetensors")
    tokenizer = json.loads((own / "tokenizer.json").read_text())
    shipped = {path.stem: path.read_text() for path in configs.FOLDER.glob("*.toml")}
    cases = {f"layout {name}": (folder / "layout.toml", text_of(name), as_layout) for name in presets()}
    for name, text in sorted(shipped.items()):
        settings = RunSettings if name in ("default", "finetune", "tiny") else File
        cases[f"config {name}"] = folder / "config.toml", text, lambda path, of=settings: load_toml(of, path)
    return cases | {
        "settings of a run": (folder / "run" / "config.json", SETTINGS, as_settings_of_a_run),
        "metrics": (folder / "run" / "metrics.jsonl", LINE, as_metrics),
        "JSON lines": (folder / "lines.jsonl", {"text": "abc", "id": 3}, as_json_lines),
        "index of tokens": (tokens, json.loads(tokens.read_text()), as_index_of_tokens),
        "kept layout": (asked, json.loads(asked.read_text()), as_kept_layout),
        "metadata of a run's checkpoint": (
            folder / "runs/checkpoints/5/run/metadata", RUN, lambda path: restore._read_run(path.parents[1])
        ),
        "config.json": (own / "config.json", config, as_model),
        "generation_config.json": (own / "generation_config.json", {"eos_token_id": [1, 2]}, as_model),
        "tokenizer_config.json": (own / "tokenizer_config.json", {"eos_token": {"content": "a"}}, as_model),
        "tokenizer.json": (own / "tokenizer.json", tokenizer, as_tokenizer),
        "index of tensors": (shards / "model.safetensors.index.json", {"weight_map": names}, as_shards),
        "header of tensors": (folder / "run" / "model.safetensors", {"a": TENSOR}, lambda path: Files(path.parent)),
    }  # fmt: skip


def as_shards(path: Path) -> None:
    Files(path.parent)
    checkpoints.model_config(path.parent)


def mutant(name: str, content: object, draw: random.Random) -> bytes:
    """Return what stands in a file of this kind, in another way."""
    if isinstance(content, str):
        return mutations.other_toml(content, draw) if draw.random() < 0.8 else mutations.damaged(content.encode(), draw)
    if name in ("metrics", "JSON lines"):
        lines = [mutations.other_json(content, draw) if draw.random() < 0.3 else json.dumps(content).encode()] * 3
        return b"\n".join([*lines, json.dumps(content).encode(), b""])
    plain = json.dumps(content).encode()
    changed = mutations.other_json(content, draw) if draw.random() < 0.8 else mutations.damaged(plain, draw)
    return changed if name != "header of tensors" else len(changed).to_bytes(8, "little") + changed + bytes(16)


@pytest.mark.parametrize("count", [4, pytest.param(volume.scaled(100), marks=pytest.mark.slow)])
def test_any_file_is_read_or_refused_by_one_message(count, public, tmp_path, monkeypatch):
    monkeypatch.setenv("GSPMD_CACHE", str(tmp_path / "cache"))
    for name, (path, content, read) in files_of(tmp_path, public).items():
        before = path.read_bytes() if path.exists() else None
        draw = random.Random(f"{volume.SEED} {name}")
        for number in range(count if name in ("config.json", "header of tensors") else max(2, count // 4)):
            changed = mutant(name, content, draw)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(changed)
            began = time.monotonic()
            try:
                read(path)
            except OURS:
                pass
            except BaseException as error:
                (keep := Path(os.environ.get("GSPMD_KEEP", tmp_path)) / "failed").write_bytes(changed)
                error.add_note(f"reading a changed {name}, case {number}, kept in {keep}")
                raise
            assert time.monotonic() - began < LIMIT, f"{name}: {changed[:200]!r}"
        if before is not None:
            path.write_bytes(before)
        elif path.name != "metrics.jsonl":
            path.unlink()


# -- flags -------------------------------------------------------------------------------------------------------------

VALUES = (
    "", "-1", "0", "1", "2", "7", "1.5", "nan", "inf", "-inf", "1e400", str(2**31), str(2**32), str(2**63), str(10**18),
    "9" * 400, "9" * 5000, "10**18", "²", "٣", "1_000", "x", "n" * 5000, "n" * 300 + "/m", "a/../../b", "\udcff",
    "\x1b[31mred\n", "💥", "fifo", "loop", "folder", "binary", "empty", "/dev/zero", "/dev/null", "text.txt/x",
    "loop/x", "=", "x=", "=x", "x=1,x=1", "x=" + "9" * 5000, "x=²", "x=0,y=8", "x=-4,y=-2", "X=4", "x=4;y=2",
    "9" * 5000 + "=zero-3", "2=", "²:3", "1:" + "9" * 5000, "2:1", "ffn.w_in=", "ffn.w_in=" + "E_x" * 2000,
    "None", "true", "[", "*", "**", "[" * 3000, "{}", "%s", "{0}", " ", "--", "gshard", "float32", "int8", "tpu",
)  # fmt: skip
EQUATIONS = (
    "(" * 5000, "B" * 5000, "->" * 3000, "B_{" + "x" * 5000 + "}E -> BE", "A" * 60_000, "B_x " * 3000, "é", "B_²",
    "+" * 5000, "BLE_xyz, (E_xF_yz" * 500, ", ".join(["BE"] * 2000), "", "\udcff",
)  # fmt: skip
#: What is refused in the end, so that nothing is trained or loaded.
COMMANDS = {
    "train": ["--config", "tiny", "--steps", "2", "--data", "none.txt"],
    "generate": ["--checkpoint", "none", "--prompt", "hello", "--tokens", "3"],
    "explain": ["BLE_x, E_xF_yz -> BLF_yz", "--mesh", "x=4,y=4,z=4", "--sizes", "B=512,L=1,E=18432,F=73728"],
    "export": ["none", "exported"],
}


@pytest.mark.parametrize("count", [12, pytest.param(volume.scaled(100), marks=pytest.mark.slow)])
def test_any_flag_is_taken_or_refused_by_one_message(count, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "empty").touch()
    draw = random.Random(f"{volume.SEED} flags")
    with Commands() as commands:
        helped = {name: commands(name, "--help", folder=tmp_path).out for name in COMMANDS}
        flags = {name: sorted({*re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", text)}) for name, text in helped.items()}
        for _ in range(count):
            name = draw.choice([*COMMANDS])
            words = [name, *COMMANDS[name]]
            if name == "explain" and draw.random() < 0.5:
                words[1] = draw.choice(EQUATIONS)
            else:
                words += [draw.choice(flags[name]), draw.choice(VALUES)]
            ended = commands(*words, folder=tmp_path, limit=120)
            told = f"{[word[:99] for word in words]}: {ended}"
            assert "Traceback" not in ended.out + ended.err, told
            assert ended.code in (0, 2), told
            assert ended.code == 0 or ended.err.strip(), told
            assert ended.bytes < 2**30, told
