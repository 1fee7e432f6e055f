"""`gspmd train` with a tokenizer, and from a public checkpoint: what it begins with, and what it leaves."""

import dataclasses
import io
import json
import shlex
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as kinds

import gspmd_models as models
from gspmd import host
from gspmd.annotate import PlanError
from gspmd.commands import configs, header, main, train
from gspmd.commands.flags import parse
from gspmd.commands.programs import begin
from gspmd.commands.settings import RunSettings, adapted, of_checkpoint
from gspmd.commands.source import Source
from gspmd.layouts import Layout
from gspmd.training import TrainingConfig
from gspmd.training.arrangement import Arrangement, arrange
from gspmd.training.checkpoints import kept_settings, save_settings
from gspmd.training.reporting import metrics
from gspmd.training.step import building
from gspmd.training.toml import ConfigError
from gspmd_models import checkpoints
from gspmd_models.finetuning.config import LoraConfig

TEXT = "the quick brown fox jumps over the lazy dog, and then it sleeps. "
CONFIG = models.ModelConfig(
    vocabulary=320, embed=16, layers=2, heads=8, kv_heads=8, head_size=8, feed_forward=32, tied=False,
    scale_embedding=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    """Devices of this process, whose backend has started."""
    monkeypatch.setattr(host, "start", lambda count, platform, host_devices=8: jax.devices()[: count or host_devices])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with tokenizer.json, texts.jsonl and a public checkpoint."""
    folder = tmp_path_factory.mktemp("files")
    made = Tokenizer(kinds.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=letters, show_progress=False
        ),
    )
    made.save(str(folder / "tokenizer.json"))
    texts = "".join(json.dumps({"text": TEXT * (1 + number % 7), "id": number}) + "\n" for number in range(200))
    (folder / "texts.jsonl").write_text(texts)
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
    model = models.build(CONFIG, Layout.load("replicated"), mesh, jax.random.key(0))
    tokenizer = checkpoints.tokenizer(folder / "tokenizer.json")
    tokenizer.ends = frozenset({0})
    checkpoints.save(model, folder / "public", tokenizer=tokenizer, length=512)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_begins_with_the_weights_of_the_checkpoint_in_any_layout(files, make_mesh, dtype):
    given = RunSettings(checkpoint=str(files / "public"), training=TrainingConfig(dtype=dtype))
    settings = of_checkpoint(given, [])
    assert settings.model == dataclasses.replace(CONFIG, context_length=512)
    assert settings.training.tokenizer == str(files / "public")
    layout = Layout.load("zero-3")
    model = begin(Console(), settings, Arrangement(0, layout, make_mesh(layout.mesh_for(8))))
    whole, _ = checkpoints.load(files / "public", layout, make_mesh(layout.mesh_for(8)), "float32")
    for (path, value), wanted in zip(models.arrays(model).items(), models.arrays(whole).values(), strict=True):
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, wanted, err_msg=path)
    assert model.dtype == dtype


def test_what_a_checkpoint_does_not_give_comes_from_the_settings(files):
    given = RunSettings(checkpoint=str(files / "public"), model=models.ModelConfig(remat="dots", offload=True))
    found = of_checkpoint(given, []).model
    assert (found.remat, found.offload) == ("dots", True)


def test_a_run_at_longer_sequences_writes_as_long_texts(files):
    given = RunSettings(checkpoint=str(files / "public"), training=TrainingConfig(length=1024))
    assert of_checkpoint(given, []).model.context_length == 1024


def test_the_text_at_the_end_is_as_long_as_the_context_has_room_for():
    def fitted(context: int | None, **flags):
        said, model = io.StringIO(), dataclasses.replace(models.ModelConfig(), context_length=context)
        settings = RunSettings(model=model, training=TrainingConfig(**flags))
        found = train.with_fitting_sample(Console(file=said, width=500), settings, None)
        return found.training.sampled, said.getvalue()

    assert fitted(None) == fitted(260) == (256, "")  # the prompt is "def "
    said = "The text at the end has 60 new tokens, not 256 (--sample-bytes): the model was made for 64, and the prompt"
    assert fitted(64) == (60, f"{said} has 4.\n")
    assert fitted(64, prompt="abcdef", sample_bytes=58) == (58, "")
    assert fitted(3, sample_bytes=0) == (0, "")
    with pytest.raises(ConfigError, match="the prompt has 4 tokens, and the model was made for at most 4 "):
        fitted(4)


def test_a_run_keeps_how_its_checkpoint_generates(files, tmp_path):
    given, kept = tmp_path / "given", tmp_path / "run" / "tokenizer"
    shutil.copytree(files / "public", given)
    (given / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "eos_token_id": [0, 7]}')
    (given / "chat_template.jinja").write_text("{{ messages[0].content }}")
    kept.parent.mkdir()
    for checkpoint in (str(given), "gone"):  # at the start, and at a resume
        train.keep_tokenizer(Console(), kept, checkpoints.tokenizer(given), checkpoint)
        assert checkpoints.sampling(kept) == models.Sampling(temperature=0.6, top_p=0.9)
        again = checkpoints.tokenizer(kept)
        assert (again.ends, again.chat_text([{"role": "user", "content": "Hi!"}])) == ({0, 7}, "Hi!")


def test_what_cannot_begin_with_a_checkpoint_is_one_message(files):
    given, free = RunSettings(checkpoint="DIR"), ["--model.remat", "False", "--model.no-offload"]
    with pytest.raises(ConfigError) as error:
        of_checkpoint(given, ["--from", "DIR", *free, "--model.layers=3", "--model.moe.k", "2"])
    assert error.value.faults == (
        "the checkpoint 'DIR' already gives the model; leave out --model.layers, --model.moe.k.",
    )


def test_a_resume_may_name_the_checkpoint_that_its_run_began_with(files, monkeypatch, tmp_path):
    monkeypatch.chdir(files)
    out = TrainingConfig(resume=True, out=str(tmp_path))
    begun = of_checkpoint(RunSettings(checkpoint="public"), ["--from", "public"])
    (tmp_path / "config.json").write_text(json.dumps(kept_settings(begun)))
    by_folder = dataclasses.replace(begun, training=out)
    assert of_checkpoint(by_folder, ["--resume", "--from", "public", "--model.remat", "none"]) == by_folder
    file = RunSettings(checkpoint="public", training=out)  # which has a model of its own, that does not count
    by_file = of_checkpoint(file, ["--config", "finetune", "--from", "public", "--resume"])
    assert (by_file.model, by_file.training.tokenizer) == (begun.model, "public")
    for settings, began in (
        (begun, f"with the checkpoint '{files}/public'"),
        (RunSettings(), "with random weights"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(kept_settings(settings)))
        with pytest.raises(ConfigError, match=f"began {began}, not with 'other'. Leave --from out, or begin"):
            of_checkpoint(dataclasses.replace(file, checkpoint="other"), ["--resume", "--from", "other"])


def test_a_run_without_a_checkpoint_is_not_taken_for_a_public_one(tmp_path):
    save_settings(tmp_path, kept_settings(RunSettings()))
    with pytest.raises(ConfigError, match=r"it has no checkpoint\.\n  Name another run, or begin it again:"):
        Source.at(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(
        checkpoints.CheckpointError, match=r"config\.json is missing\. Give the folder of a checkpoint, or of a run"
    ):
        Source.at(tmp_path)


def test_no_damage_of_the_tokenizer_that_a_run_keeps_is_believed(files, tmp_path):
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    settings = of_checkpoint(RunSettings(checkpoint=str(files / "public")), [])
    save_settings(tmp_path, kept_settings(settings))
    kept, tokenizer = tmp_path / "tokenizer", checkpoints.tokenizer(files / "public")
    said = io.StringIO()
    for _ in range(2):  # at the start, and at a resume
        train.keep_tokenizer(Console(file=said, width=500), kept, tokenizer, str(files / "public"))
    assert Source.at(tmp_path).tokenizer.encode(TEXT) == tokenizer.encode(TEXT)
    assert said.getvalue() == ""
    for path in sorted(kept.iterdir()):
        content = path.read_bytes()
        flipped = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
        for damaged in (flipped, content[: len(content) // 2], b""):
            path.write_bytes(damaged)
            with pytest.raises(
                ConfigError, match=f"tokenizer' is damaged: .*{path.name}.*\n  Resume the run, which writes it again"
            ):
                Source.at(tmp_path)
            train.keep_tokenizer(Console(file=said, width=500), kept, tokenizer, str(files / "public"))
            assert "tokenizer' is damaged, and written again: " in said.getvalue()
            assert path.read_bytes() == content
        assert Source.at(tmp_path).tokenizer.encode(TEXT) == tokenizer.encode(TEXT)


def test_a_resumed_run_has_the_adapters_that_it_is_told_of():
    asked, other = LoraConfig(rank=2), LoraConfig(rank=4)
    begun = adapted(RunSettings(lora=asked))
    assert begun.model.lora == asked
    again = dataclasses.replace(begun, training=TrainingConfig(resume=True))
    for lora, wanted in ((asked, asked), (other, other), (LoraConfig(), None)):
        assert adapted(dataclasses.replace(again, lora=lora)).model.lora == wanted
    with pytest.raises(ConfigError, match=r"write \[lora\] in place of \[model.lora\]"):
        adapted(RunSettings(model=models.ModelConfig(lora=asked)))


IN_STAGES = ["--config", "tiny", "--layout", "pipeline", "--mesh", "p=2,x=4"]
SLOTS = ["--config", "tiny", "--mesh", "x=8", "--set", "moe.expert_input=GXC_xE", "--set", "moe.hidden=GXC_xF"]
SLOTS += ["--set", "moe.in_via=GXC_xE, XEF", "--set", "moe.out_via=GXC_xF, XFE"]
BAD = {
    "no checkpoint": (["--from", "nowhere"], "there is no such folder."),
    "a tokenizer that is none": (["--tokenizer", "texts.jsonl"], "texts.jsonl cannot be read: "),
    "no tokenizer": (["--tokenizer", "none.json"], "none.json is missing; "),
    "too many tokens": (
        ["--tokenizer", "tokenizer.json"],
        "the tokenizer 'tokenizer.json' has 300 tokens, but model.vocabulary is 256; it must be at least as large.",
    ),
    "another field": (
        ["--data-field", "body", "--data", "texts.jsonl"],
        "'texts.jsonl': line 1 has no field 'body'; it has 'text', 'id'. See --data-field.",
    ),
    "rounds without stages": (
        ["--config", "tiny", "--rounds", "2"],
        "rounds is 2, but no layout here has stages; set rounds to 1.",
    ),
    "a schedule without stages": (
        ["--config", "tiny", "--schedule", "gpipe"],
        "schedule is gpipe, but no layout here has stages; leave it out.",
    ),
    "microbatches too small for a layout": (
        ["--config", "tiny", "--batch", "16", "--microbatches", "4"],
        "That is the size of a microbatch, of which there are M=4.",
    ),
    "microbatches of a pipeline that are too small for its layout": (
        ["--layout", "pipeline", "--mesh", "p=2,x=3", "--batch", "12", "--microbatches", "3"],
        "dimension B has size 4, which mesh axis x (size 3) does not divide.",
    ),
    "a via that a partial gradient does not survive": (
        ["--config", "tiny", "--layout", "zero-2", "--devices", "8", "--set", "ffn.in_via=BLE, EF_x"],
        "    ffn.in_via = BLE, EF_x\n",
    ),
    "a via that gradients of several microbatches do not survive": (
        [
            "--config",
            "tiny",
            "--layout",
            "data-parallel",
            "--devices",
            "2",
            "--batch",
            "16",
            "--microbatches",
            "2",
            "--set",
            "ffn.in_via=BLE, EF_x",
        ],
        "    ffn.in_via = BLE, EF_x\n",
    ),
    "rows that would move": (
        ["--config", "tiny", "--devices", "8", "--model.moe.dispatch", "dropless", "--set", "moe.hidden=GXCF_x"],
        "    moe.hidden = GXCF_x\n",
    ),
    "slots of experts that do not divide": (
        [*SLOTS, "--model.moe.capacity-factor", "1.1"],
        "  C is the number of slots of an expert for each group: model.moe.capacity_factor is 1.1.",
    ),
    "slots that do not divide in evaluation": (
        [*SLOTS, "--model.moe.capacity-factor", "4", "--model.moe.evaluation-capacity-factor", "1.1"],
        "  C is the number of slots of an expert for each group: model.moe.evaluation_capacity_factor is 1.1.",
    ),
    "layers that make no rounds": (
        [*IN_STAGES, "--model.layers", "12", "--rounds", "2", "--microbatches", "2"],
        "6 stacked layers do not make 2 rounds of 2 stages.\n"
        "  Their number must be a multiple of 4: change layers, rounds or mesh.",
    ),
    "microbatches that make no rounds": (
        [*IN_STAGES, "--model.layers", "16", "--rounds", "2"],
        "1 microbatches cannot go 2 times round 2 stages: they go in groups of 2.\n",
    ),
    "frozen parameters in stages": (
        [*IN_STAGES, "--model.layers", "4", "--frozen", "embedding.*"],
        "the stages of a pipeline train all parameters; leave out [lora] and frozen, or the stages.",
    ),
    "lowering xla in stages under Auto axes": (
        [*IN_STAGES, "--model.layers", "4", "--axis-types", "auto", "--set", "lowering.attention=xla"],
        "    [lowering] attention = xla\n",
    ),
    "lowering xla in a backward pass of two parts": (
        [*IN_STAGES, "--model.layers", "4", "--schedule", "zero-bubble", "--lowering", "xla"],
        "    [lowering] default = xla\n",
    ),
    "an option of no compiler": (
        ["--config", "tiny", "--compiler-options", "xla_cpu_fastest=true"],
        "cannot compile with xla_cpu_fastest=true on cpu.\n  The compiler says: No such compile option",
    ),
    "PaLM on bytes": (["--config", "palm-8b"], "but is 256128. Give the file of its tokenizer with --tokenizer."),
    "PaLM in this machine": (
        ["--config", "palm-8b", "--tokenizer", "tokenizer.json", "--data", "texts.jsonl"],
        " of optimizer state on each of 8 devices, which has ",
    ),
    "a length of a billion": (
        ["--config", "tiny", "--length", "1000000000", "--batch", "64", "--data", "texts.jsonl"],
        " GB of tokens on each of 8 devices, which has ",
    ),
}


@pytest.mark.parametrize(("flags", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_one_message(files, flags, words, monkeypatch, capsys):
    monkeypatch.chdir(files)
    assert main.main(["train", *flags]) == 2
    said = capsys.readouterr().err
    assert words in said or (words.startswith("'texts") and "... and 180 more." in said)
    assert "Traceback" not in said


def test_what_only_tracing_knows_is_said_before_the_text_is_read(monkeypatch, capsys, tmp_path):
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")  # Which is refused when it is read.

    def refused(state, tokens, key):
        raise PlanError("only tracing knows.")

    monkeypatch.setattr(building, "training_step", lambda model, layout, update: refused)
    assert main.main(["train", "--config", "tiny", "--data", str(tmp_path / "bytes.txt")]) == 2
    assert "only tracing knows." in capsys.readouterr().err


def test_the_header_has_the_schedule_of_every_layout():
    flags = ["--layout", "zero-2", "--model.layers", "16", "--microbatches", "4", "--rounds", "2", "--batch", "16"]
    changes = ["--relayout", "1=pipeline:p=2,x=4", "--relayout", "2=pipeline:p=4,x=2"]
    settings = parse(RunSettings, [*flags, *changes], default="tiny", find=configs.find)
    sizes = settings.model.sizes(settings.training.batch, settings.training.length)
    console = Console(width=160, record=True, file=io.StringIO())
    header.show_run(console, settings, arrange(settings.training, settings.sharding, sizes), "")
    said = " ".join(console.export_text().split())
    assert "after step 1 1f1b of 4 microbatches 2 times through 2 stages, bubble 11%; " in said
    assert "after step 2 1f1b of 4 microbatches 2 times through 4 stages, bubble 27%" in said


@pytest.mark.slow
def test_palm_trains_on_tokens(files, monkeypatch, tmp_path):
    monkeypatch.chdir(files)
    small = {"embed": 16, "layers": 1, "heads": 8, "head-size": 8, "feed-forward": 32, "vocabulary": 320}
    flags = [word for name, size in small.items() for word in (f"--model.{name}", str(size))]
    flags += ["--tokenizer", "tokenizer.json", "--data", "texts.jsonl", "--layout", "zero-3", "--sample-bytes", "2"]
    flags += ["--steps", "12", "--batch", "8", "--length", "16", "--out", str(tmp_path / "run")]
    assert main.main(["train", "--config", "palm-8b", *flags, "--final-validation-batches", "2"]) == 0
    rows = metrics.read(tmp_path / "run")
    assert rows[11]["cross_entropy"] < rows[0]["cross_entropy"] - 0.2


@pytest.mark.slow
def test_a_checkpoint_is_trained_further_and_given_back(files, monkeypatch, tmp_path, capsys):
    """At a rate of nothing the tensors are the same, bit by bit, and so is what config.json says."""
    monkeypatch.chdir(files)
    flags = ["--data", "texts.jsonl", "--steps", "2", "--batch", "8", "--length", "16", "--sample-bytes", "4"]
    flags += ["--layout", "weight-stationary-2d", "--learning-rate", "1e-30", "--out", str(tmp_path / "run")]
    assert main.main(["train", "--from", "public", *flags, "--final-validation-batches", "0"]) == 0
    assert main.main(["train", "--resume", "--out", str(tmp_path / "run"), "--steps", "3", "--sample-bytes", "0"]) == 0
    assert main.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
    layout = Layout.load("replicated")
    before, after = (checkpoints.load(at, layout, mesh, "float32")[0] for at in ("public", tmp_path / "out"))
    for (path, value), wanted in zip(models.arrays(after).items(), models.arrays(before).values(), strict=True):
        np.testing.assert_array_equal(value, wanted, err_msg=path)
    folders = files / "public", tmp_path / "out"
    given, kept = (json.loads((folder / "config.json").read_text()) for folder in folders)
    assert kept == given
    given, kept = map(checkpoints.tokenizer, folders)
    assert kept.encode(TEXT) == given.encode(TEXT)
    assert kept.ends == given.ends == {0}
    capsys.readouterr()
    assert main.main(["generate", "--checkpoint", str(tmp_path / "run"), "--prompt", "the quick", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("the quick")


@pytest.mark.slow
def test_the_commands_of_the_closing_box_run(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(TEXT * 200)
    flags = [
        "--config",
        "tiny",
        "--data",
        "a.txt",
        "--steps",
        "2",
        "--out",
        "my run",
        "--final-validation-batches",
        "1",
    ]
    assert main.main(["train", *flags, "--sample-bytes", "4", "--profile", "2:2"]) == 0
    shown = capsys.readouterr().out
    assert "none, and so no MFU" in shown
    (trace,) = tmp_path.glob("my run/profile/plugins/profile/*/*.xplane.pb")
    scopes = b"embedding", b"attention", b"ffn", b"moe", b"output", b"optimizer"
    assert [scope for scope in scopes if scope not in trace.read_bytes()] == []
    box = shown[shown.index("── done in ") :]
    again, sample = (shlex.split(line) for line in box.splitlines() if line.strip().startswith("gspmd "))
    assert again == ["gspmd", "train", "--resume", "--out", "my run", "--steps", "4"]
    assert main.main([*again[1:], "--sample-bytes", "0"]) == 0
    assert [row["step"] for row in metrics.read("my run")] == [1, 2, 2, 3, 4, 4]
    capsys.readouterr()
    assert main.main([*sample[1:], "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("def ")
