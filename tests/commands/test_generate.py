"""`gspmd generate`: public checkpoints and runs of ours, text on standard output, one message for bad input."""

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from io import StringIO

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import gspmd_models as models
from gspmd import host
from gspmd.commands import generate, main, overview
from gspmd.commands.generate_settings import SamplingFlags
from gspmd.display import console as printing
from gspmd.display.units import amount_of_bytes
from gspmd.layouts import Layout
from gspmd.training import Checkpoints, OptimizerConfig
from gspmd.training.checkpoints import save_settings
from gspmd.training.toml import to_mapping
from gspmd_models import checkpoints, decoding, step
from tests.models.decoding import whole

CONFIG = models.ModelConfig(
    embed=32, layers=2, heads=4, kv_heads=2, head_size=8, feed_forward=64, tied=False, scale_embedding=False
)


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    """Devices of this process, whose backend has started."""

    def start(count=None, platform=None, *, host_devices=8):
        return jax.devices()[: count or host_devices]

    monkeypatch.setattr(host, "start", start)


@pytest.fixture(scope="module")
def model():
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
    return models.build(CONFIG, Layout.load("replicated"), mesh, jax.random.key(0))


@pytest.fixture(scope="module")
def public(model, tmp_path_factory):
    """The folder of a public checkpoint."""
    folder = tmp_path_factory.mktemp("public")
    checkpoints.save(model, folder, tokenizer=checkpoints.byte_tokenizer())
    return str(folder)


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """The folder of a run of the same model."""
    return kept(model, tmp_path_factory.mktemp("run"))


def kept(model, folder):
    """Make a folder that of a run, stopped at its first step; return its name."""
    mesh = models.arrays(model)["output.norm"].sharding.mesh
    with jax.set_mesh(mesh):
        state = step.initial_state(model, OptimizerConfig(), 1, mesh)
    with Checkpoints(folder) as saved:
        saved.save(state, {})
    save_settings(folder, {"model": to_mapping(CONFIG), "sharding": {"layout": "data-parallel"}})
    return str(folder)


def run(capsys, *flags):
    """Exit code, standard output and standard error."""
    code = main.main(["generate", *flags])
    return code, *capsys.readouterr()


@pytest.mark.slow
def test_a_checkpoint_and_a_run_of_one_model_continue_alike(capsys, public, trained):
    flags = ["--prompt", "def ", "--tokens", "12", "--temperature", "0"]
    code, text, said = run(capsys, "--checkpoint", public, *flags)
    assert code == 0
    assert text.startswith("def ")
    assert "12 tokens: the first after " in said
    assert said.rstrip().endswith(" tokens per second.")
    assert run(capsys, "--checkpoint", trained, *flags)[:2] == (0, text)


@pytest.mark.slow
def test_flags_of_layouts_chunks_and_int8_reach_the_programs(capsys, public):
    flags = ["--checkpoint", public, "--prompt", "def ", "--tokens", "12", "--temperature", "0"]
    _, text, _ = run(capsys, *flags)
    on_eight = ["--devices", "8", "--layout", "weight-stationary-2d", "--prefill-layout", "weight-gathered-xyz"]
    code, same, said = run(capsys, *flags, *on_eight, "--chunk", "2", "--burst", "5")
    assert (code, same) == (0, text)
    assert "weight-gathered-xyz to read, weight-stationary-2d to decode" in said
    code, near, said = run(capsys, *flags, "--weights", "int8", "--cache", "int8")
    assert code == 0
    assert near.startswith("def ")
    assert run(capsys, *flags, "--unstacked")[:2] == (0, text)
    assert run(capsys, *flags, "--unstacked", "--weights", "int8", "--cache", "int8")[:2] == (0, near)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_between_two_bursts_ends_it_in_one_line(capsys, public, monkeypatch, number):
    def write(console, prompts, texts, bursts, ended):
        next(bursts)
        os.kill(os.getpid(), number)
        next(bursts)

    monkeypatch.setattr(generate, "write", write)
    code, _, said = run(capsys, "--checkpoint", public, "--prompt", "def ", "--tokens", "8", "--burst", "2")
    assert code == 128 + number
    assert said.endswith("\nInterrupted.\n")


