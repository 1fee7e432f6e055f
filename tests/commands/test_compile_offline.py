"""scripts/compile_offline.py: what it prints and writes, its exit codes, and one message for bad input."""

import importlib
import json
import re
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import gspmd
from gspmd.audit import topology
from gspmd.training import ConfigError
from tests.audit.offline.plugins import needs_cuda_plugin

ROOT = Path(__file__).parents[2]
TINY = ["--config", str(ROOT / "configs" / "tiny.toml"), "--layout", "weight-stationary-2d", "--length", "16"]
V4 = ["--topology", "tpu-v4:2x2x1"]
SLOTS = ["--mesh", "x=4", "--batch", "4", "--layout", "gshard", "--set", "moe.hidden=GXC_xF"]
SLOTS += ["--set", "moe.expert_input=GXC_xE", "--set", "moe.in_via=GXC_xE, XEF", "--set", "moe.out_via=GXC_xF, XFE"]

needs_libtpu = pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("gspmd.commands.compile")


@pytest.fixture
def run(script, capfd, monkeypatch):
    """A function of flags that returns the exit code, stdout, and stderr without box drawing and line breaks."""
    monkeypatch.setattr(script.host, "start", lambda *_: None)  # the test's own host devices have started already

    def call(*flags):
        try:
            code = script.run([*TINY, *flags])
        except SystemExit as stop:
            code = stop.code
        out, err = capfd.readouterr()
        return code, out, " ".join(re.sub("[│╭╮╰╯─]", " ", err).split())

    return call


@needs_libtpu
def test_a_model_that_fits_is_reported_and_written_down(run, tmp_path):
    files = {name: tmp_path / f"{name}.png" for name in ("json", "hlo", "trace", "gantt")}
    flags = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    code, out, err = run(*V4, "--batch", "8", *flags)
    assert code == 0
    assert "fits" in out and "planned and compiled" in out and "timeline of jit_forward" in out  # noqa: PT018
    stages = re.findall(r"(\w+ing)\b", err)  # each again after some seconds, on a slow machine
    assert list(dict.fromkeys(stages)) == ["planning", "lowering", "compiling", "reading"]
    figures = json.loads(files["json"].read_text())
    assert figures["fits"] is True
    wanted = "bytes_per_device step_seconds compute_seconds hidden_seconds exposed_seconds wire_bytes flops mfu"
    assert all(figures[name] is not None for name in wanted.split())
    assert files["hlo"].read_text().startswith("HloModule jit_forward")
    assert json.loads(files["trace"].read_text())["traceEvents"]
    assert files["gantt"].read_bytes().startswith(b"\x89PNG")


@needs_libtpu
@pytest.mark.slow
def test_a_training_step_is_compiled_with_its_state_donated(run, tmp_path):
    code, out, _ = run(*V4, "--phase", "train", "--batch", "8", "--json", str(tmp_path / "a.json"))
    assert code == 0
    assert "timeline of jit_step" in out
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["output_bytes"] < figures["argument_bytes"] / 10


@needs_libtpu
def test_a_training_step_has_the_adapters_and_the_dtypes_of_its_run(script):
    def state(*flags):
        settings = script.parse([*TINY, *V4, "--phase", "train", "--batch", "8", *flags])
        mesh = script.mesh_of(settings, topology(settings.topology))
        _, (found, *_), _ = script.program_of(settings, script.layout_of(settings), mesh)
        return found

    bytes_of = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    whole, adapters = state(), state("--lora.rank", "2")
    added = [path for path in adapters.params if path.endswith(("_a", "_b"))]
    assert added
    assert adapters.params.keys() - added == whole.params.keys()
    assert bytes_of(adapters.optimizer) < bytes_of(whole.optimizer) / 4
    assert bytes_of(state("--frozen", "blocks.*").optimizer) < bytes_of(whole.optimizer)
    assert bytes_of(state("--parameter-dtype", "bfloat16").params) < 0.6 * bytes_of(whole.params)


@needs_libtpu
def test_a_model_that_does_not_fit_ends_with_1_and_the_largest_buffers(run, tmp_path):
    file = tmp_path / "a.json"
    code, out, _ = run(*V4, "--batch", "8", "--model.feed-forward", "1073741824", "--json", str(file))
    assert code == 1
    assert "does not fit" in out
    assert len(re.findall(r"│ (argument|temporary)", out)) == 5
    assert json.loads(file.read_text())["fits"] is False


