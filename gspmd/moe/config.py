"""What a mixture-of-experts block is made of: one frozen record, checked when it is made."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

ROUTERS = {"switch": 1, "gshard": 2}  # experts that each token is sent to
DISPATCHES = ("sort", "onehot")
PAPER_JITTER = {"switch": 1e-2, "gshard": 0.0}


@dataclass(frozen=True)
class MoEConfig:
    """Settings of the mixture-of-experts blocks of a model.

    `capacity_factor` counts slots per routed choice: an expert takes factor · k · tokens / experts of each group, k
    being the choices per token (1 for switch, 2 for gshard), rounded up, at least 1, at most the tokens of the group.

    Attributes:
        experts: number of experts X in each block.
        every: a mixture-of-experts block stands at every n-th layer of the model.
        router: "switch" (top-1, Fedus et al. 2021) or "gshard" (top-2, Lepikhin et al. 2020).
        capacity_factor: slots per routed choice in training.
        evaluation_capacity_factor: slots per routed choice in evaluation.
        groups: groups G that the tokens of a batch are routed in; None makes every sequence a group.
        dispatch: "sort" (gather into the capacity buffer) or "onehot" (the papers' einsums).
        aux_weight: the load-balancing loss of perfectly balanced experts, whichever the router.
        jitter: half-width of the factor on the router's input in training; None is the router's paper's, 1e-2 or none.

    Raises:
        ValueError: naming every setting that cannot be.

    Example:
        >>> MoEConfig(experts=8, capacity_factor=1.25).capacity(tokens=128)
        20
        >>> MoEConfig(experts=8, router="gshard", capacity_factor=1.0).capacity(tokens=128)
        32
    """

    experts: int = 8
    every: int = 2
    router: str = "switch"
    capacity_factor: float = 1.25
    evaluation_capacity_factor: float = 2.0
    groups: int | None = None
    dispatch: str = "sort"
    aux_weight: float = 1e-2
    jitter: float | None = None

    def __post_init__(self):
        faults = list(_faults(self))
        if faults:
            listed = "".join(f"\n  {fault}" for fault in faults)
            raise ValueError(f"a mixture of experts cannot be built from these settings{listed}")

    @property
    def choices(self) -> int:
        """Experts that each token is sent to, k."""
        return ROUTERS[self.router]

    @property
    def jitter_width(self) -> float:
        """Half-width of the uniform factor around 1 on the router's input in training."""
        return PAPER_JITTER[self.router] if self.jitter is None else self.jitter

    def capacity(self, tokens: int) -> int:
        """Slots that one expert has for a group of `tokens`."""
        # The factor is the decimal that was written: 1.1 · 100 / 10 is 11 slots, not the 12 of its binary rounding.
        slots = math.ceil(Fraction(repr(float(self.capacity_factor))) * self.choices * tokens / self.experts)
        return max(1, min(slots, tokens))

    def evaluation(self) -> "MoEConfig":
        """The same blocks as they are evaluated: their own capacity, no jitter."""
        return replace(self, capacity_factor=self.evaluation_capacity_factor, jitter=0.0)


def _faults(config: MoEConfig):
    for name in ("experts", "every", "groups"):
        value = getattr(config, name)
        if not (name == "groups" and value is None) and value < 1:
            yield f"{name} is {value}; it must be at least 1."
    for name in ("capacity_factor", "evaluation_capacity_factor"):
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            yield f"{name} is {value}; it must be positive."
    if not (math.isfinite(config.aux_weight) and config.aux_weight >= 0):
        yield f"aux_weight is {config.aux_weight}; it must not be negative."
    if config.jitter is not None and not 0 <= config.jitter < 1:
        yield f"jitter is {config.jitter}; it must lie in [0, 1)."
    if config.dispatch not in DISPATCHES:
        yield f"dispatch is {config.dispatch!r}; choose from {', '.join(DISPATCHES)}."
    if config.router not in ROUTERS:
        yield f"router is {config.router!r}; choose from {', '.join(ROUTERS)}."
    elif config.experts < ROUTERS[config.router]:
        yield f"router {config.router} sends a token to {ROUTERS[config.router]} experts; experts is {config.experts}."