def test_several_texts_stand_one_after_another(capsys, public, monkeypatch):
    monkeypatch.setattr(sys, "stdin", StringIO("class "))
    flags = ["--checkpoint", public, "--prompt", "def ", "--prompt-file", "-", "--samples", "2", "--tokens", "5"]
    _, text, said = run(capsys, *flags, "--seed", "3")
    parts = text.split("=== text ")
    assert [part.split("===\n")[0] for part in parts[1:]] == [f"{number} of 4 " for number in (1, 2, 3, 4)]
    assert [part.split("===\n")[1][:4] for part in parts[1:]] == ["def ", "def ", "clas", "clas"]
    assert "20 tokens" in said
    _, alone, _ = run(capsys, "--checkpoint", public, "--prompt", "class ", "--tokens", "5", "--seed", "6")
    assert alone == parts[4].split("===\n")[1]


def test_a_text_ends_before_a_stop_string(capsys, public):
    flags = ["--checkpoint", public, "--prompt", "def ", "--tokens", "12", "--temperature", "0"]
    _, text, _ = run(capsys, *flags)
    stop = text[9:11]
    assert run(capsys, *flags, "--stop", stop)[1] == text[: text.index(stop, 4)] + "\n"


def test_a_text_that_ends_before_an_earlier_one_is_written_once(capsys):
    """Text 2 ends while "a", which may begin a stop string, is held back, and text 1 goes on."""
    texts = [decoding.Text(checkpoints.byte_tokenizer(), b"p", ("ab",)) for _ in range(2)]
    each = ((b"x", b"y", False, False), (b"x", b"a", False, True), (b"x", b"", False, True), (b"x", b"", True, True))
    bursts = (
        decoding.Burst([list(one), list(two)], [*ended], 0.1 * number) for number, (one, two, *ended) in enumerate(each)
    )
    generate.write(printing.console(stderr=True), ["p"], texts, bursts, set())
    assert capsys.readouterr().out == "=== text 1 of 2 ===\npxxxx\n=== text 2 of 2 ===\npya\n"


def test_the_best_texts_of_a_search_are_written_with_their_scores(capsys):
    """Bursts while beams are searched have no tokens, and nothing is written before the scores are known."""
    texts = [decoding.Text(checkpoints.byte_tokenizer(), b"", ()) for _ in range(2)]
    bursts = [
        decoding.Burst([[], []], [False] * 2, 0.1),
        decoding.Burst([[*b"x"], []], [True] * 2, 0.2, [-0.5, -1.25]),
    ]
    generate.write(printing.console(stderr=True), ["p"], texts, iter(bursts), set())
    out, said = capsys.readouterr()
    assert out == "=== text 1 of 2, score -0.5000 ===\npx\n=== text 2 of 2, score -1.2500 ===\np\n"
    assert "1 token: the first after 200 ms." in said


def test_an_id_that_the_tokenizer_does_not_have_ends_a_text_and_is_said(capsys):
    """A model has rows for 300 ids, and the tokenizer of bytes 256 tokens; half a character before it is shown."""
    texts = [decoding.Text(checkpoints.byte_tokenizer(), b"p", ("ab",)) for _ in range(3)]
    each = (
        ([*b"x\xc3", 299, *b"y"], [*b"x"], [*b"ab", 256]),
        ([*b"z"], [*b"y"], [*b"z"]),
    )
    bursts = (decoding.Burst([*tokens], [False, number == 1, False], 0.1) for number, tokens in enumerate(each))
    ended: set[int] = set()
    generate.write(printing.console(200, stderr=True), ["p"], texts, bursts, ended)
    out, said = capsys.readouterr()
    assert out == "=== text 1 of 3 ===\npx\ufffd\n=== text 2 of 3 ===\npxy\n=== text 3 of 3 ===\np\n"
    assert said.endswith("\nText 1 ended at id 299, for which the model has a row but the tokenizer no token.\n")
    assert said.count("ended at id") == 1
    assert ended == {0, 2}
    assert [text.unknown for text in texts] == [299, None, None]


