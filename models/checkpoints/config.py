"""Conversion between config.json and `ModelConfig`, by the table of the model's family."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gspmd.moe.config import MoEConfig
from gspmd.reading import folder_fault

from ..config import ModelConfig
from ..tensors import width_of_shared
from .families import FAMILIES, Family
from .families.entries import (
    BIASES,
    IGNORED,
    IGNORED_BY_DECODERS,
    INACTIVE,
    REMEDIES,
    STACKS,
    in_json,
    is_number,
    is_read_packed,
    is_whole,
)
from .families.family import REQUIRED
from .families.local_rope import ENTRIES as LOCAL_ROPE
from .families.local_rope import local_fields, local_rope_reasons, read_local_rope, write_local_rope
from .families.rope import read_rope, rope_entries, rope_reasons, write_rope
from .families.window import ENTRIES as WINDOW
from .families.window import read_window, window_reasons, write_window
from .files import ADAPTER, DTYPES, CheckpointError, Files, other_format, read_json


def model_config(directory: str | os.PathLike) -> ModelConfig:
    """Return the model configuration that a checkpoint's config.json describes.

    Args:
        directory: the checkpoint's folder.

    Raises:
        CheckpointError (a ValueError): the file is missing; or the architecture is unknown (the message lists the known
            architectures); or the file asks for features that these models do not have (the message lists all of these
            features).

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
    """A checkpoint as its config.json describes it.

    Attributes:
        family: the family, which determines the names and shapes of the checkpoint's tensors.
        config: the model configuration.
        factors: a mapping from a parameter's path, without "blocks.0.", to the factor by which the parameter's tensor
            is multiplied.
        modules: number of prediction modules after the last layer (see `Family.modules`).
        remark: a sentence if the tensors contradict config.json, or if images are not read; otherwise empty.
    """

    family: Family
    config: ModelConfig
    factors: Mapping[str, float]
    modules: int = 0
    remark: str = ""


def described(directory: str | os.PathLike) -> Described:
    """Read the config.json of a checkpoint.

    If the file says that the model is tied, the embedding table is compared with the table of the output. If both
    tables exist and differ, the model is untied, whatever config.json says, as in transformers.

    Raises:
        CheckpointError: config.json cannot be used, for one of the reasons listed under `model_config`.
    """
    doing = f"cannot read the model of checkpoint {str(directory)!r}:"
    fault, path = folder_fault(directory), Path(directory) / "config.json"
    if (fault or not path.exists()) and (other := other_format(Path(directory))):
        raise CheckpointError(doing, [other])
    if fault or not path.exists():
        remedy = "Give the folder of a checkpoint, or of a run of gspmd train."
        raise CheckpointError(doing, [f"{fault or 'config.json is missing'}. {remedy}"])
    if (path.parent / ADAPTER).exists():
        # With peft installed, transformers reads such a folder as the adapted model, and without it as the plain one.
        fact = f"it holds both a LoRA adapter ({ADAPTER}) and a model, so it is unclear which one to read."
        remedy = "Merge them with peft's merge_and_unload(), or remove the adapter's files to read the model alone."
        raise CheckpointError(doing, [f"{fact} {remedy}"])
    json = read_json(path, doing)
    family = _family(json, doing)
    generation = path.with_name("generation_config.json")
    if family.has_encoder and generation.exists():  # where transformers writes a decoder's first token
        json = {key: value for key, value in read_json(generation, doing).items() if key == _START} | json
    if family.text_part is not None:
        json = _text_part(family, json, doing)
    found = _described(family, json, doing)
    if family.text_part is not None:
        found = replace(found, remark="the part of the model that reads text is loaded, the part for images is not")
    if not found.config.tied:
        return found
    first, second = (family.tensors[path].name for path in ("embedding.table", "output.table"))
    try:
        files = Files(directory, family.renamed)
    except CheckpointError:  # a model can be planned before its tensors are downloaded; `load` reports missing ones
        return found
    if not {first, second} <= files.tensors.keys() or files.tensors[first].dtype not in DTYPES:
        return found
    if files.equal(first, second):
        return found
    remark = f"{second} is not {first}, so the model is not tied, though config.json says it is (tie_word_embeddings)"
    if family.multipliers:  # some multipliers are divided out of the last norm, but only in tied models
        found = _described(family, json | {"tie_word_embeddings": False}, doing)
    return replace(found, config=replace(found.config, tied=False), remark=remark)


