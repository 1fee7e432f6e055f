"""Scalings of the rotary position embedding, for sequences longer than the sequences of a model's pretraining."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, get_args

ScalingKind = Literal["llama3", "linear", "dynamic", "yarn", "longrope"]
SCALINGS: tuple[ScalingKind, ...] = get_args(ScalingKind)

#: The fields of `RopeScaling` that each kind reads.
_FIELDS: dict[str, tuple[str, ...]] = {
    "llama3": ("factor", "original_length", "low_frequency", "high_frequency"),
    "linear": ("factor",),
    "dynamic": ("factor", "original_length"),
    "yarn": ("factor", "original_length", "low_frequency", "high_frequency", "truncate", "attention_factor"),
    "longrope": ("factor", "original_length", "short_factors", "long_factors", "attention_factor"),
}


@dataclass(frozen=True)
class RopeScaling:
    """A scaling of the rotary embedding's wavelengths, for sequences longer than the sequences of pretraining.

    - `linear`: every wavelength is multiplied by `factor`.
    - `llama3`: wavelengths above original_length / low_frequency are multiplied by `factor`. Wavelengths below
      original_length / high_frequency are unchanged. In between, the frequency is interpolated. If low_frequency and
      high_frequency are equal, as in Llama 4 Scout, no wavelength lies in between.
    - `yarn`: the same as `llama3`, but in between the frequency is interpolated by the index of the pair of elements.
      Cosines and sines are multiplied by `attention_factor`.
    - `dynamic`: if the length L of a text exceeds original_length, the base is multiplied by (factor · L /
      original_length - factor + 1)^(R / (R - 2)), where R is the number of rotated elements of a head.
    - `longrope`: the wavelength of each pair is multiplied by a factor of its own. The factors are `short_factors` in
      texts of up to original_length tokens, and `long_factors` in longer texts. Cosines and sines are multiplied by
      `attention_factor`.

    The length of a text counts all its tokens, and the same length is used for each of these tokens. In training a text
    is a row, or each text in a packed row. In generation the length is the largest that the text can reach, the tokens
    of the prompt and all new tokens.

    Raises:
        ValueError: the fields do not fit the kind of scaling. The message lists every fault.

    Example:
        >>> scaling = RopeScaling("yarn", factor=32.0, original_length=4096)
        >>> scaling.high_frequency, f"{scaling.cosine_factor:.4f}"
        (32.0, '1.3466')

    Source: Chen et al. 2023 (arXiv 2306.15595) for linear; the reference code of Llama 3.1 (`apply_scaling`) for
        llama3; Peng et al. 2023, YaRN (arXiv 2309.00071), section 3, for yarn and dynamic; Ding et al. 2024, LongRoPE
        (arXiv 2402.13753), for longrope; `rope_type` in transformers for all of them.
    """

    kind: ScalingKind = "llama3"
    """llama3, linear, dynamic, yarn or longrope."""
    factor: float = 8.0
    """Factor by which long wavelengths are multiplied. For longrope, the length of the longest text divided by
    `original_length`, from which only the default attention factor is computed."""
    low_frequency: float = 1.0
    """Wavelengths that make fewer turns than this within the original length are multiplied by the full factor."""
    high_frequency: float | None = None
    """Wavelengths that make more turns than this within the original length are unchanged; None for 4 (llama3) or 32
    (yarn)."""
    original_length: int = 8192
    """Length of the sequences in pretraining, in tokens."""
    truncate: bool = True
    """Whether yarn rounds the indices of the two pairs between which it interpolates."""
    attention_factor: float | None = None
    """Factor by which cosines and sines are multiplied; None for 1 + log(factor) / 10 (yarn), or √(1 + log(factor) /
    log(original_length)) (longrope), or 1 if `factor` is at most 1."""
    short_factors: tuple[float, ...] = ()
    """Factors of the wavelengths of longrope's pairs up to the original length."""
    long_factors: tuple[float, ...] = ()
    """Factors of the wavelengths of longrope's pairs beyond the original length."""

    def __post_init__(self) -> None:
        if self.high_frequency is None and self.kind in ("llama3", "yarn"):
            object.__setattr__(self, "high_frequency", 32.0 if self.kind == "yarn" else 4.0)
        if faults := list(_faults(self)):
            raise ValueError("cannot scale rotary wavelengths: " + "; ".join(faults))

    @property
    def by_length(self) -> bool:
        """Whether the scaling depends on the length of a text."""
        return self.kind in ("dynamic", "longrope")

    @property
    def cosine_factor(self) -> float:
        """The factor by which cosines and sines are multiplied: `attention_factor`, or its default for this kind."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1 or self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.kind == "yarn":
            return 1 + 0.1 * math.log(self.factor)
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))


def _faults(scaling: RopeScaling) -> Iterator[str]:
    kind = scaling.kind
    if kind not in SCALINGS:
        yield f"kind is {kind!r}; it must be one of {', '.join(SCALINGS)}"
        return
    for each in fields(RopeScaling):
        value = getattr(scaling, each.name)
        if each.name not in ("kind", *_FIELDS[kind]) and value != each.default:
            yield f"{kind} scaling has no {each.name} (given: {value}); leave it out"
    if not 0 < scaling.factor < math.inf:
        yield f"factor is {scaling.factor}; it must be positive"
    if scaling.original_length < 2:
        yield f"original_length is {scaling.original_length}; it must be at least 2"
    high = scaling.high_frequency
    rises = high is not None and (scaling.low_frequency < high or (kind == "llama3" and scaling.low_frequency == high))
    if high is not None and not (rises and scaling.low_frequency > 0 and high < math.inf):
        fact = f"low_frequency is {scaling.low_frequency}, and high_frequency is {high}"
        yield f"{fact}; both must be positive, and high_frequency the larger"
    if scaling.attention_factor is not None and not 0 < scaling.attention_factor < math.inf:
        yield f"attention_factor is {scaling.attention_factor}; it must be positive, or be left out"
    if kind == "longrope":
        for name in ("short_factors", "long_factors"):
            wrong = [value for value in getattr(scaling, name) if not 0 < value < math.inf]
            if wrong:
                yield f"{name} has {wrong[0]}; all of them must be positive"
        short, long = len(scaling.short_factors), len(scaling.long_factors)
        if short != long or not short:
            yield f"short_factors has length {short}, and long_factors {long}; give one of each for every pair"
    if kind == "dynamic" and scaling.factor < 1:
        yield f"factor is {scaling.factor}; for dynamic it must be at least 1"