def test_a_text_may_be_longer_than_the_window_of_its_model(capsys, public, tmp_path):
    folder = tmp_path / "windowed"
    shutil.copytree(public, folder)
    entries = json.loads((folder / "config.json").read_text())
    entries |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 12}
    del entries["attention_bias"], entries["mlp_bias"]
    (folder / "config.json").write_text(json.dumps(entries))
    flags = ["--prompt", "def ", "--temperature", "0", "--tokens"]
    whole = run(capsys, "--checkpoint", public, *flags, "9")
    assert run(capsys, "--checkpoint", str(folder), *flags, "9")[:2] == whole[:2]
    assert whole[0] == 0
    code, text, _ = run(capsys, "--checkpoint", str(folder), *flags, "40")
    assert code == 0
    assert text.startswith(whole[1].rstrip("\n"))


def test_explain_loads_nothing(capsys, public, monkeypatch):
    monkeypatch.setattr(checkpoints, "load", None)
    code, text, _ = run(capsys, "--checkpoint", public, "--prompt", "def main()", "--explain", "--devices", "8")
    assert code == 0
    assert "prefill: 2 × 16 tokens, " in text
    assert "decode: 2 × 1 token, " in text
    assert "weights: " in text
    assert "cache: " in text


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """The folder of an encoder–decoder, a public checkpoint with the tokenizer of bytes."""
    config = replace(whole.TRANSLATOR, vocabulary=256, layers=1, encoder_layers=1)
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
    folder = tmp_path_factory.mktemp("translator")
    model = whole.model(config, Layout.load("replicated"), mesh)
    checkpoints.save(model, folder, tokenizer=checkpoints.byte_tokenizer())
    return str(folder), model, mesh


@pytest.mark.slow
def test_a_prompt_is_the_source_of_an_encoder(capsys, translator):
    folder, model, mesh = translator
    flags = ["--checkpoint", folder, "--prompt", "abc", "--prompt", "d", "--tokens", "6"]
    code, text, said = run(capsys, *flags, "--beams", "4", "--target-prompt", "xy")
    with jax.set_mesh(mesh):
        stop = sorted(checkpoints.tokenizer(folder).ends)
        found = models.Generator(model)([[*b"xy"]] * 2, 6, sources=[[*b"abc"], [*b"d"]], beams=4, stop=stop).texts
    first, second = (f"xy{checkpoints.byte_tokenizer().decode(each)}" for each in found)
    assert (code, text) == (0, f"=== text 1 of 2 ===\n{first}\n=== text 2 of 2 ===\n{second}\n")
    assert f"{sum(map(len, found))} tokens: all after " in said


