"""`--layout auto`: found for the devices at hand, kept, written beside the run, and the same results as on one."""

import json
import shlex
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rich.console import Console

import gspmd_models as models
from gspmd import host
from gspmd.annotate import Spec
from gspmd.commands import main
from gspmd.commands.automatic import kept, searched
from gspmd.commands.automatic.found import FoundLayout, line_of_use
from gspmd.commands.file import File
from gspmd.hardware.chips import chip
from gspmd.layouts import Layout
from gspmd.layouts.rules.keys import KEYS
from gspmd.moe import MoEConfig
from gspmd.search import Search, pricing
from gspmd.search.answers import factorings
from gspmd.search.answers.options import Options
from gspmd.training import ShardingConfig, TrainingConfig
from gspmd.training.checkpoints import load_parameters
from gspmd.training.config import parse_mesh
from gspmd_models import checkpoints
from gspmd_models.search.serving import ServingProblem
from gspmd_models.search.workload import Workload

CONFIG = models.ModelConfig(
    embed=32, layers=1, heads=4, kv_heads=2, head_size=8, feed_forward=64, tied=False, scale_embedding=False
)
SMALL = 1.2e-5
"""A share of memory in which the model above is not whole on each of four devices."""


@pytest.fixture(autouse=True)
def devices(monkeypatch, tmp_path):
    """Devices of this process, whose backend has started; and a cache of its own."""
    start = lambda count=None, platform=None, *, host_devices=8: jax.devices()[: count or host_devices]  # noqa: E731
    monkeypatch.setattr(host, "start", start)
    monkeypatch.setenv("GSPMD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def searches(monkeypatch):
    """The meshes of each search."""
    asked, find = [], searched.find

    def counted(spaces, *args):
        asked.append([*spaces])
        return find(asked[-1], *args)

    monkeypatch.setattr(searched, "find", counted)
    return asked


def found(mesh="", count=4, model=CONFIG, out="", **training):
    """The layout of a training run."""
    asked = TrainingConfig(**{"batch": 8, "length": 16, "out": str(out)} | training)
    file = File(model, asked, sharding=ShardingConfig(mesh=mesh))
    return searched.for_training(Console(quiet=True), file, jax.devices()[:count])


def serving(count=4, model=CONFIG, prompts=4, samples=2, room=512, mesh="", beams=0):
    """The layout of a generation."""
    job = {"samples": samples, "beams": beams, "chunk": 128, "cache_length": room}
    return searched.for_serving(
        Console(quiet=True), model, mesh, jax.devices()[:count], "float32", [[*b"text" * 120]] * prompts, 8, **job
    )


def shards_weights(layout):
    """Whether some parameter is in parts."""
    return any(Spec.parse(layout[key]).used for key in layout.table if KEYS[key].kind == "parameter")


# -- what is asked, and what is kept -----------------------------------------------------------------------------------


def test_every_mesh_of_the_devices_is_tried_once():
    for devices in range(1, 65):
        made = [tuple(mesh.values()) for mesh in factorings(devices, chip("tpu-v4"))]
        threes = {
            tuple(sorted(size for size in (a, b, devices // (a * b)) if size > 1)) or (1,)
            for a in range(1, devices + 1) for b in range(1, devices + 1) if devices % (a * b) == 0
        }  # fmt: skip
        assert {tuple(sorted(shape)) for shape in made} == threes
        assert len(made) == len(threes)
    assert {"x": 2, "y": 8} in factorings(16, chip("h100"))  # two nodes of 8: eight of each other order
    assert {"x": 8, "y": 2} in factorings(16, chip("h100"))


@pytest.mark.slow
def test_a_second_run_takes_what_the_first_one_found(searches):
    first, second = found(), found()
    assert not pricing._tables  # a run has no use for them
    assert len(searches) == 1
    assert len(searches[0]) == 2  # x=4, and x=2,y=2
    assert (first.text, first.mesh, first.seconds) == (second.text, second.mesh, second.seconds)
    assert (first.before, second.before) == (False, True)
    for other in ({"batch": 16}, {"length": 32}, {"dtype": "bfloat16"}, {"microbatches": 2}, {"count": 2}):
        assert not found(**other).before, other
    assert len(searches) == 6
    assert not found(mesh="x=4").before
    assert len(searches[-1]) == 1
    assert serving().text == serving().text
    assert len(searches) == 8


@pytest.mark.slow
def test_what_is_kept_in_part_or_cannot_be_kept_is_searched_again(searches, tmp_path, monkeypatch):
    place = found().place
    assert place.startswith(f"kept in {tmp_path / 'cache' / 'layouts'}")
    path = kept.host.cache_folder("layouts") / place.rpartition("/")[2]
    assert Layout.load(path)["ffn.w_in"] == found().layout["ffn.w_in"]
    path.with_suffix(".json").write_text("{")
    assert not found().before
    path.write_text(path.read_text().replace("[ffn]", "[ffn"))
    assert not found().before
    path.unlink()
    assert not found().before
    assert len(searches) == 4
    monkeypatch.setenv("GSPMD_CACHE", str(path))  # a file, and no folder
    assert found().place.startswith(f"not kept: cannot write to '{path}/layouts': Not a directory")


def test_the_line_and_the_file_say_what_it_is():
    mine = found(mesh="x=2,y=2,z=1")
    assert mine.mesh == "x=2,y=2"
    said = str(mine)
    assert said.startswith("Layout: found in ")
    assert f", for mesh x=2,y=2. Predicted: {1e6 * mine.seconds['training step']:.3g} µs for a training step" in said
    assert " on tpu-v4, which stands in for devices that are not listed. The file is kept in " in said
    assert str(found(mesh="x=2,y=2")).startswith("Layout: found by an earlier run, in ")
    assert "step       batch 8, length 16, float32, remat full\n" in mine.text
    assert mine.text.startswith("# A layout for training on 4 devices, found by gspmd train --layout auto.\n")
    assert "# to be used    gspmd train ... --layout FILE --mesh x=2,y=2\n" in mine.text


def test_an_interrupt_of_the_search_is_one_of_the_run(monkeypatch):
    monkeypatch.setattr(searched, "find", lambda *args: SimpleNamespace(interrupt=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        found()


@pytest.mark.turns(2)
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_prompts_are_read_with_the_weights_and_the_cache_to_decode(samples, block):
    embed = {"serial": 1024, "parallel": 256}[block]  # so that the phases are not alike
    model = models.ModelConfig(
        embed=embed, layers=2, heads=16, kv_heads=1, head_size=64, feed_forward=4096, block=block
    )  # fmt: skip
    mine = serving(8, model, 8, samples, 512)
    assert set(mine.seconds) == {"step of decoding", "prefill of 128 tokens"}
    layout, shape = mine.layout, parse_mesh(mine.mesh)
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(jax.sharding.AxisType.Explicit,) * len(shape))
    prompts = [[*b"text" * 120]] * 8
    sizes = models.decoding.make_batch(model, layout, layout, mesh, prompts, 8, samples=samples, cache_length=512).sizes
    assert (sizes.rows, sizes.chunk, sizes.room) == (8 * samples, 128, 512)
    section = layout.overrides.get("prefill", {})
    assert section or samples > 1, "both phases are alike"
    assert {sizes.prefill[key] for key in section} == {*section.values()}
    # What the file says costs what is predicted: activations that were found for other weights would not.
    for phase, rows, length in (("decode", sizes.rows, 512), ("prefill", sizes.prefill_rows, 128)):
        workload = Workload(model, chip("tpu-v4"), rows, length, "float32", phase, room=512)
        said = "step of decoding" if phase == "decode" else "prefill of 128 tokens"
        problem = ServingProblem(workload, shape)
        assert cost(problem, layout.phase(phase)) == pytest.approx(mine.seconds[said])


@pytest.mark.parametrize("prompts", [1, 2])
def test_the_beams_of_a_prompt_are_priced_in_the_rows_that_are_run(prompts):
    """All beams of a prompt lie on one device: more devices than prompts along B would add rows without a text."""
    model = models.ModelConfig(embed=64, layers=1, heads=4, kv_heads=1, head_size=64, feed_forward=64)
    mine = serving(4, model, prompts, 1, 512, "x=4", beams=4)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    ids = [[*b"text" * 120]] * prompts
    batch = models.decoding.make_batch(model, mine.layout, mine.layout, mesh, ids, 8, beams=4, cache_length=512)
    assert batch.sizes.rows == 4 * prompts
    assert f" {4 * prompts} texts of {'2 prompts' if prompts > 1 else '1 prompt'}, " in mine.text
    # Samples are rows of their own, which devices may divide.
    layout = serving(4, model, prompts, 4, 512, "x=4").layout
    assert models.decoding.cache_spec(layout.phase("decode")).axes_of("B") == ("x",)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [1, 200], ids=["sources alone", "beginnings"])
def test_sources_are_encoded_with_the_weights_and_the_cache_to_decode(prompt):
    model = models.ModelConfig(
        embed=512, layers=2, encoder_layers=2, heads=16, kv_heads=16, head_size=64, feed_forward=4096,
        positions="relative", attention_scale=1.0,
    )  # fmt: skip
    mine = searched.for_serving(
        Console(quiet=True), model, "x=4,y=2", jax.devices()[:8], "float32", [[5] * (prompt - 1)] * 2, 8,
        sources=[[7] * 200] * 2, samples=1, chunk=128, cache_length=512,
    )  # fmt: skip
    read = {"prefill of 128 tokens"} if prompt > 1 else set()
    assert {*mine.seconds} == {"step of decoding", "source of 224 tokens", *read}
    layout, shape = mine.layout, parse_mesh(mine.mesh)
    reading = layout.phase("prefill")
    assert "encoder" in layout.overrides, "both stacks are alike"
    both = reading.override(layout.overrides["encoder"])  # An encoding has the lines of both.
    for phase, said, of in (
        ("decode", "step of decoding", layout.phase("decode")),
        ("encode", "source of 224 tokens", both),
        ("prefill", "prefill of 128 tokens", reading),
    ):
        if said in mine.seconds:
            length = {"decode": 512, "prefill": 128, "encode": 1}[phase]
            workload = Workload(model, chip("tpu-v4"), 2, length, "float32", phase, room=512, source_length=224)
            assert cost(ServingProblem(workload, shape), of) == pytest.approx(mine.seconds[said])


def cost(problem, layout):
    """The seconds of a layout by a problem; norms lie as the residual."""
    without = {}
    for name, options in Options(problem).texts.items():
        without[name] = [
            number
            for number, texts in enumerate(options)
            if any(
                (layout.cache(key) if section == "cache" else layout[key]) != text
                for (section, key), text in texts.items()
                if not key.endswith(".norm")
            )
        ]
    return Search(problem.problem()).best(without=without).seconds


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def train(tmp_path, monkeypatch, capfd):
    """A function of flags that runs `gspmd train`, and returns its exit code and what it said."""
    (tmp_path / "dense.toml").write_text(
        "[model]\nembed = 32\nlayers = 1\nheads = 4\nkv_heads = 2\nhead_size = 8\nfeed_forward = 64\n"
        "tied = false\nscale_embedding = false\n[training]\nbatch = 8\nlength = 16\n"
    )
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question. " * 200)
    monkeypatch.chdir(tmp_path)

    def run(*flags, begun=False):
        code = main.main(["train", *([] if begun else run.base), *flags])
        return code, "".join(capfd.readouterr())

    run.base = ["--config", "dense.toml", "--data", "text.txt", "--steps", "4", *_SHORT]
    return run


_SHORT = ["--save-every", "2", "--validation-every", "0", "--final-validation-batches", "1", "--sample-bytes", "0"]


def losses(out):
    """The loss after each step, the last one of each that was written."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def parameters(out, step):
    """Return everything that a checkpoint holds, whole."""
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
    return load_parameters(out, step, models.arrays(models.abstract(CONFIG, Layout.load("replicated"), mesh)))


@pytest.mark.slow
def test_a_run_keeps_its_layout_and_resumes_with_it(train, tmp_path, monkeypatch, searches):
    monkeypatch.setattr(searched, "SHARE", SMALL)
    code, said = train("--layout", "auto", "--devices", "4", "--out", "auto")
    assert code == 0
    assert "Layout: found in " in said
    out, settings = tmp_path / "auto", json.loads((tmp_path / "auto" / "config.json").read_text())["sharding"]
    assert shards_weights(Layout.load(out / "layout.toml"))
    assert settings["layout"] == "auto"
    assert settings["mesh"] in ("x=4", "x=2,y=2")
    begun, before, file = losses(out), parameters(out, 4), (out / "layout.toml").read_text()
    assert len(begun) == 4
    # A search would now find another layout, since everything fits; and what was found is no longer kept.
    monkeypatch.setattr(searched, "SHARE", 0.9)
    monkeypatch.setenv("GSPMD_CACHE", str(tmp_path / "other"))
    code, said = train("--resume", "2", "--out", "auto", begun=True)
    assert code == 0
    assert "Layout: the run's own, auto/layout.toml." in said
    assert len(searches) == 1
    assert losses(out) == begun
    assert (out / "layout.toml").read_text() == file
    jax.tree.map(np.testing.assert_array_equal, parameters(out, 4), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "share"),
    [("", SMALL), ("[model.moe]\nexperts = 4\nevery = 1\nrouter = 'top-k'\ndispatch = 'dropless'\n", 1.0)],
    ids=["dense", "dropless"],
)
def test_losses_are_those_of_one_device_also_from_the_file(train, tmp_path, monkeypatch, table, share):
    config = tmp_path / "dense.toml"
    config.write_text(config.read_text().replace("[training]", f"{table}[training]"))
    monkeypatch.setattr(searched, "SHARE", share)
    assert train("--layout", "replicated", "--devices", "1", "--out", "one")[0] == 0
    assert train("--layout", "auto", "--mesh", "x=2,y=2", "--out", "auto")[0] == 0
    made, used = (
        shlex.split(line.split("    ", 1)[1])
        for line in (tmp_path / "auto" / "layout.toml").read_text().splitlines()
        if line.startswith(("# found with", "# to be used"))
    )
    assert made == ["gspmd", "train", *train.base, "--layout", "auto", "--mesh", "x=2,y=2", "--out", "auto"]
    assert used == ["gspmd", "train", *train.base, "--layout", "auto/layout.toml", "--mesh", "x=2,y=2"]
    assert train(*used[2:], "--out", "again", begun=True)[0] == 0
    wanted = [*losses(tmp_path / "one").values()]
    assert len(wanted) == 4
    np.testing.assert_allclose([*losses(tmp_path / "auto").values()], wanted, rtol=1e-5)
    assert losses(tmp_path / "again") == losses(tmp_path / "auto")


@pytest.fixture
def generate(tmp_path, monkeypatch, capsys):
    """A function (model, share of memory) that continues prompts in a layout that is found for four devices.

    Its text is that of one device; returned are the flags without a layout, and the file of what was found.
    """

    def run(config, share, *more):
        mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
        model = models.build(config, Layout.load("replicated"), mesh, jax.random.key(0))
        checkpoints.save(model, tmp_path / "public", tokenizer=checkpoints.byte_tokenizer())
        flags = ["generate", "--checkpoint", str(tmp_path / "public"), "--tokens", "8"]
        flags += [flag for text in ("def ", "class ", "import ", "for x in ") for flag in ("--prompt", text)]
        flags += more or ("--temperature", "0")
        assert main.main([*flags, "--layout", "replicated"]) == 0
        wanted = capsys.readouterr().out
        monkeypatch.setattr(searched, "SHARE", share)
        assert main.main([*flags, "--layout", "auto", "--devices", "4"]) == 0
        text, said = capsys.readouterr()
        assert text == wanted
        return flags, said.partition("The file is kept in ")[2].partition(".toml")[0] + ".toml"

    return run


@pytest.mark.slow
def test_text_is_that_of_one_device(generate):
    flags, path = generate(CONFIG, 3.6e-6)
    assert shards_weights(Layout.load(path))
    assert main.main([*flags, "--layout", path, "--devices", "4", "--explain"]) == 0


@pytest.mark.slow
def test_text_of_experts_is_that_of_one_device(generate):
    _, path = generate(replace(CONFIG, layers=2, moe=MoEConfig(experts=4, every=1, router="top-k")), 7e-6)
    layout = Layout.load(path)
    assert any(Spec.parse(layout[f"moe.{name}"]).used for name in ("w_in", "w_out"))


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--target-prompt", "xyz", "--beams", "2"]], ids=["sources alone", "beginnings"])
def test_text_from_sources_is_that_of_one_device(generate, more):
    two = replace(CONFIG, encoder_layers=1, kv_heads=4, positions="relative", attention_scale=1.0)
    _, path = generate(two, 5.5e-6, *more)
    layout = Layout.load(path)
    assert shards_weights(layout)


# -- what cannot be had ------------------------------------------------------------------------------------------------

BAD = {
    "mesh against devices": (["--mesh", "x=4", "--devices", "8"], "it has 4 devices, but --devices asks for 8. Leave"),
    "too large": (
        ["--model.layers", "300", "--devices", "2"],
        "cannot find a layout:\n  the smallest, on mesh x=2, holds ",
    ),
    "a change to it": (["--relayout", "2=auto", "--devices", "4"], "no layout is called 'auto'."),
}


@pytest.mark.parametrize(("flags", "words"), BAD.values(), ids=BAD)
def test_what_cannot_be_searched_is_one_message(train, flags, words, monkeypatch):
    monkeypatch.setattr(searched, "SHARE", SMALL)
    code, said = train("--layout", "auto", *flags)
    assert code == 2
    assert words in said


NOISY = "[model.moe]\nexperts = 4\nevery = 1\nrouter = 'noisy-top-k'\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "table"),
    [(["--frozen", "embedding.*"], ""), (["--moments", "int8"], ""), (["--lora.rank", "4"], ""), ([], NOISY)],
    ids=["frozen", "moments of eight bits", "adapters", "a noisy router"],
)
def test_what_has_no_tables_of_its_own_is_read_from_the_program(train, tmp_path, flags, table):
    config = tmp_path / "dense.toml"
    config.write_text(config.read_text().replace("[training]", f"{table}[training]"))
    code, said = train("--layout", "auto", "--mesh", "x=4", *flags)
    assert code == 0, said
    assert "Layout found" in said or "layout" in said


def test_a_flag_of_several_lines_stays_in_its_comment(tmp_path):
    """A prompt of code has several lines, and a comment of TOML has one."""
    flags = ["--layout", "auto", "--prompt", "def f():\n\tit's \\", "--seed", "1"]
    used = f"# {line_of_use('gspmd train', '')}\n"
    FoundLayout(f'{used}base = "megatron-1d"\n').write(tmp_path, "gspmd train", flags)
    path = tmp_path / "layout.toml"
    Layout.load(path)
    written = next(line for line in path.read_text().splitlines() if line.startswith("# found with"))
    shell = f"printf '%s\\0' {written.split('    ', 1)[1]}"
    said = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout
    assert said.split("\0")[2:-1] == flags
