"""The sampling settings in a checkpoint's generation_config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..decoding import GenerationError, Sampling
from .files import CheckpointError
from .special import optional

CONFIG = "generation_config.json"

#: Unsupported entries that would change which texts are likely, each with the value that has no effect.
_UNSUPPORTED = {
    "repetition_penalty": 1, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "typical_p": 1, "top_h": None, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "bad_words_ids": None, "force_words_ids": None, "constraints": None, "sequence_bias": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "forced_decoder_ids": None,
    "min_length": 0, "min_new_tokens": 0, "exponential_decay_length_penalty": None, "stop_strings": None,
    "guidance_scale": 1, "penalty_alpha": 0, "dola_layers": None, "num_beam_groups": 1, "diversity_penalty": 0,
    "watermarking_config": None, "token_healing": False,
}  # fmt: skip

_NUMBER, _WHOLE = ((int, float), "a number"), ((int,), "a whole number")
_KINDS = {
    "temperature": _NUMBER, "top_p": _NUMBER, "min_p": _NUMBER, "top_k": _WHOLE, "num_beams": _WHOLE,
    "do_sample": ((bool,), "true or false"),
}  # fmt: skip


@dataclass(frozen=True)
class GenerationConfig:
    """The entries of a generation_config.json that decide how tokens are sampled.

    Attributes:
        settings: the fields of `Sampling` that the file sets. If `do_sample` is false, this is only temperature 0.
        beams: the number of beams, or 1 if the file does not set this number.
        unsupported: entries that are not supported, and that would change the generated texts.
    """

    settings: Mapping[str, Any]
    beams: int
    unsupported: Mapping[str, Any]

    @property
    def sampling(self) -> Sampling:
        """The settings of the file. Settings that the file does not have keep the defaults of `Sampling`."""
        return Sampling(**self.settings)

    @property
    def fault(self) -> str:
        """A sentence that names the unsupported entries, or an empty string if there are none."""
        named = ", ".join(f"{name} {value!r:.40}" for name, value in self.unsupported.items())
        verb = "is" if len(self.unsupported) == 1 else "are"
        return f"{CONFIG} sets {named}, which {verb} not supported here." if named else ""

    @classmethod
    def read(cls, directory: str | os.PathLike) -> GenerationConfig:
        """Read the file generation_config.json in a checkpoint's folder; if there is no such file, nothing is set.

        Raises:
            CheckpointError: the file cannot be read, or a setting is not a number in the allowed range.
        """
        doing = f"cannot read how checkpoint {str(directory)!r} draws tokens:"
        found = optional(Path(directory) / CONFIG, doing)
        entries = {name: value for name, value in found.items() if value is not None}
        faults = [
            f"{name} of {CONFIG} is {entries[name]!r:.80}; it must be {wanted}."
            for name, (kinds, wanted) in _KINDS.items()
            if name in entries and type(entries[name]) not in kinds  # a bool is an int for isinstance
        ]
        if faults:
            raise CheckpointError(doing, faults)
        names = ("temperature", "top_k", "top_p", "min_p")
        settings: dict[str, Any] = {name: entries[name] for name in names if name in entries}
        if entries.get("do_sample") is False:
            settings = {"temperature": 0}
        unsupported = {
            name: entries[name]
            for name, nothing in _UNSUPPORTED.items()
            if name in entries and entries[name] not in (nothing, [], {})
        }
        config = cls(settings, entries.get("num_beams", 1), unsupported)
        try:
            config.sampling  # noqa: B018
        except GenerationError as error:
            _, *lines = str(error).splitlines()
            raise CheckpointError(doing, [f"{CONFIG}: {line.strip()}." for line in lines]) from None
        return config


def sampling(directory: str | os.PathLike) -> Sampling:
    """Return the sampling settings in a checkpoint's generation_config.json.

    If `do_sample` is false, the likeliest token is chosen. Settings that the file does not have keep the defaults of
    `Sampling`.

    Args:
        directory: the checkpoint's folder.

    Raises:
        CheckpointError: the file cannot be read, or it has a setting that `Sampling` does not have, such as a penalty
            for repetitions. `GenerationConfig.read(directory).sampling` ignores such settings.

    Example:
        >>> import json, pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder) / "generation_config.json"
        ...     _ = file.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_p": 0.9}))
        ...     sampling(folder)
        Sampling(temperature=0.6, top_k=0, top_p=0.9, min_p=0.0)

    Differs: transformers chooses the likeliest token if `do_sample` is missing, and keeps the 50 likeliest tokens if
        `top_k` is missing.
    """
    found = GenerationConfig.read(directory)
    if found.unsupported:
        doing = f"cannot draw tokens as checkpoint {str(directory)!r} asks:"
        raise CheckpointError(doing, [found.fault, f"GenerationConfig.read({str(directory)!r}).sampling ignores this."])
    return found.sampling