def test_explain_shows_the_encoder(capsys, translator):
    flags = ["--checkpoint", translator[0], "--prompt", "abc", "--prompt", "d", "--explain", "--devices", "8"]
    code, text, _ = run(capsys, *flags)
    assert code == 0
    for line in ("encode: 2 × 16 tokens, ", "prefill: 2 × 16 tokens, ", "decode: 2 × 1 token, "):
        assert line in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "ConfigError: cannot generate text:\n  --checkpoint is missing; it names the folder of the model."),
        (["--checkpoint", "nowhere"], "CheckpointError: cannot read the model of checkpoint 'nowhere':"),
        (["--prompt", ""], "GenerationError: cannot continue an empty prompt (prompt 2 of 2); give at least one token"),
        *(
            (
                ["--temperature", value],
                f"GenerationError: cannot sample:\n  temperature is {float(value)}; it must be a finite number that is "
                "not negative (0 takes the likeliest token)\n",
            )
            for value in ("-1", "nan", "inf")
        ),
        (["--top-k", "-1"], "GenerationError: cannot sample:\n  top_k is -1; it must not be negative"),
        (
            ["--top-p", "nan"],
            "GenerationError: cannot sample:\n  top_p is nan; it must be greater than 0, and at most 1",
        ),
        (
            ["--min-p", "inf"],
            "GenerationError: cannot sample:\n  min_p is inf; it must be between 0 (all tokens) and 1",
        ),
        (["--samples", "1" + "0" * 12], "GenerationError: there are 1000000000000 texts, but a batch has at most"),
        (
            ["--cache-length", "1" + "0" * 12],
            "GenerationError: cache_length is 1000000000000; it must be at most 1048576, the number of positions",
        ),
        (
            ["--tokens", "1" + "0" * 12],
            "GenerationError: a prompt of 4 tokens and 1000000000000 more need 100000000000",
        ),
        (
            ["--cache-length", "9"],
            "GenerationError: a prompt of 4 tokens and 128 more need a cache of 131 tokens, but it has room for 9; "
            "shorten them, or raise cache_length",
        ),
        (
            ["--tokens", "2045"],
            "GenerationError: a prompt of 4 tokens and 2045 more make a text of 2049, but the model was made for at "
            "most 2048 (context_length; max_position_embeddings in the config.json",
        ),
        (
            ["--checkpoint", "model.gguf"],
            "CheckpointError: cannot read the model of checkpoint 'model.gguf':\n  it is ",
        ),
        (["--seed", "-1"], "GenerationError: seed is -1; it must be at least 0"),
        (["--seed", f"{2**32}"], "GenerationError: seed is 4294967296; a seed must be less than 2**32"),
        (
            ["--seed", f"{2**32 - 1}", "--samples", "3"],
            "GenerationError: seed is 4294967295, and the last of 3 texts has seed 4294967297; a seed must be less "
            "than 2**32",
        ),
        (
            ["--samples", "0", "--tokens", "-1"],
            "ConfigError: cannot generate text:\n  --tokens must be at least 1, but is -1.\n  "
            "--samples must be at least 1, but is 0.",
        ),
        (["--burst", "0"], "ConfigError: cannot generate text:\n  --burst must be at least 1, but is 0."),
        (["--stop", ""], "--stop is empty; give it a value, or leave it out."),
        (["--prompt", "a\udcff"], "ConfigError: cannot read the flags:\n  'a\\udcff' is not UTF-8."),
        (["--chunk", "0"], "ConfigError: cannot generate text:\n  --chunk must be at least 1, but is 0."),
        (
            ["--beams", "2", "--temperature", "1"],
            "ConfigError: cannot generate text:\n  --beams finds the likeliest text and draws none; leave out "
            "--temperature.",
        ),
        (
            ["--beams", "4", "--top-p", "0.9", "--samples", "2"],
            "ConfigError: cannot generate text:\n  --beams finds the likeliest text and draws none; leave out --top-p, "
            "--samples.",
        ),
        (
            ["--length-penalty", "2"],
            "ConfigError: cannot generate text:\n  --length-penalty is for beam search; add --beams, or leave it out.",
        ),
        (["--n-best", "2"], "ConfigError: cannot generate text:\n  --n-best is for beam search; add --beams"),
        (
            ["--beams", "2", "--n-best", "3"],
            "GenerationError: cannot search with beams:\n  n_best is 3; it must be at least 1, and at most beams (2)",
        ),
        (
            ["--target-prompt", "xy"],
            "ConfigError: cannot generate text:\n  --target-prompt is for models with an encoder, and this model is "
            "decoder-only",
        ),
        (["--beams", "-1"], "GenerationError: cannot search with beams:\n  beams is -1; it must be from 0 to 64"),
        (["--layout", "megatron-1d", "--mesh", "y=8"], "LayoutError: cannot use layout 'megatron-1d'"),
        (["--prompt-file", "nowhere"], "ConfigError: cannot generate text:\n  the prompt in 'nowhere' cannot be read"),
        (
            ["--prefill-layout", "own.toml"],
            "LayoutError: layout 'own.toml' cannot store parameters as layout 'megatron-1d': their mesh axes differ",
        ),
    ],
    ids=lambda value: "-".join(value) or "no checkpoint" if isinstance(value, list) else "",
)
def test_bad_input_is_one_message(capsys, public, flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    (tmp_path / "own.toml").write_text('base = "megatron-1d"\n[mesh]\naxes = ["x", "y", "z", "w"]\nfactor = ["y"]\n')
    monkeypatch.setattr(checkpoints, "load", None)
    checkpoint_flags = [] if not flags or "--checkpoint" in flags else ["--checkpoint", public]
    code, text, said = run(capsys, *checkpoint_flags, "--prompt", "def ", *flags)
    assert code == 2
    assert text == ""
    assert said.startswith(message)
    assert "Traceback" not in said


@pytest.mark.parametrize("flags", [[], ["--weights", "int8"], ["--dtype", "bfloat16", "--temperature", "0"]])
def test_a_checkpoint_with_nan_is_one_message(capsys, public, flags, tmp_path):
    folder = tmp_path / "faulty"
    shutil.copytree(public, folder)
    values = load_file(folder / "model.safetensors")
    values["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    save_file(values, folder / "model.safetensors")
    code, text, said = run(capsys, "--checkpoint", str(folder), "--prompt", "def ", *flags)
    assert (code, text) == (2, "")
    assert "Traceback" not in said
    assert said.endswith(
        f"CheckpointError: cannot load LlamaForCausalLM from '{folder}':\n"
        "  model.layers.1.mlp.up_proj.weight has 1 of 2,048 values that are NaN or infinite; use an intact copy.\n"
    )


@pytest.mark.turns(1)
@pytest.mark.parametrize("flags", [[], ["--weights", "int8"]])
def test_a_run_that_diverged_is_one_message(capsys, model, flags, tmp_path):
    values = models.arrays(model)
    values["blocks.0.attention.w_v"] = values["blocks.0.attention.w_v"].at[0, 1, 1, 1].set(np.inf)
    kept(models.with_arrays(model, values), tmp_path)
    code, text, said = run(capsys, "--checkpoint", str(tmp_path), "--prompt", "def ", "--tokens", "3", *flags)
    assert (code, text) == (2, "")
    assert "Traceback" not in said
    assert said.endswith(
        "GenerationError: cannot continue text 1 after 0 new tokens: the model's logits are NaN.\n"
        f"  blocks.0.attention.{'s_v' if flags else 'w_v'} has NaN or infinity: "
        "use a model whose weights are finite.\n"
    )


TEMPLATE = "{% for each in messages %}<{{ each.role }}>{{ each.content }}{% endfor %}<assistant>"
"""A chat template."""


@pytest.mark.slow
def test_an_answer_in_a_chat_is_what_follows_the_text_of_the_template(capsys, public, tmp_path):
    folder = tmp_path / "spoken"
    shutil.copytree(public, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    flags = ["--checkpoint", str(folder), "--tokens", "8", "--temperature", "0"]
    chat = ["--chat", "--system", "Be brief.", "--prompt", "Hi!", "--prompt", "No."]
    _, text, _ = run(capsys, *flags, "--prompt", "<system>Be brief.<user>Hi!<assistant>")
    code, answers, _ = run(capsys, *flags, *chat)
    parts = answers.split("=== text ")
    assert code == 0
    assert parts[1] == "1 of 2 ===\n" + text.removeprefix("<system>Be brief.<user>Hi!<assistant>")
    assert len(parts) == 3


def test_a_chat_is_the_system_then_the_turns_of_a_file_then_the_prompt(tmp_path):
    spoken = checkpoints.Tokenizer(checkpoints.byte_tokenizer().backend, templates={"default": TEMPLATE, "b": "B"})
    (tmp_path / "turns.json").write_text('[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]')

    def found(*prompts, **settings):
        settings = generate.GenerateSettings(chat=True, prompt=prompts, **settings)
        return [bytes(ids).decode() for ids in generate.ids_of(settings, spoken, generate.prompts_of(settings))]

    assert found("x", "y") == ["<user>x<assistant>", "<user>y<assistant>"]
    assert found("x", system="s") == ["<system>s<user>x<assistant>"]
    turns = str(tmp_path / "turns.json")
    assert found("x", system="s", messages=turns) == ["<system>s<user>a<assistant>b<user>x<assistant>"]
    assert found(messages=turns) == ["<user>a<assistant>b<assistant>"]
    assert found("x", chat_template="b") == ["B"]
    spoken.templates["c"] = "{{ a | tojson }}{{ b | tojson }}"
    assert found("x", chat_template="c", chat_variable=("a=false", "b=1 May")) == ['false"1 May"']
    assert generate.prompts_shown(generate.GenerateSettings(chat=True), ["x", "y"]) == ["", ""]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--chat"],
            "CheckpointError: cannot render a chat:\n  the tokenizer has no chat template: neither chat_templ",
        ),
        (
            ["--system", "s"],
            "ConfigError: cannot generate text:\n  --system is for a chat; add --chat, or leave it out.",
        ),
        (
            ["--chat-template", "s"],
            "ConfigError: cannot generate text:\n  --chat-template is for a chat; add --chat, or",
        ),
        (
            ["--chat", "--chat-variable", "self=1"],
            "ConfigError: cannot generate text:\n  --chat-variable 'self=1' is not NAME=VALUE, with the name of a va",
        ),
        (
            ["--chat", "--messages", "no"],
            "ConfigError: cannot generate text:\n  the messages in 'no' cannot be read: the",
        ),
        (
            ["--chat", "--messages", "one.json"],
            "ConfigError: cannot generate text:\n  'one.json' must be a list of mess",
        ),
        (
            ["--chat", "--messages", "system.json", "--system", "s"],
            "ConfigError: cannot generate text:\n  'system.json' already has a system message; leave out --system.",
        ),
    ],
)
def test_faulty_chats_are_one_message(capsys, public, flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.json").write_text('{"role": "user"}')
    (tmp_path / "system.json").write_text('[{"role": "system", "content": "t"}]')
    monkeypatch.setattr(checkpoints, "load", None)
    code, text, said = run(capsys, "--checkpoint", public, "--prompt", "Hi!", *flags)
    assert (code, text) == (2, "")
    assert said.startswith(message)


def test_a_model_with_an_encoder_has_no_chat(capsys, translator):
    code, _, said = run(capsys, "--checkpoint", translator[0], "--prompt", "abc", "--chat")
    assert code == 2
    assert said.startswith("ConfigError: cannot generate text:\n  --chat is for decoder-only models, and this one has")


LLAMA = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]}
QWEN = LLAMA | {"repetition_penalty": 1.05, "top_k": 20}