def _text_part(family: Family, json: Mapping[str, Any], doing: str) -> dict[str, Any]:
    """Return the entries about the text model in the config.json of a model for text and images."""
    entries = json.get("text_config")
    if not isinstance(entries, dict):
        raise CheckpointError(
            doing, [f"text_config is {in_json(entries)}; it must be an object with the settings of the text model."]
        )
    if (kind := entries.get("model_type", family.text_type)) != family.text_type:
        fault = f"model_type of text_config is {in_json(kind)}, which is not supported; {in_json(family.text_type)} is."
        raise CheckpointError(doing, [fault])
    named = {"architectures": [family.architecture], "model_type": family.model_type}
    outer = {key: json[key] for key in ("tie_word_embeddings", "quantization_config") if key in json}
    return {**(family.text_part or {}), **entries, **outer, **named}


def _described(family: Family, json: Mapping[str, Any], doing: str) -> Described:
    json = _without_repetition(family, json)
    faults = [*_unknown_faults(family, json), *_inactive_faults(family, json)]
    values: dict[str, Any] = dict(family.fixed)
    for name, option in family.options.items():
        entries = option.entries(json)
        (key, value), *others = entries.items()
        if any(other != value for _, other in others):
            given = ", ".join(f"{key} is {in_json(value)}" for key, value in entries.items())
            faults.append(f"{given}; they are names of one entry: keep only one of them.")
        elif value is REQUIRED:
            faults.append(f"{key} is missing.")
        elif value is None and option.null is None:
            values[name] = None
        elif option.names is None and not callable(value) and not _fits(name, value):
            faults.append(f"{key} is {in_json(value)}; it must be {_KINDS[_kind(name)]}.")
        elif name == "rotary_size" and value == 0:  # in ModelConfig, 0 stands for the whole head
            faults.append(f"{key} is 0: models that do not rotate by position are not supported.")
        elif option.names is not None and not _is_named(value, option.names):
            known = ", ".join(map(repr, option.names))
            faults.append(f"{key} is {in_json(value)}, which is not supported; supported: {known}.")
        else:
            values[name] = option.names[value] if option.names else value
    length, modules = _length(family, json, faults), _modules(family, json, faults)
    scale = json.get("logit_scale", family.logit_scale) if family.logit_scale is not None else 1.0
    if not is_number(scale):
        faults.append(f"logit_scale is {in_json(scale)}; it must be a number.")
    rooted, kept = _root_scaled(family, json, faults), _kept(family, json, faults)
    multipliers = _multipliers(family, json, faults)
    if not faults and not values.get("heads"):
        faults.append("its attention has no heads.")
    if not faults and family.has_encoder and values["encoder_layers"] < 1:
        faults.append("its encoder has no layers.")
    if faults:
        raise CheckpointError(doing, faults)
    values |= {name: value(values) for name, value in values.items() if callable(value)}
    values |= family.agreement.read(json, values, faults) if family.agreement else {}
    if faults:
        raise CheckpointError(doing, faults)
    values |= {name: function(values) for name, function in family.derived.items()}
    own = {} if family.agreement is None else {*family.agreement.keys}
    others = {key: value for key, value in json.items() if key not in own}
    values |= {"context_length": length, **read_window(family.window, others, values["layers"], faults)}
    if family.default_rope and not json.get("rope_scaling") and json.get("rope_parameters") is None:
        json = {**json, "rope_parameters": family.default_rope}
    json, local = read_local_rope(family, json, faults)
    values |= read_rope(family, json, values["head_size"], faults)
    moe = {name.removeprefix("moe."): values.pop(name) for name in [*values] if name.startswith("moe.")}
    if faults:
        raise CheckpointError(doing, faults)
    values |= local_fields(local, values)
    try:
        if moe:
            values["moe"] = MoEConfig(**moe, dispatch="dropless")
        config = ModelConfig(**values, scale_embedding=family.scale_embedding)
    except ValueError as error:
        raise CheckpointError(doing, str(error).splitlines()) from None
    if rooted:
        scale = config.embed**-0.5
    outputs = [f"{stack}moe.{name}" for stack in ("encoder.", "") for name in ("w_out", "b_out")]
    factors = {"output.norm": float(scale), **dict.fromkeys(outputs, kept)}
    for key, value in multipliers.items():
        for path, factor in family.multipliers[key].factors(value, tied=config.tied).items():
            factors[path] = factors.get(path, 1.0) * factor
    return Described(family, config, factors, modules)