@needs_libtpu
def test_slices_are_tried_from_the_smallest_on(script, monkeypatch):
    tried = []

    def mesh_of(settings, target):
        if target.num_devices == 8:
            raise gspmd.LayoutError("8 does not divide")

    def compiled(settings, target):
        tried.append(target.num_devices)
        return SimpleNamespace(fits=target.num_devices >= 32, on=target.name)

    monkeypatch.setattr(script, "mesh_of", mesh_of)
    monkeypatch.setattr(script, "compiled", compiled)
    assert script.smallest(script.parse(TINY), topology("tpu-v4:4x4x4")).on == "tpu-v4:2x4x4"
    assert tried == [4, 16, 32]


@needs_libtpu
def test_where_no_slice_will_do_the_first_says_why(script, monkeypatch):
    refuse = lambda _, target: (_ for _ in ()).throw(gspmd.LayoutError(f"{target.num_devices} do not divide"))  # noqa: E731
    monkeypatch.setattr(script, "mesh_of", refuse)
    with pytest.raises(ConfigError, match=r"no mesh on any slice of tpu-v4.*\n.*On tpu-v4:2x2x1: 4 do not divide"):
        script.smallest(script.parse(TINY), topology("tpu-v4:4x4x4"))


@needs_libtpu
@pytest.mark.parametrize("mesh", ["x=4,y=4,z=4", None])
def test_a_mesh_has_to_divide_the_sizes_of_its_phase(script, mesh):
    """The one key/value head of a decode layout is whole where that of training is sharded."""
    flags = ["--config", "palm-540b", "--layout", "megatron-1d", "--phase", "decode", "--batch", "512"]
    settings = script.parse([*flags, *(["--mesh", mesh] if mesh else [])])
    with pytest.raises(gspmd.LayoutError, match="K has size 1"):
        script.layout_of(settings).check(settings.model.sizes(512, 1), {"x": 4, "y": 4, "z": 4})
    shape = script.mesh_of(settings, topology("tpu-v4:4x4x4")).shape
    assert shape["y"] * shape["z"] > 1


@needs_libtpu
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_one_position_is_whole_where_prompts_are_cut_along_their_length(script, phase):
    cut = {"ffn.hidden": "B_xL_yF_z", "ffn.in_via": "B_xL_yE, EF_z", "ffn.out_via": "B_xL_yF_z, F_zE"}
    changes = [flag for change in cut.items() for flag in ("--set", "=".join(change))]
    flags = [*TINY, *V4, "--phase", phase, "--batch", "8", "--layout", "weight-gathered-xy", *changes]
    settings = script.parse([*flags, "--mesh", "x=2,y=2,z=1"])
    assert script.mesh_of(settings, topology(settings.topology)).shape["y"] == 2


@needs_libtpu
@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (("B_xL_yF_z", "B_xyLF_z"), "none of the 2 alternatives of .ffn. fits"),
        ("B_xLE", "ffn.hidden must have dimensions B, L and F"),
    ],
)
def test_what_decodes_is_checked_as_it_runs(script, monkeypatch, hidden, message):
    """Alternatives are chosen for one position, and then L is whole; a spec of other dimensions is a fault."""
    layout = gspmd.Layout.load("megatron-1d").override({"ffn.hidden": hidden})
    monkeypatch.setattr(script, "layout_of", lambda _: layout)
    settings = script.parse([*TINY, *V4, "--phase", "decode", "--batch", "2", "--mesh", "x=2,y=2,z=1"])
    with pytest.raises(gspmd.LayoutError, match=message):
        script.mesh_of(settings, topology(settings.topology))


@needs_libtpu
def test_a_decoded_token_reads_all_that_the_cache_has_room_for(script, monkeypatch):
    found = []
    monkeypatch.setattr(script, "compile_offline", lambda *_, flops, **__: found.append(flops))
    for length in ("16", "64"):
        flags = [*TINY, *V4, "--phase", "decode", "--batch", "8", "--room", "64"]
        settings = script.parse([*flags, "--length", length])
        script.compiled(settings, topology(settings.topology))
    assert found == [8 * settings.model.flops_per_token(64) / 3] * 2


@needs_libtpu
def test_weights_and_cache_are_compiled_as_int8(script):
    flags = [*TINY, *V4, "--phase", "decode", "--batch", "8"]
    settings = script.parse([*flags, "--weights", "int8", "--cache", "int8"])
    mesh = script.mesh_of(settings, topology(settings.topology))
    _, (weights, _, cache), options = script.program_of(settings, script.layout_of(settings), mesh)
    assert weights["blocks.0.attention.w_q"].dtype == cache.keys[0].dtype == cache.values[0].dtype == "int8"
    assert options["donate_argnums"] == (2,)
    with pytest.raises(ConfigError, match="--cache int8 is for --phase encode, prefill and decode, not forward"):
        script.parse([*TINY, *V4, "--cache", "int8"])


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--phase", "encode"], "--phase encode is for an encoder–decoder, and this model has no encoder."),
        (["--source-length", "8"], "--source-length is for an encoder–decoder, and this model has no encoder."),
        (["--source-length", "-8"], "source_length must not be negative, but is -8."),
        (
            ["--model.encoder-layers", "2", "--phase", "encode", "--room", "32"],
            "--phase encode fills the cache of a s",
        ),
    ],
)
def test_sources_are_for_encoders(script, flags, fault):
    with pytest.raises(ConfigError, match=fault):
        script.parse([*TINY, *V4, *flags])