@pytest.mark.parametrize(
    ("entries", "flags", "wanted", "said"),
    [
        (LLAMA, {}, {"temperature": 0.6, "top_p": 0.9}, "temperature 0.6, top_p 0.9"),
        (LLAMA, {"temperature": 0.0}, {"temperature": 0.0, "top_p": 0.9}, "top_p 0.9"),
        (LLAMA, {"temperature": 1.0, "top_p": 1.0}, {}, None),
        (LLAMA, {"generation_config": "ignored", "min_p": 0.1}, {"min_p": 0.1}, None),
        ({"do_sample": False, "temperature": 0.6}, {}, {"temperature": 0.0}, "temperature 0"),
        ({"top_k": 5, "num_beams": 5}, {}, {"top_k": 5}, "top_k 5, no search with 5 beams, which --beams 5 asks for"),
        ({"eos_token_id": 2, "max_length": 200}, {}, {}, None),
        (
            QWEN,
            {"generation_config": "supported"},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
            "temperature 0.6, top_k 20, top_p 0.9, repetition_penalty left out",
        ),
        (QWEN, {"generation_config": "ignored"}, {}, None),
        (None, {"top_k": 3}, {"top_k": 3}, None),
    ],
)
def test_sampling_is_that_of_flags_or_else_of_the_checkpoint(entries, flags, wanted, said, tmp_path, capsys):
    if entries is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(entries))
    settings = generate.GenerateSettings(sampling=SamplingFlags(**flags))
    found = generate.sampling_of(printing.console(200, stderr=True), settings, tmp_path)
    assert found == decoding.Sampling(**wanted)
    assert capsys.readouterr().err == (f"From generation_config.json: {said}.\n" if said else "")


