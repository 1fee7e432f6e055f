"""config.json to `ModelConfig` and back, by the table of the family."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gspmd.annotate.errors import suggestion
from gspmd.moe.config import MoEConfig

from ..config import ModelConfig
from .families import FAMILIES, Family
from .families.family import REQUIRED
from .families.rope import read_rope, rope_reasons, write_rope
from .files import DTYPES, CheckpointError, Files, read_json


def model_config(directory: str | os.PathLike) -> ModelConfig:
    """Return the model that a checkpoint's config.json describes.

    Args:
        directory: the checkpoint's folder.

    Raises:
        CheckpointError: a ValueError: there is no such file, the architecture is unknown (it names those known), or
            the file asks for something that models here do not have (it names all of it).

    Example:
        >>> import json, pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> entries = {"architectures": ["LlamaForCausalLM"], "vocab_size": 256, **sizes}
        >>> _ = (folder / "config.json").write_text(json.dumps(entries))
        >>> model_config(folder).head_size
        16
    """
    return described(directory).config


@dataclass(frozen=True)
class Described:
    """What config.json says of a checkpoint.

    Attributes:
        family: whose tensors it has.
        config: the model.
        factors: path of a parameter, without "blocks.0.", to the factor by which it is its tensor.
        remark: where the tensors say otherwise than config.json, what; else empty.
        length: tokens of the longest sequence; None if it does not say.
    """

    family: Family
    config: ModelConfig
    factors: Mapping[str, float]
    remark: str = ""
    length: int | None = None


def described(directory: str | os.PathLike) -> Described:
    """Read config.json, and the tables of a model that it calls tied; raises CheckpointError as `model_config` does.

    Tables that differ are two, whatever config.json says, as transformers has it.
    """
    doing = f"cannot read the model of checkpoint {str(directory)!r}:"
    if not Path(directory).is_dir():
        raise CheckpointError(doing, ["there is no such folder."])
    json = read_json(Path(directory) / "config.json", doing)
    family = _family(json, doing)
    try:
        found = _described(family, json, doing)
    except (TypeError, AttributeError) as error:  # the types of entries that few files have are not checked one by one
        raise CheckpointError(doing, [f"config.json has an entry of a wrong type: {error}."]) from None
    if not found.config.tied:
        return found
    first, second = (family.tensors[path].name for path in ("embedding.table", "output.table"))
    try:
        files = Files(directory)
    except CheckpointError:  # the model can be planned before its tensors are there; `load` says what they lack
        return found
    if not {first, second} <= files.tensors.keys() or files.tensors[first].dtype not in DTYPES:
        return found
    if files.equal(first, second):
        return found
    remark = f"{second} is not {first}, so the model is not tied, though config.json says it is (tie_word_embeddings)"
    return replace(found, config=replace(found.config, tied=False), remark=remark)


def _described(family: Family, json: Mapping[str, Any], doing: str) -> Described:
    faults = list(_inactive_faults(family, json))
    values: dict[str, Any] = dict(family.fixed)
    for name, option in family.options.items():
        key, value = option.of(json)
        if value is REQUIRED:
            faults.append(f"{key} is missing.")
        elif option.names is None and not callable(value) and not _fits(name, value):
            faults.append(f"{key} is {'null' if value is None else repr(value)}, which is no {_KINDS[_kind(name)]}.")
        elif name == "rotary_size" and value == 0:  # here it would stand for the whole head
            faults.append(f"{key} is 0: models that do not rotate by position are not supported.")
        elif option.names is not None and value not in [*option.names]:
            known = ", ".join(map(repr, option.names))
            faults.append(f"{key} is {value!r}, which is not supported; supported: {known}.")
        else:
            values[name] = option.names[value] if option.names else value
    if not faults and not values.get("heads"):
        faults.append("its attention has no heads.")
    if faults:
        raise CheckpointError(doing, faults)
    values |= {name: value(values) for name, value in values.items() if callable(value)}
    values |= {name: function(values) for name, function in family.derived.items()}
    try:
        values |= read_rope(family, json, values["head_size"], faults)
    except ValueError as error:
        faults.append(f"its rotary embedding cannot be read: {error}.")
    moe = {name.removeprefix("moe."): values.pop(name) for name in [*values] if name.startswith("moe.")}
    if faults:
        raise CheckpointError(doing, faults)
    try:
        if moe:
            values["moe"] = MoEConfig(**moe, dispatch="dropless")
        config = ModelConfig(**values, scale_embedding=family.scale_embedding)
    except ValueError as error:
        raise CheckpointError(doing, str(error).splitlines()) from None
    scale = 1.0 if family.logit_scale is None else json.get("logit_scale", family.logit_scale) + 0.0
    return Described(family, config, {"output.norm": scale}, length=json.get(family.length))


def expressing(config: ModelConfig) -> Family:
    """Return the first family that a model belongs to.

    Raises:
        CheckpointError: there is none; it says of each family why not.
    """
    reasons = {}
    for family in FAMILIES:
        reasons[family.title] = _reasons(family, config)
        if not reasons[family.title]:
            return family
    faults = [f"{title}: {'; '.join(each)}." for title, each in sorted(reasons.items(), key=lambda item: len(item[1]))]
    raise CheckpointError("cannot save this model as a checkpoint: no family of public models has its form:", faults)


def written(family: Family, config: ModelConfig, length: int, dtype: str) -> dict[str, Any]:
    """Return the entries of config.json.

    Args:
        family: that of the model.
        config: the model.
        length: tokens of the longest sequence.
        dtype: of the tensors.
    """
    json: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for name, option in family.options.items():
        value = _value(config, name)
        if option.names:
            value = next(theirs for theirs, ours in option.names.items() if ours == value)
        json[option.keys[0]] = value
    json |= {key: values[0] for key, values in family.inactive.items()}
    json |= write_rope(family, config) | {family.length: length, "torch_dtype": dtype}
    if family.window is not None:
        json |= {"sliding_window": None, "use_sliding_window": False}
    if family.logit_scale is not None:
        json["logit_scale"] = 1.0
    return json


def _family(json: Mapping[str, Any], doing: str) -> Family:
    named = json.get("architectures") or []
    for family in FAMILIES:
        if family.architecture in named or (not named and json.get("model_type") == family.model_type):
            return family
    name = named[0] if named else json.get("model_type")
    known = ", ".join(family.architecture for family in FAMILIES)
    near = suggestion(str(name), [family.architecture for family in FAMILIES])
    raise CheckpointError(doing, [f"its architecture is {name!r}, which is not known. {near}Known: {known}."])


_KINDS = {int: "whole number", float: "number", bool: "true or false"}


def _kind(name: str) -> type:
    """The type of a field's values."""
    config, _, field = name.rpartition(".")
    default = getattr(MoEConfig if config else ModelConfig, field)
    return int if default is None else type(default)


