"""Modules that predict further tokens, behind the last layer of a published file, are not read."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gspmd_models.checkpoints import CheckpointError, load, model_config, save

COUNTED = "num_nextn_predict_layers"


def published(folder, into, modules, *, left_out="", **entries):
    """Write a small model with modules as DeepSeek and Z.ai publish them: a layer each, with tensors of its own."""
    shutil.copytree(folder, into)
    tensors, config = load_file(into / "model.safetensors"), json.loads((into / "config.json").read_text())
    layers = config["num_hidden_layers"]
    last = {name: value for name, value in tensors.items() if name.startswith(f"model.layers.{layers - 1}.")}
    for number in range(layers, layers + modules):
        at = f"model.layers.{number}."
        tensors |= {name.replace(f"model.layers.{layers - 1}.", at): value.copy() for name, value in last.items()}
        own = ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.norm", "shared_head.head")
        tensors |= {f"{at}{name}.weight": np.ones((2, 3), np.float32) for name in own if name != left_out}
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    kept = {key: value for key, value in config.items() if key not in (COUNTED, "num_mtp_layers")}
    (into / "config.json").write_text(json.dumps(kept | entries))
    return into


@pytest.mark.turns(1)
@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3"])
def test_modules_are_left_out_at_any_depth(name, reference, placing, tmp_path):
    folder, placed = reference(name).directory, placing("replicated")
    count = load(folder, *placed, "float32")[1].tensors
    assert load(published(folder, tmp_path / "one", 1), *placed, "float32")[1].tensors == count
    two = published(folder, tmp_path / "two", 2, **{COUNTED: 2})
    model, report = load(two, *placed, "float32")
    assert report.tensors == count
    save(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())[COUNTED] == 0

    def faults(modules, **options):
        with pytest.raises(CheckpointError) as error:
            load(published(folder, tmp_path / str(len([*tmp_path.iterdir()])), modules, **options), *placed, "float32")
        return "\n".join(error.value.faults)

    assert "model.layers.4.eh_proj.weight is in the checkpoint, but the model has no such tensor." in faults(2)
    assert "model.layers.3.enorm.weight is in the checkpoint, but" in faults(1, **{COUNTED: 0})
    assert "model.layers.3.input_layernorm.weight is in the checkpoint, but" in faults(1, left_out="eh_proj")


def test_the_number_of_modules_is_one_whole_number(reference, tmp_path):
    folder = reference("glm4-moe").directory
    for number, (entries, fault) in enumerate({
        "-1": ({COUNTED: -1}, f"{COUNTED} is -1; it must be a whole number of modules."),
        "two": ({COUNTED: 1, "num_mtp_layers": 2}, "differ, but are names of one entry"),
    }.values()):  # fmt: skip
        with pytest.raises(CheckpointError) as error:
            model_config(published(folder, tmp_path / str(number), 0, **entries))
        assert fault in str(error.value)