def test_a_search_takes_nothing_of_sampling_from_the_checkpoint(tmp_path, capsys):
    (tmp_path / "generation_config.json").write_text(json.dumps(LLAMA | {"num_beams": 4}))
    found = generate.sampling_of(printing.console(stderr=True), generate.GenerateSettings(beams=2), tmp_path)
    assert (found, capsys.readouterr().err) == (decoding.Sampling(), "")


def test_settings_of_a_checkpoint_that_are_not_supported_are_refused(capsys, public, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "load", None)
    folder = tmp_path / "penalised"
    shutil.copytree(public, folder)
    (folder / "generation_config.json").write_text(json.dumps(QWEN | {"suppress_tokens": [3]}))
    code, text, said = run(capsys, "--checkpoint", str(folder), "--prompt", "def ")
    assert (code, text) == (2, "")
    assert said == (
        "ConfigError: cannot generate text:\n"
        "  generation_config.json sets repetition_penalty 1.05, suppress_tokens [3], which are not supported here.\n"
        "  --generation-config supported leaves them out, and --generation-config ignored the whole file.\n"
    )
    flags = ["--generation-config", "supported", "--explain"]
    code, _, said = run(capsys, "--checkpoint", str(folder), "--prompt", "def ", *flags)
    assert code == 0
    assert "repetition_penalty left out, suppress_tokens left out." in said