def test_flops_of_two_stacks_are_those_of_each_phase(script):
    """A source is encoded once: its operations are those of encoding, and of no other phase of serving."""
    flags = ["--config", "switch-base-8", *V4]
    of = {
        phase: script.flops_of_row(script.parse([*flags, "--phase", phase])) for phase in ("encode", "prefill", "train")
    }
    assert of["encode"] + of["prefill"] == pytest.approx(of["train"])
    assert of["encode"] > 2 * of["prefill"], "512 tokens beside 128"


@needs_libtpu
def test_stages_of_a_layout_with_alternatives_are_those_of_its_mesh(script, tmp_path):
    file = tmp_path / "stages.toml"
    file.write_text('base = "pipeline"\n\n[ffn]\nw_gate = ["E_xF_yz", "EF_yz"]\n')
    flags = ["--phase", "train", "--layout", str(file), "--batch", "8"]
    settings = script.parse([*TINY, *flags, "--topology", "tpu-v4:2x2x1", "--mesh", "p=2,x=2", "--model.layers", "4"])
    assert dict(script.mesh_of(settings, topology("tpu-v4:2x2x1")).shape) == {"p": 2, "x": 2, "y": 1, "z": 1}


@needs_libtpu
@pytest.mark.slow
def test_the_smallest_slice_is_found(run, tmp_path):
    file = tmp_path / "a.json"
    # 32 times a dense block and eight experts: 864 matrices of 32 · 2^22 numbers, 232 GB in bfloat16: 58 on each of 4
    # chips, 29 on each of 8
    model = ["--model.layers", "64", "--model.feed-forward", str(2**22)]
    assert run(*V4, *model, "--smallest", "--batch", "8", "--length", "1", "--json", str(file))[0] == 0
    figures = json.loads(file.read_text())
    assert figures["fits"] is True
    assert figures["topology"] == "tpu-v4:2x2x2"
    assert figures["argument_bytes"] == pytest.approx(2 * 864 * 32 * 2**22 / 8, rel=1e-2)


#: The papers' widths on 64 chips with an expert on each, and one layer of experts or a loop of two; whole, they take
#: many minutes to compile.
PAPERS = [("gshard-600b", 2), ("switch-c", 4)]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), PAPERS, ids=[row[0] for row in PAPERS])
def test_the_papers_experts_send_what_is_planned(script, name, layers):
    flags = ["--config", str(ROOT / "configs" / f"{name}.toml"), "--layout", "gshard", "--topology", "tpu-v5p:4x4x4"]
    flags += ["--phase", "train", "--batch", "64", "--length", "512"]
    settings = script.parse([*flags, "--model.moe.experts", "64", "--model.layers", str(layers)])
    report = script.compiled(settings, topology(settings.topology))
    assert report.fits
    comparison = report.ledger.compare(report.plan)
    assert comparison.agrees
    crossing = {key: both for key, both in comparison.totals.items() if key[0] == "all-to-all"}
    assert crossing
    assert all(planned == found > 0 for planned, found in crossing.values())
    # There and back, forward and for the gradient, in every layer of experts; and where forward is computed again.
    count = sum(report.plan.by_kind_and_axes()[key][0] for key in crossing)
    assert count >= 4 * settings.model.expert_layers