def _multipliers(family: Family, json: Mapping[str, Any], faults: list[str]) -> dict[str, float]:
    """Return the value of every entry in `Family.multipliers`, or 1 for an entry that the file does not have."""
    values = {key: json.get(key, 1.0) for key in family.multipliers}
    wrong = {key: value for key, value in values.items() if not is_number(value) or value <= 0}
    faults += [f"{key} is {in_json(value)}; it must be a positive number." for key, value in wrong.items()]
    return {key: float(value) for key, value in values.items() if key not in wrong}


def _without_repetition(family: Family, json: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out rope_theta and partial_rotary_factor if they repeat entries that have other names in this family."""
    pairs = zip(family.rope_names, ("rope_theta", "partial_rotary_factor"))
    repeated = {usual for own, usual in pairs if own != usual and own in json and json.get(usual) == json[own]}
    return {key: value for key, value in json.items() if key not in repeated}


def _length(family: Family, json: Mapping[str, Any], faults: list[str]) -> int | None:
    """Return the number of tokens of the longest text, or the family's default if config.json does not state it."""
    given = {key: json[key] for key in family.length if key in json}
    for key, value in given.items():
        if not is_whole(value) or value < 1:
            faults.append(f"{key} is {in_json(value)}; it must be a whole number of tokens.")
    if len(set(map(in_json, given.values()))) > 1:
        faults.append(f"{' and '.join(given)} differ, but are names of one entry: keep only one of them.")
    return next(iter(given.values()), family.default_length)


def _modules(family: Family, json: Mapping[str, Any], faults: list[str]) -> int:
    """Return the number of multi-token prediction modules after the last layer."""
    given = {key: json[key] for key in family.modules if key in json}
    for key, value in given.items():
        if not is_whole(value) or value < 0:
            faults.append(f"{key} is {in_json(value)}; it must be a whole number of modules.")
    if len(set(map(in_json, given.values()))) > 1:
        faults.append(f"{' and '.join(given)} differ, but are names of one entry: keep only one of them.")
    return next(iter(given.values()), 1) if family.modules else 0


def _root_scaled(family: Family, json: Mapping[str, Any], faults: list[str]) -> bool:
    """Return whether logits are multiplied by 1/√E."""
    given = [key for key in family.root_scaled if key in json]
    if given and not isinstance(json[given[0]], bool):
        faults.append(f"{given[0]} is {in_json(json[given[0]])}; it must be true or false.")
    return bool(family.root_scaled) and bool(not given or json[given[0]])


def _kept(family: Family, json: Mapping[str, Any], faults: list[str]) -> float:
    """Return the factor of experts' outputs in evaluation: 1 minus the fraction of the outputs that training drops."""
    if family.output_dropout is None:
        return 1.0
    key, default = family.output_dropout
    share = json.get(key, default)
    if is_number(share) and 0 <= share < 1:
        return 1 - share
    faults.append(f"{key} is {in_json(share)}; it must be in [0, 1).")
    return 1.0


_NEAREST = 6
"""The largest number of families whose reasons an error lists."""


def expressing(config: ModelConfig) -> Family:
    """Return the first family that can express a model.

    Raises:
        CheckpointError: no family can express the model. The message says why the nearest families cannot.
    """
    reasons = {}
    for family in FAMILIES:
        reasons[family.title] = _reasons(family, config)
        if not reasons[family.title]:
            return family
    nearest = sorted(reasons.items(), key=lambda item: _distance(item[1]))[:_NEAREST]
    faults = [f"{title}: {'; '.join(each)}." for title, each in nearest]
    faults.append(f"The other {len(FAMILIES) - len(nearest)} families differ from it in at least as many points.")
    raise CheckpointError("cannot save this model as a checkpoint: no family of public models has its form:", faults)


def _distance(reasons: list[str]) -> int:
    """Return the number of reasons against a family, counting each reason about the kind of model five times."""
    kinds = ("it has experts", "it has no experts", "it has an encoder")
    return sum(5 if reason in kinds else 1 for reason in reasons)


def written(family: Family, config: ModelConfig, length: int, dtype: str) -> dict[str, Any]:
    """Return a model's config.json as a dict.

    Args:
        family: the model's family.
        config: the model configuration.
        length: number of tokens of the longest sequence.
        dtype: the dtype of the tensors.
    """
    json: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for name, option in family.options.items():
        value = _value(config, name)
        if name == "attention_scale" and value is None:
            value = config.head_size**-0.5
        if option.names:
            value = next(theirs for theirs, ours in option.names.items() if ours == value)
        json[option.keys[0]] = value
    json |= {key: values[0] for key, values in {**STACKS[family.has_encoder], **family.inactive}.items()}
    json |= dict.fromkeys(family.length[:1], length) | write_rope(family, config) | write_local_rope(family, config)
    if family.agreement:
        json |= family.agreement.write(config)
        if scaling := family.agreement.write_scaling(config):
            json["rope_scaling"] = json["rope_scaling"] | scaling
    json |= write_window(family.window, config) | {"torch_dtype": dtype}
    json |= {family.output_dropout[0]: 0.0} if family.output_dropout else {}
    json |= dict.fromkeys(family.multipliers, 1.0) | dict.fromkeys(family.modules[:1], 0)
    if family.logit_scale is not None:
        json["logit_scale"] = 1.0
    if family.default_rope and config.rope_scaling is None:
        json["rope_scaling"] = {"rope_type": "default"}
    if config.positions == "learned" and config.context_length is not None:  # the number of position vectors
        json[family.length[0]] = config.context_length
    if not family.has_encoder:  # the default of some families is a token that a smaller vocabulary does not have
        json["pad_token_id"] = None
    return json


def _family(json: Mapping[str, Any], doing: str) -> Family:
    """Return the family that the entry `architectures` names, or that `model_type` names if there is no such entry."""
    named, kind = json.get("architectures") or [], json.get("model_type")
    if not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise CheckpointError(doing, [f"architectures is {in_json(named)}; it must be a list of names."])
    known = {family.architecture: family for family in FAMILIES}
    known |= {alias: family for family in FAMILIES for alias in family.aliases}
    names = named or [family.architecture for family in FAMILIES if family.model_type == kind]
    family = next((known[name] for name in names if name in known), None)
    if not names and kind is None:
        raise CheckpointError(doing, ["config.json names no model: it has neither architectures nor model_type."])
    if family is None:
        # No close match is suggested: an unknown architecture is rarely a misspelling of a known one.
        name = in_json(names[0] if names else kind)
        raise CheckpointError(doing, [f"its architecture is {name}, which is not known. Known: {', '.join(known)}."])
    if json.get("model_type", family.model_type) != family.model_type:
        fault = f"architectures names {family.architecture}, but model_type is {in_json(kind)}, not "
        raise CheckpointError(doing, [f"{fault}{family.model_type!r}: they belong to different families."])
    return family


#: The entry for the first token of a decoder's text.
_START = "decoder_start_token_id"

_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


def _kind(name: str) -> type:
    """Return the type of the values of the field `name` of `ModelConfig`."""
    within, _, field = name.rpartition(".")
    config = MoEConfig if within else ModelConfig
    if config.__annotations__[field] == "float | None":
        return float
    default = getattr(config, field)
    return int if default is None else type(default)


def _is_named(value: Any, names: Mapping[Any, Any]) -> bool:
    """Return whether a value of config.json is a key of `names`, where 0 and 1 are different from False and True."""
    return any(value == name and isinstance(value, bool) == isinstance(name, bool) for name in names)


def _fits(name: str, value: Any) -> bool:
    kind = _kind(name)
    return isinstance(value, bool) == (kind is bool) and isinstance(value, (int, float) if kind is float else kind)


def known_entries(family: Family) -> frozenset[str]:
    """Return the entries of config.json that are read, or that have no effect if they have certain values."""
    read = {key for option in family.options.values() for key in option.keys}
    read |= {*family.length, *WINDOW, *rope_entries(family), *family.multipliers, *family.modules}
    read |= {*LOCAL_ROPE} if family.local_rope_base is not None else set()
    read |= {"logit_scale"} if family.logit_scale is not None else set()
    read |= {*family.root_scaled, *(family.output_dropout or ())[:1]} | (
        {*family.agreement.keys} if family.agreement else set()
    )
    ignored = IGNORED if family.has_encoder else IGNORED | IGNORED_BY_DECODERS
    without_effect = {*family.inactive, *family.ignored_entries, *INACTIVE, *_absent_biases(family), *STACKS[True]}
    return frozenset(read | without_effect | ignored)


def _absent_biases(family: Family) -> Mapping[str, tuple]:
    """Return config.json's entries for biases that this family does not have, with the values that mean "no bias"."""
    read = {key for option in family.options.values() for key in option.keys} | {*family.inactive}
    return {key: values for key, values in BIASES.items() if key not in read}


def _unknown_faults(family: Family, json: Mapping[str, Any]) -> Iterator[str]:
    """Yield a fault for every entry whose effect is unknown."""
    known = known_entries(family)
    for key in (key for key in json if key not in known):
        yield (
            f"{key} is {in_json(json[key])}, an entry of config.json that is not known for {family.title}; "
            "delete it if the model's class in transformers does not read it."
        )


def _inactive_faults(family: Family, json: Mapping[str, Any]) -> Iterator[str]:
    """Yield a fault for every entry that asks for a feature that these models do not have."""
    own = () if family.agreement is None else family.agreement.keys
    general = {key: values for key, values in INACTIVE.items() if key not in own}
    for key, values in {**general, **_absent_biases(family), **STACKS[family.has_encoder], **family.inactive}.items():
        value = json.get(key, values[0])
        if value not in values and not (key == "quantization_config" and is_read_packed(value)):
            remedy = REMEDIES.get(key, f"which is not supported; {in_json(values[0])} is")
            yield f"{key} is {in_json(value)}, {remedy}."


#: Fields of a model that do not decide whether it can be written. (For `scale_embedding`, √E is in the tables.)
FREE = (
    *("vocabulary_multiple", "remat", "offload", "lora", "scale_embedding", "int8", "stacked"),
    "context_length",
)


def _reasons(family: Family, config: ModelConfig) -> list[str]:
    """Return the reasons why a family cannot express a model; empty if it can."""
    names = [each.name for each in fields(config) if each.name not in (*FREE, "moe", "sliding_window", "layer_kinds")]
    names += [f"moe.{each.name}" for each in fields(MoEConfig)] if config.moe else []
    values = {name: _value(config, name) for name in names}
    found = [
        f"{name} is {values[name]!r}, not {value!r}"
        for name, value in _fixed(family).items()
        if name in values and values[name] != value
    ]
    for name, option in family.options.items():
        if option.names and name in values and values[name] not in option.names.values():
            known = dict.fromkeys(option.names.values())
            found.append(f"{name} is {values[name]!r}, not {' or '.join(map(repr, known))}")
    experts = "moe.experts" in family.options
    if experts != bool(config.moe):
        found.append("it has experts" if experts else "it has no experts")
    if family.has_encoder and not config.encoder_layers:
        found.append("it has an encoder")
    found += [
        f"{name} is {values[name]!r}, not {function(values)!r}"
        for name, function in family.derived.items()
        if name in values and values[name] != function(values)
    ]
    shared: dict[Any, dict[str, Any]] = {}
    for name, option in family.options.items():
        if name in values and option.names is None:
            shared.setdefault(option.keys[0], {})[name] = values[name]
    for key, each in shared.items():
        if len(set(each.values())) > 1:
            found.append(f"{' and '.join(each)} differ, but are set by one option, {key}")
    found += family.agreement.reasons(config) if family.agreement else []
    named = family.agreement is not None and "layer_kinds" in family.agreement.fields
    return [
        *found,
        *rope_reasons(family, config),
        *window_reasons(family.window, config, named=named),
        *local_rope_reasons(family, config),
    ]


#: Routers that equal top-k if they draw nothing at random, and whether they divide gates by their sum.
_TOP_K = {"gshard": True, "st-moe": True, "switch": False}


def _fixed(family: Family) -> Mapping[str, Any]:
    """Return the fixed fields of a family; a router that is equivalent to `top-k` is replaced by `top-k`."""
    router = family.fixed.get("moe.router")
    if router not in _TOP_K:
        return family.fixed
    choices = MoEConfig(router=router).choices
    return {**family.fixed, "moe.router": "top-k", "moe.k": choices, "moe.renormalize": _TOP_K[router]}


def _value(config: ModelConfig, name: str) -> Any:
    """Return the value of the field `name`, with defaults such as 0 or None replaced by the values that they mean."""
    if name == "rotary_size":
        return config.rotary
    if config.moe and name == "moe.k":
        return config.moe.choices
    if name == "moe.kept_groups":
        return config.moe.chosen_groups if config.moe else 1
    if name == "moe.shared_width":
        return width_of_shared(config)
    if name == "moe.offset":
        return config.expert_place
    if config.moe and name == "moe.router" and config.moe.router in _TOP_K:
        return "top-k"
    if config.moe and name == "moe.renormalize" and config.moe.router in _TOP_K:
        return _TOP_K[config.moe.router]
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value