def test_what_devices_have_no_room_for_is_refused_before_it_is_loaded(capsys, public, model, monkeypatch):
    monkeypatch.setattr(checkpoints, "load", None)
    weights = sum(x.nbytes for x in models.arrays(model).values())
    cache = 2 * 100 * CONFIG.layers * 8 * CONFIG.kv_heads * CONFIG.head_size * 4  # keys and values of 100 texts
    flags = ["--checkpoint", public, "--prompt", "def ", "--samples", "100", "--tokens", "5", "--cache-length", "8"]
    monkeypatch.setattr(host, "memory", lambda devices: weights + cache - 1)
    code, text, said = run(capsys, *flags)
    assert (code, text) == (2, "")
    taken = f"{amount_of_bytes(weights)} of weights and {amount_of_bytes(cache)} of cache"
    assert said.startswith(f"ConfigError: cannot generate text:\n  it takes {taken} on the device, which has ")

    def load(*_, **__):
        raise checkpoints.CheckpointError("it loads.", [])

    monkeypatch.setattr(checkpoints, "load", load)
    monkeypatch.setattr(host, "memory", lambda devices: weights + cache + 1_000)  # and the lengths of texts
    assert "CheckpointError: it loads." in run(capsys, *flags)[2]


@pytest.mark.parametrize("flag", ["samples", "tokens", "chunk", "burst", "cache-length", "seed", "top-k", "devices"])
def test_what_is_no_whole_number_is_refused_by_its_flag(capsys, flag):
    for value in ("nan", "1.5", "1e5", ""):
        code, text, said = run(capsys, f"--{flag}={value}")
        assert (code, text) == (2, "")
        assert f"--{flag}" in said


def test_bursts_are_no_longer_than_texts(capsys, public, monkeypatch):
    asked = []
    monkeypatch.setattr(models, "Generator", lambda *_, burst, **__: asked.append(burst))
    monkeypatch.setattr(overview, "explain", lambda *_: None)
    flags = ["--prompt", "def ", "--tokens", "5", "--burst", "1" + "0" * 12, "--explain"]
    assert run(capsys, "--checkpoint", public, *flags)[0] == 0
    assert asked == [5]


def test_the_help_says_how_many_devices_are_used(capsys):
    with pytest.raises(SystemExit, match="0"):
        run(capsys, "--help-all")
    said = " ".join(capsys.readouterr().out.replace("|", " ").replace("│", " ").split())
    assert "all of an accelerator, or one of a CPU" in said
    assert "8 fake" not in said
    assert "--schedule" not in said  # of a training step only
    assert "--rounds" not in said
    assert "--distributed" not in said


def test_an_interrupt_is_no_traceback(capsys, public, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "write", interrupted)
    code, _, said = run(capsys, "--checkpoint", public, "--prompt", "def ")
    assert code == 130
    assert said.endswith("\nInterrupted.\n")


@pytest.mark.slow
def test_an_interrupt_between_two_bursts_ends_the_text(capsys, public, monkeypatch):
    """The signal only leaves a mark: an exception may come where JAX would ignore it."""
    write = decoding.Text.add

    def add(text, tokens):
        signal.raise_signal(signal.SIGINT)
        return write(text, tokens)

    monkeypatch.setattr(decoding.Text, "add", add)
    code, text, said = run(capsys, "--checkpoint", public, "--prompt", "def ", "--burst", "1", "--temperature", "0")
    assert code == 130
    assert text.startswith("def ")
    assert said.endswith("\nInterrupted.\n")