BAD = {
    "topology": (["--topology", "tpu-v9:4x4"], "there is no topology 'tpu-v9:4x4': no chip is called 'tpu-v9'."),
    "card": (["--topology", "h1000:8"], "no chip is called 'h1000'. Did you mean 'h100'?"),
    "nodes": (["--topology", "h100:8x3"], "but 8x3 uses only 3 of each node. Did you mean 'h100:3x8'?"),
    "mesh": ([*V4, "--mesh", "x=4,y=4,z=8", "--batch", "128"], "128"),
    "mesh of other devices": ([*V4, "--mesh", "x=3"], "The sizes have to multiply to 4, as in"),
    "layout that is searched": (
        ["--layout", "auto"],
        "Only --layout of gspmd train and of gspmd generate takes it; gspmd search writes a layout to a file.",
    ),
    "batch": (["--batch", "0"], "--batch must be positive, but is 0."),
    "length": (["--length", "-1"], "--length must be positive, but is -1."),
    "config": (["--config", "nope.toml"], "cannot read config 'nope.toml': there is no such file."),
    "layout": (["--layout", "nope"], "no layout is called 'nope'."),
    "layout on no slice": (
        ["--smallest", "--phase", "prefill", "--prefill-layout", "nope"],
        "no layout is called 'nope'.",
    ),
    "uneven": ([*V4, "--batch", "3"], "dimension B has size 3, which"),
    "devices": (["--devices", "8"], "leave --platform, --devices and --distributed out."),
    "processes": (["--distributed", "auto"], "leave --platform, --devices and --distributed out."),
    "picture": (["--gantt", "a.pdf"], "--gantt writes a PNG file, whose name ends in .png, not 'a.pdf'."),
    "folder": (["--json", "nowhere/a.json"], "--json nowhere/a.json: there is no folder 'nowhere'."),
    "no file": (["--hlo", "/"], "--hlo /: it is a folder; give a file."),
    "one file for two": (
        ["--json", "a.json", "--trace", "./a.json"],
        "--json and --trace would write one file, a.json.",
    ),
    "two answers": (["--smallest", "--mesh", "x=4"], "--smallest tries slices of many sizes; leave --mesh out."),
    "serving with flags of training": (
        ["--phase", "decode", "--moments", "int8", "--microbatches", "2", "--lora.rank", "4", "--schedule", "gpipe"],
        "--phase decode trains nothing; leave --microbatches, --schedule, --moments, --lora.rank out.",
    ),
    "a pattern": ([*V4, "--phase", "train", "--frozen", "embeding.*", "--batch", "8"], "matches no parameter."),
    "rounds on no slice": (
        ["--smallest", "--phase", "train", "--layout", "zero-2", "--rounds", "2"],
        "rounds is 2, but no layout here has stages; set rounds to 1.",
    ),
    "slots of experts that do not divide": (
        [*V4, *SLOTS, "--phase", "train", "--model.moe.capacity-factor", "1.1"],
        "C is the number of slots of an expert for each group: model.moe.capacity_factor is 1.1.",
    ),
    "slots that do not divide in what is compiled as evaluation is": (
        [*V4, *SLOTS, "--model.moe.capacity-factor", "2", "--model.moe.evaluation-capacity-factor", "1.1"],
        "C is the number of slots of an expert for each group: model.moe.evaluation_capacity_factor is 1.1.",
    ),
    "adapters of a model without": (
        ["--model.lora.rank", "8"],
        "this configuration has no adapters; write --lora.rank.",
    ),
    "experts of a model without": (
        ["--config", "palm-8b", "--model.moe.experts", "4"],
        "this configuration has no experts; write [model.moe] in a TOML file, and name it with --config.",
    ),
    "experts that choose among tokens that are not there yet": (
        [*V4, "--phase", "decode", "--batch", "8", "--model.moe.router", "expert-choice"],
        "router expert-choice cannot generate text",
    ),
    "phase": (
        ["--phase", "forwrd"],
        "must be one of 'forward', 'train', 'encode', 'prefill', 'decode', but is 'forwrd'. Did you mean 'forward'?",
    ),
}


@needs_libtpu
@pytest.mark.parametrize(("flags", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_message(run, monkeypatch, script, flags, message):
    monkeypatch.setattr(script, "compile_offline", lambda *_, **__: pytest.fail("bad input was compiled"))
    code, _, err = run(*flags)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_without_libtpu_it_says_what_to_install(run, monkeypatch):
    module = importlib.import_module("gspmd.audit.offline.libtpu")
    missing = lambda name: (_ for _ in ()).throw(module.metadata.PackageNotFoundError(name))  # noqa: E731
    version = module.metadata.version
    monkeypatch.setattr(module.metadata, "version", lambda name: missing(name) if name == "libtpu" else version(name))
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    code, _, err = run("--topology", "tpu-v4:2x2x2")
    assert code == 2
    assert "libtpu, the compiler for TPUs, is not installed." in err


@needs_cuda_plugin
def test_a_model_is_compiled_for_gpus(run, tmp_path):
    file = tmp_path / "figures.json"
    flags = ["--topology", "h100:8", "--phase", "decode", "--batch", "16", "--json", str(file)]
    code, out, _ = run(*flags)
    assert code == 0
    assert "8 h100 devices" in out
    assert "note: times are modelled" in out
    figures = json.loads(file.read_text())
    assert figures["topology"] == "h100:8"
    assert figures["bytes_per_device"] < figures["hbm_bytes"] == 80e9
