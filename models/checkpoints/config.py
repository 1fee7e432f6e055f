"""config.json to `ModelConfig` and back, by the table of the family."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gspmd.moe.config import MoEConfig
from gspmd.reading import folder_fault

from ..config import ModelConfig
from .families import FAMILIES, Family
from .families.entries import IGNORED, INACTIVE, REMEDIES, in_json, is_number, is_whole
from .families.family import REQUIRED
from .families.rope import ENTRIES as ROPE
from .families.rope import read_rope, rope_reasons, write_rope
from .families.window import ENTRIES as WINDOW
from .families.window import read_window, write_window
from .files import ADAPTER, DTYPES, CheckpointError, Files, other_format, read_json


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
    """A checkpoint, as its config.json describes it.

    Attributes:
        family: whose tensors it has.
        config: the model.
        factors: path of a parameter, without "blocks.0.", to the factor by which it is its tensor.
        remark: where the tensors say otherwise than config.json, what; else empty.
    """

    family: Family
    config: ModelConfig
    factors: Mapping[str, float]
    remark: str = ""


def described(directory: str | os.PathLike) -> Described:
    """Read config.json, and the tables of a model that it calls tied; raises CheckpointError as `model_config` does.

    Tables that differ are two, whatever config.json says, as transformers has it.
    """
    doing = f"cannot read the model of checkpoint {str(directory)!r}:"
    fault, path = folder_fault(directory), Path(directory) / "config.json"
    if (fault or not path.exists()) and (other := other_format(Path(directory))):
        raise CheckpointError(doing, [other])
    if fault:
        raise CheckpointError(doing, [f"{fault}."])
    if (path.parent / ADAPTER).exists():
        # transformers with peft reads such a folder as the adapted model, and without peft as the one of config.json.
        fact = f"it holds a LoRA adapter ({ADAPTER}) beside a model, and which of the two is meant it does not say."
        remedy = "Merge them with peft's merge_and_unload(), or take the adapter's files out to read the model alone."
        raise CheckpointError(doing, [f"{fact} {remedy}"])
    json = read_json(path, doing)
    family = _family(json, doing)
    found = _described(family, json, doing)
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
    faults = [*_unknown_faults(family, json), *_inactive_faults(family, json)]
    values: dict[str, Any] = dict(family.fixed)
    for name, option in family.options.items():
        entries = option.entries(json)
        (key, value), *others = entries.items()
        if any(other != value for _, other in others):
            given = ", ".join(f"{key} is {in_json(value)}" for key, value in entries.items())
            faults.append(f"{given}; they are names of one entry: leave out all but one.")
        elif value is REQUIRED:
            faults.append(f"{key} is missing.")
        elif option.names is None and not callable(value) and not _fits(name, value):
            faults.append(f"{key} is {in_json(value)}; it must be {_KINDS[_kind(name)]}.")
        elif name == "rotary_size" and value == 0:  # here it would stand for the whole head
            faults.append(f"{key} is 0: models that do not rotate by position are not supported.")
        elif option.names is not None and value not in [*option.names]:
            known = ", ".join(map(repr, option.names))
            faults.append(f"{key} is {in_json(value)}, which is not supported; supported: {known}.")
        else:
            values[name] = option.names[value] if option.names else value
    length = _length(family, json, faults)
    scale = json.get("logit_scale", family.logit_scale) if family.logit_scale is not None else 1.0
    if not is_number(scale):
        faults.append(f"logit_scale is {in_json(scale)}; it must be a number.")
    if not faults and not values.get("heads"):
        faults.append("its attention has no heads.")
    if faults:
        raise CheckpointError(doing, faults)
    values |= {name: value(values) for name, value in values.items() if callable(value)}
    values |= {name: function(values) for name, function in family.derived.items()}
    values |= {"context_length": length, "sliding_window": read_window(family.window, json, values["layers"], faults)}
    values |= read_rope(family, json, values["head_size"], faults)
    moe = {name.removeprefix("moe."): values.pop(name) for name in [*values] if name.startswith("moe.")}
    if faults:
        raise CheckpointError(doing, faults)
    try:
        if moe:
            values["moe"] = MoEConfig(**moe, dispatch="dropless")
        config = ModelConfig(**values, scale_embedding=family.scale_embedding)
    except ValueError as error:
        raise CheckpointError(doing, str(error).splitlines()) from None
    return Described(family, config, {"output.norm": float(scale)})


def _length(family: Family, json: Mapping[str, Any], faults: list[str]) -> int | None:
    """Tokens of the longest text; None if config.json does not say."""
    given = {key: json[key] for key in family.length if key in json}
    for key, value in given.items():
        if not is_whole(value) or value < 1:
            faults.append(f"{key} is {in_json(value)}; it must be a whole number of tokens.")
    if len(set(map(in_json, given.values()))) > 1:
        faults.append(f"{' and '.join(given)} differ, and are names of one entry: leave out all but one.")
    return next(iter(given.values()), None)


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
    # Attention here looks back over all tokens, which is the model's own up to its sliding window.
    length = min(length, config.sliding_window or length)
    json |= write_rope(family, config) | {family.length[0]: length, "torch_dtype": dtype}
    json |= write_window(family.window)
    if family.logit_scale is not None:
        json["logit_scale"] = 1.0
    return json


def _family(json: Mapping[str, Any], doing: str) -> Family:
    """The family that `architectures` names, or else `model_type`."""
    named, kind = json.get("architectures") or [], json.get("model_type")
    if not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise CheckpointError(doing, [f"architectures is {in_json(named)}; it must be a list of names."])
    known = {family.architecture: family for family in FAMILIES}
    names = named or [family.architecture for family in FAMILIES if family.model_type == kind]
    family = next((known[name] for name in names if name in known), None)
    if not names and kind is None:
        raise CheckpointError(doing, ["config.json names no model: it has neither architectures nor model_type."])
    if family is None:
        # No name is suggested: an architecture is no misspelling of another one.
        name = in_json(names[0] if names else kind)
        raise CheckpointError(doing, [f"its architecture is {name}, which is not known. Known: {', '.join(known)}."])
    if json.get("model_type", family.model_type) != family.model_type:
        fault = f"architectures names {family.architecture}, and model_type is {in_json(kind)}, not "
        raise CheckpointError(doing, [f"{fault}{family.model_type!r}: they are of different families."])
    return family


_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


def _kind(name: str) -> type:
    """The type of a field's values."""
    config, _, field = name.rpartition(".")
    default = getattr(MoEConfig if config else ModelConfig, field)
    return int if default is None else type(default)


