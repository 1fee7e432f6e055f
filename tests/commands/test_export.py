"""`gspmd export`: a run as a public checkpoint, and one message for what cannot be exported."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import gspmd_models as models
from gspmd import host
from gspmd.commands import export, main
from gspmd.layouts import Layout
from gspmd.training import Checkpoints
from gspmd.training.checkpoints import save_settings
from gspmd.training.state import TrainState
from gspmd.training.toml import to_mapping
from gspmd_models import checkpoints
from gspmd_models.finetuning.config import LoraConfig
from tests.models.checkpoints.cases import CASES

CONFIG = models.ModelConfig(embed=16, layers=1, heads=2, kv_heads=1, head_size=8, feed_forward=24)


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    """Devices of this process, whose backend has started."""
    monkeypatch.setattr(host, "start", lambda count, platform, host_devices: jax.devices()[:count])


@pytest.fixture
def trained(tmp_path, make_mesh):
    """A function (config) -> the folder of a run of it, trained in a layout that pads heads, and its model."""

    def make(
        config: models.ModelConfig, changes: Sequence[str] = (), padding: Sequence[str] = ("padding.K=4",)
    ) -> tuple[str, models.Transformer]:
        layout = Layout.load("megatron-1d").override({"padding.K": 4} if padding else {})
        model = models.build(config, layout, make_mesh(layout.mesh_for(1)), jax.random.key(0))
        moved = {path: jax.device_put(np.asarray(x) + (config.lora is not None) * 0.1 * path.endswith("_b"), x.sharding)
                 for path, x in models.arrays(model).items()}  # fmt: skip
        model = models.with_arrays(model, moved)
        with Checkpoints(tmp_path / "run") as saved:
            saved.save(TrainState(np.int32(3), models.arrays(model), {"count": np.int32(3)}), {})
        sharding = {"layout": "megatron-1d", "set": [*padding, *changes]}
        settings = {"model": to_mapping(config), "sharding": sharding, "training": {"length": 96}}
        save_settings(tmp_path / "run", settings)
        return str(tmp_path / "run"), model

    return make


def test_a_run_is_written_as_a_checkpoint_of_the_same_parameters(trained, tmp_path, capsys):
    folder, model = trained(CONFIG)
    kept = tmp_path / "run" / "tokenizer"
    checkpoints.keep_tokenizer(kept, checkpoints.byte_tokenizer(), "")
    (kept / "generation_config.json").write_text('{"temperature": 0.7}')
    assert main.main(["export", folder, str(tmp_path / "out")]) == 0
    assert checkpoints.sampling(tmp_path / "out") == models.Sampling(temperature=0.7)
    assert "Wrote step 3 of the run as LlamaForCausalLM to" in capsys.readouterr().out
    back, _ = checkpoints.load(
        tmp_path / "out", model.layout, models.arrays(model)["output.norm"].sharding.mesh, "float32"
    )
    values, root = models.arrays(model), CONFIG.embed**0.5
    scaled = {"embedding.table": values["embedding.table"] * root, "output.norm": values["output.norm"] / root}
    for path, value in models.arrays(back).items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(scaled.get(path, values[path])), err_msg=path)
    assert checkpoints.tokenizer(tmp_path / "out").encode("é") == [195, 169]
    assert '"max_position_embeddings": 96' in (tmp_path / "out" / "config.json").read_text()


def test_a_run_whose_layout_has_alternatives_is_written(trained, tmp_path, capsys):
    folder, _ = trained(CONFIG, ["ffn.w_in=EF_yz|EF_y"])
    assert main.main(["export", folder, str(tmp_path / "out")]) == 0
    assert "as LlamaForCausalLM" in capsys.readouterr().out


def test_a_place_that_cannot_be_written_is_refused_before_the_run_is_read(tmp_path, monkeypatch, capsys):
    (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)
    (tmp_path / "file").touch()
    monkeypatch.setattr(export, "main", None)
    for out, words in {
        tmp_path / "file" / "out": f"'{tmp_path}/file': it is not a folder; give a new folder.",
        tmp_path / "file": "it is not a folder; give a new folder.",
        tmp_path / "run": "it exists; give a new folder.",
        tmp_path / ("n" * 300): "File name too long; give a new folder.",
    }.items():
        assert main.main(["export", str(tmp_path / "run"), str(out)]) == 2
        assert capsys.readouterr().err == f"ConfigError: cannot export to {str(out)!r}:\n  {words}\n"


def test_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)
    (out := tmp_path / "out").mkdir()
    iterdir = Path.iterdir

    def refused(path):
        if path == out:
            raise PermissionError(13, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refused)  # as without read permission, which root always has
    for fault, said in (("", "Permission denied"), ("you may not write there", "you may not write there")):
        monkeypatch.setattr("gspmd.commands.export_settings.new_folder_fault", lambda _, fault=fault: fault)
        assert main.main(["export", str(tmp_path / "run"), str(out)]) == 2
        assert capsys.readouterr().err == f"ConfigError: cannot export to {str(out)!r}:\n  {said}; give a new folder.\n"


def test_what_cannot_be_exported_is_one_message(trained, tmp_path, capsys):
    for flags, words in (
        ([], "give the folder of a run, and a new folder"),
        ([str(tmp_path / "none"), "out"], "there is no checkpoint of a run under"),
        ([trained(models.ModelConfig(activation="relu", layers=1))[0], str(tmp_path / "out")], "activation is 'relu'"),
    ):
        assert main.main(["export", *flags]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_adapters_are_merged(trained, tmp_path, capsys):
    config = replace(CONFIG, lora=LoraConfig(2, 4.0, ("ffn.w_in",)))
    folder, model = trained(config)
    assert main.main(["export", folder, str(tmp_path / "out")]) == 0
    assert "as LlamaForCausalLM" in capsys.readouterr().out
    back, _ = checkpoints.load(
        tmp_path / "out", model.layout, models.arrays(model)["output.norm"].sharding.mesh, "float32"
    )
    values = models.arrays(model)
    weight, a, b = (np.asarray(values[f"blocks.0.ffn.w_in{side}"]) for side in ("", "_a", "_b"))
    assert np.abs(b).max() > 0
    merged = weight + 4 / 2 * np.einsum("ner,nrf->nef", a, b)
    np.testing.assert_allclose(models.arrays(back)["blocks.0.ffn.w_in"], merged, rtol=1e-5, atol=1e-6)


def test_adapters_of_latents_are_merged(trained, tmp_path, capsys):
    """Both parts of kv_b_proj, whose rows are the keys and then the values of each head."""
    kind, entries = CASES["deepseek-v2-groups"]
    (tmp_path / "config.json").write_text(json.dumps(entries | {"architectures": [f"{kind}ForCausalLM"]}))
    config, names = checkpoints.model_config(tmp_path), ("w_k_up", "w_v_up", "w_k_down", "w_q_down", "w_q_up")
    lora = LoraConfig(2, 4.0, tuple(f"attention.{name}" for name in names))
    folder, model = trained(replace(config, vocabulary=256, lora=lora), padding=())
    assert main.main(["export", folder, str(tmp_path / "out")]) == 0
    assert f"as {kind}ForCausalLM" in capsys.readouterr().out
    values, merged = {path: np.asarray(x) for path, x in models.arrays(model).items()}, {}
    for name in names:
        weight, a, b = (values[f"blocks.0.attention.{name}{side}"] for side in ("", "_a", "_b"))
        assert np.abs(b).max() > 0
        merged[name] = weight + 4 / 2 * np.einsum("nir,nr...->ni...", a, b)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    at = "model.layers.1.self_attn"
    keys_and_values = np.concatenate([merged["w_k_up"][1], merged["w_v_up"][1]], axis=-1)  # [Z, H, D]
    wanted = keys_and_values.transpose(1, 2, 0).reshape(-1, keys_and_values.shape[0])
    np.testing.assert_allclose(stored[f"{at}.kv_b_proj.weight"], wanted, rtol=1e-5, atol=1e-6)
    for theirs, ours in {"kv_a_proj_with_mqa": "w_k_down", "q_a_proj": "w_q_down"}.items():
        np.testing.assert_allclose(stored[f"{at}.{theirs}.weight"], merged[ours][1].T, rtol=1e-5, atol=1e-6)