def _fits(name: str, value: Any) -> bool:
    kind = _kind(name)
    return isinstance(value, bool) == (kind is bool) and isinstance(value, (int, float) if kind is float else kind)


def _inactive_faults(family: Family, json: Mapping[str, Any]) -> Iterator[str]:
    """What config.json asks for, and models here do not have."""
    if json.get("quantization_config"):
        yield "quantization_config: its weights are quantized; take a checkpoint with plain ones."
    for key, values in family.inactive.items():
        if json.get(key, values[0]) not in values:
            yield f"{key} is {json[key]!r}, which is not supported; {values[0]!r} is."
    if family.window is None:
        return
    size, used = json.get("sliding_window", family.window[0]), json.get("use_sliding_window", family.window[1])
    kinds, layers = json.get("layer_types"), json.get("num_hidden_layers", 0)
    slides = "sliding_attention" in kinds if kinds else used and json.get("max_window_layers", 0) < layers
    longest = json.get(family.length, float("inf"))
    if slides and size is not None and size < longest:
        yield (
            f"sliding_window is {size}, and sequences have up to {longest} tokens: attention to the last {size} only "
            "is not supported."
        )


#: Fields that change nothing that a checkpoint holds. √E is folded into the tables.
FREE = ("vocabulary_multiple", "remat", "lora", "scale_embedding", "int8")


def _reasons(family: Family, config: ModelConfig) -> list[str]:
    """Why a model does not belong to a family; nothing if it does."""
    names = [each.name for each in fields(config) if each.name not in (*FREE, "moe")]
    names += [f"moe.{each.name}" for each in fields(MoEConfig)] if config.moe else []
    values = {name: _value(config, name) for name in names}
    found = [
        f"{name} is {values[name]!r}, not {value!r}"
        for name, value in family.fixed.items()
        if name in values and values[name] != value
    ]
    for name, option in family.options.items():
        if option.names and name in values and values[name] not in option.names.values():
            known = dict.fromkeys(option.names.values())
            found.append(f"{name} is {values[name]!r}, not {' or '.join(map(repr, known))}")
    found += [
        f"{name} is {values[name]!r}, not {function(values)!r}"
        for name, function in family.derived.items()
        if values[name] != function(values)
    ]
    experts = "moe.experts" in family.options
    if experts != bool(config.moe):
        found.append("it has experts" if experts else "it has no experts")
    shared: dict[Any, dict[str, Any]] = {}
    for name, option in family.options.items():
        if name in values and option.names is None:
            shared.setdefault(option.keys[0], {})[name] = values[name]
    for key, each in shared.items():
        if len(set(each.values())) > 1:
            found.append(f"{' and '.join(each)} differ, and are one option, {key}")
    return [*found, *rope_reasons(family, config)]


#: Routers that are top-k when they draw nothing, and whether their gates are divided by their sum.
_TOP_K = {"gshard": True, "st-moe": True, "switch": False}


def _value(config: ModelConfig, name: str) -> Any:
    """The value of a field, or the one in whose stead it stands."""
    if name == "rotary_size":
        return config.rotary
    if name == "moe.k":
        return config.moe.choices
    if name == "moe.router" and config.moe.router in _TOP_K:
        return "top-k"
    if name == "moe.renormalize" and config.moe.router in _TOP_K:
        return _TOP_K[config.moe.router]
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value