def _fits(name: str, value: Any) -> bool:
    kind = _kind(name)
    return isinstance(value, bool) == (kind is bool) and isinstance(value, (int, float) if kind is float else kind)


def known_entries(family: Family) -> frozenset[str]:
    """Return the entries of config.json that are read, or known to change nothing, or so under some value."""
    read = {key for option in family.options.values() for key in option.keys}
    read |= {*family.length, *WINDOW} | ({*ROPE} if family.rope_base is not None else set())
    read |= {"logit_scale"} if family.logit_scale is not None else set()
    return frozenset(read | {*family.inactive, *family.ignored_entries, *INACTIVE, *IGNORED})


def _unknown_faults(family: Family, json: Mapping[str, Any]) -> Iterator[str]:
    """Entries of which it is not known here what they change."""
    known = known_entries(family)
    for key in (key for key in json if key not in known):
        yield (
            f"{key} is {in_json(json[key])}, an entry of config.json that is not known here for {family.title}; "
            "if it changes nothing that the model computes, delete it."
        )


def _inactive_faults(family: Family, json: Mapping[str, Any]) -> Iterator[str]:
    """Faults of entries that ask for something models here do not have."""
    for key, values in {**INACTIVE, **family.inactive}.items():
        value = json.get(key, values[0])
        if value not in values:
            remedy = REMEDIES.get(key, f"which is not supported; {in_json(values[0])} is")
            yield f"{key} is {in_json(value)}, {remedy}."


#: Fields that change nothing that a checkpoint holds. √E is folded into the tables.
FREE = ("vocabulary_multiple", "remat", "lora", "scale_embedding", "int8", "context_length", "sliding_window")


def _reasons(family: Family, config: ModelConfig) -> list[str]:
    """Say why a model does not belong to a family; nothing if it does."""
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
    if config.moe and name == "moe.k":
        return config.moe.choices
    if config.moe and name == "moe.router" and config.moe.router in _TOP_K:
        return "top-k"
    if config.moe and name == "moe.renormalize" and config.moe.router in _TOP_K:
        return _TOP_K[config.moe.router]
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value
