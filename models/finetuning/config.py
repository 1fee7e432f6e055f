"""The configuration of low-rank adapters: the weights that have adapters, the adapters' rank and their factor."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf

from gspmd.annotate.errors import suggestion

TARGETS = {
    "attention.w_q": ("E", "HD"), "attention.w_k": ("E", "KD"), "attention.w_v": ("E", "KD"),
    "attention.w_o": ("HD", "E"),
    "attention.w_q_down": ("E", "U"), "attention.w_q_up": ("U", "HD"), "attention.w_k_down": ("E", "Z"),
    "attention.w_k_up": ("Z", "HD"), "attention.w_v_up": ("Z", "HD"),
    "cross.w_q": ("E", "HD"), "cross.w_k": ("E", "KD"), "cross.w_v": ("E", "KD"), "cross.w_o": ("HD", "E"),
    "ffn.w_in": ("E", "F"), "ffn.w_gate": ("E", "F"), "ffn.w_out": ("F", "E"),
    "moe.shared_in": ("E", "F"), "moe.shared_gate": ("E", "F"), "moe.shared_out": ("F", "E"),
    "output.table": ("E", "V"),
}  # fmt: skip
"""Input and output dimensions of the weights that may have adapters, by layout key."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: x·W becomes x·W + (alpha / rank) · (x·A)·B, and only A and B are trained.

    Example:
        >>> LoraConfig(rank=8, targets=("attention.w_q", "ffn.w_inn"))
        Traceback (most recent call last):
        ValueError: lora.targets has 'ffn.w_inn', which cannot have an adapter. Did you mean 'ffn.w_in'?

    Source: Hu et al. 2021, LoRA (arXiv 2106.09685), section 4.1.
    """

    rank: int = 0
    """Number of columns of A and rows of B; 0 for no adapters, so that all parameters are trained."""
    alpha: float = 16.0
    """The adapters' product is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("attention.w_q", "attention.w_v")
    """The weights that have adapters, by their keys in a layout."""

    def __post_init__(self) -> None:
        faults = []
        if self.rank < 0:
            faults.append(f"lora.rank is {self.rank}; it must not be negative")
        elif self.rank >= 2**31:
            faults.append(f"lora.rank is {self.rank}; it must be less than 2**31")
        if not 0 < self.alpha < inf:
            faults.append(f"lora.alpha is {self.alpha}; it must be positive")
        unread = [f.name for f in fields(self) if f.name != "rank" and getattr(self, f.name) != f.default]
        if self.rank == 0 and unread:  # otherwise all parameters would be trained, and these settings ignored
            named = " and ".join(f"lora.{name}" for name in unread)
            faults.append(f"{named} cannot be set while lora.rank is 0, which means no adapters; give lora.rank")
        if not self.targets:
            faults.append("lora.targets is empty; name a weight, such as attention.w_q")
        for key in self.targets:
            if key not in TARGETS:
                near = suggestion(key, TARGETS).strip() or f"These can: {', '.join(TARGETS)}."
                faults.append(f"lora.targets has {key!r}, which cannot have an adapter. {near}")
        if faults:
            raise ValueError("\n".join(faults))
