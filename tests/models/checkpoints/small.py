"""A small Llama checkpoint with random values, written by the library safetensors."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
}


def tensors(dtype: str = "float32", **changes: int) -> dict[str, np.ndarray]:
    """Return the tensors of a model of CONFIG, or of one with other sizes."""
    config = CONFIG | changes
    embed, hidden, table = (
        config["hidden_size"],
        config["intermediate_size"],
        (config["vocab_size"], config["hidden_size"]),
    )
    heads, shared = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    shapes = {"model.embed_tokens.weight": table, "model.norm.weight": (embed,), "lm_head.weight": table}
    for layer in (f"model.layers.{number}" for number in range(config["num_hidden_layers"])):
        for name, shape in {
            "input_layernorm": (embed,),
            "post_attention_layernorm": (embed,),
            "self_attn.q_proj": (heads, embed),
            "self_attn.k_proj": (shared, embed),
            "self_attn.v_proj": (shared, embed),
            "self_attn.o_proj": (embed, heads),
            "mlp.gate_proj": (hidden, embed),
            "mlp.up_proj": (hidden, embed),
            "mlp.down_proj": (embed, hidden),
        }.items():
            shapes[f"{layer}.{name}.weight"] = shape
    draw = np.random.default_rng(0).standard_normal
    return {name: draw(shape, np.float32).astype(dtype) for name, shape in shapes.items()}


def write(directory: Path, values: dict[str, np.ndarray], files: int = 1, **changes: object) -> Path:
    """Write a checkpoint in one file, or in several with an index, with changes to CONFIG; return its folder."""
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    if files == 1:
        save_file(values, directory / "model.safetensors")
        return directory
    named = [f"model-{number + 1:05}-of-{files:05}.safetensors" for number in range(files)]
    places = {name: named[at % files] for at, name in enumerate(values)}
    for file in named:
        save_file({name: values[name] for name, place in places.items() if place == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory
