"""The flags that began a run resume it: every one of them, with and without the file that the run began with."""

import dataclasses
import json
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from gspmd.commands import configs
from gspmd.commands.flags import parse
from gspmd.commands.settings import RunSettings, adapted
from gspmd.training.checkpoints import kept_settings
from gspmd.training.toml import load_toml

#: Flags that say which run is resumed, or what is asked of it, and the checkpoint
#: (tested below); of the class of a model there is one in test_own_model.py.
_OTHER = {"config", "resume", "resume_step", "out", "checkpoint", "model_class"}
#: What begins a flag in front of a field's name, by table; the others have the table's name.
_UNNAMED = {"training", "optimizer", "sharding"}
#: Values of fields that not every value of their type is one for.
_VALUES = {
    "model.heads": "16",
    "model.kv_heads": "4",
    "model.activation": "relu",
    "model.block": "parallel",
    "model.rotary_size": "8",
    "model.rotary_pairs": "neighbours",
    "model.norm": "layer",
    "model.positions": "sinusoidal",
    "model.layer_kinds": "unrotated",
    "model.norms": "after",
    "model.parallel_norms": "2",
    "model.moe.scores": "sigmoid",
    "model.moe.kept_groups": "1",
    "model.moe.group_best": "1",
    "model.moe.expert_groups": "2",
    "model.moe.offset": "1",
    "model.moe.dense_layers": "1",
    "model.moe.router": "top-k",
    "model.moe.k": "1",
    "model.moe.dispatch": "onehot",
    "lora.targets": "ffn.w_in",
    "training.relayout": "20=zero-3",
    "training.profile": "2:4",
    "sharding.set": "ffn.w_in=EF",
    "sharding.mesh": "x=4",
    "sharding.compiler_options": "xla_cpu_enable_fast_math=true",
    "sharding.distributed": "127.0.0.1:1234,processes=2,process=0",
}
#: What goes before a flag that some other setting has to allow.
_WITH = {
    "model.norm_bias": ["--model.norm", "layer"],
    "model.offload": ["--model.remat", "full"],
    "model.parallel_norms": ["--model.block", "parallel"],
    "model.local_rope_base": ["--model.sliding-window", "8"],
    "model.query_growth": ["--model.layer-kinds", "unrotated"],
    "model.growth_interval": ["--model.layer-kinds", "unrotated", "--model.query-growth", "0.1"],
    "model.alibi_max": ["--model.positions", "alibi"],
    "model.alibi_scaled": ["--model.positions", "alibi"],
    "model.moe.scores": ["--model.moe.router", "top-k"],
    "model.moe.expert_groups": ["--model.moe.router", "top-k"],
    "model.moe.kept_groups": ["--model.moe.router", "top-k", "--model.moe.expert-groups", "2"],
    "model.moe.group_best": ["--model.moe.router", "top-k", "--model.moe.expert-groups", "2"],
    "model.moe.choice_bias": ["--model.moe.router", "top-k"],
    "model.moe.bias_rate": ["--model.moe.router", "top-k", "--model.moe.choice-bias"],
    "model.moe.gate_factor": ["--model.moe.router", "top-k"],
    "model.moe.gate_inputs": ["--model.moe.router", "top-k", "--model.moe.k", "1", "--model.moe.no-renormalize"],
    "model.moe.router_bias": ["--model.moe.router", "top-k"],
    "model.moe.shared_width": ["--model.moe.shared", "1"],
    "model.moe.shared_mix": ["--model.moe.shared", "1"],
    "model.start_token": ["--model.encoder-layers", "2"],
    "model.relative_buckets": ["--model.positions", "relative"],
    "model.relative_distance": ["--model.positions", "relative"],
    "model.position_offset": ["--model.positions", "sinusoidal"],
    "model.moe.k": ["--model.moe.router", "top-k"],
    "model.moe.renormalize": ["--model.moe.router", "top-k"],
    "training.source_length": ["--objective", "prefix"],
    "training.noise_density": ["--objective", "span-corruption"],
    "training.mean_span": ["--objective", "span-corruption"],
    "training.data_source": ["--objective", "pairs"],
    "lora.alpha": ["--lora.rank", "4"],
    "lora.targets": ["--lora.rank", "4"],
    "optimizer.moments_block": ["--moments", "int8"],
}
#: The file of a run that can be told so, where it is not the default one.
_FILES = {"model.ffn_bias": "finetune"}


def _fields(of: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every field of nested settings by its path, with its type and value."""
    hints = typing.get_type_hints(type(of))
    for field in dataclasses.fields(of):
        value = getattr(of, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{prefix}{field.name}.")
        elif not any(map(dataclasses.is_dataclass, typing.get_args(hints[field.name]))):  # a table, which has no flag
            yield f"{prefix}{field.name}", hints[field.name], value


BEGUN = load_toml(RunSettings, configs.find("default"))
FIELDS = {path: (hint, value) for path, hint, value in _fields(BEGUN) if path.rpartition(".")[2] not in _OTHER}


def _flags(path: str) -> list[list[str]]:
    """The flags that give a field another value; of a boolean one, each of its two."""
    hint, value = FIELDS[path]
    table, _, name = path.rpartition(".")
    words = [*([] if table in _UNNAMED else table.split(".") if table else []), name.replace("_", "-")]
    flag = f"--{'.'.join(words).replace('_', '-')}"
    before = _WITH.get(path, [])
    if isinstance(value, bool):
        off = f"--{'.'.join([*words[:-1], f'no-{words[-1]}']).replace('_', '-')}"
        return [[*before, flag], [*before, off]]
    if path in _VALUES:
        return [[*before, flag, _VALUES[path]]]
    arms = (hint, *typing.get_args(hint))
    choices = [each for arm in arms if typing.get_origin(arm) is typing.Literal for each in typing.get_args(arm)]
    if choices:
        return [[flag, next(str(choice) for choice in choices if choice not in (value, True, False))]]
    if float in arms:
        return [[*before, flag, str((value or 1.0) / 2)]]
    if int in arms:
        return [[*before, flag, str((value or 1) * 2)]]
    return [[*before, flag, "other"]]


@pytest.mark.parametrize("path", FIELDS)
def test_the_flags_that_began_a_run_resume_it(tmp_path, path):
    file = ["--config", _FILES.get(path, "default")]
    for flags in _flags(path):
        begun = adapted(_parse(*file, *flags))
        _, before = FIELDS[path]
        changed = {name: value for name, _, value in _fields(begun)}[path]
        assert changed != before or isinstance(before, bool)
        (tmp_path / "config.json").write_text(json.dumps(kept_settings(begun)))
        for again in ([], file):
            resumed = adapted(_parse(*again, *flags, "--resume", "--out", str(tmp_path)))
            assert resumed.training.resume
            assert _said(resumed) == _said(begun)


def _parse(*flags: str) -> RunSettings:
    return parse(RunSettings, flags, default="default", find=configs.find)


def _said(settings: RunSettings) -> dict[str, Any]:
    """The settings of a start, whether it is a resume left out; of a repeated compiler option, the last counts."""
    said = kept_settings(settings)
    del said["training"]["out"], said["sharding"]["compiler_options"]
    return said | {"compiled_with": settings.sharding.compiled_with, "profile": settings.training.profile}
