"""What a mixture-of-experts block is made of: one frozen record, checked when it is made."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

from gspmd.annotate.errors import PlanError, SpecError, shown, suggestion


@dataclass(frozen=True)
class Kind:
    """What a config has to know of a router.

    Attributes:
        choices: experts that each token is sent to; None where `MoEConfig.k` says.
        jitter: its paper's half-width of the factor on its input.
        z_weight: its paper's weight of the loss on large logits.
        by_experts: experts choose tokens, and not the other way round.
        noisy: a second matrix says how much noise its logits get.
    """

    choices: int | None
    jitter: float = 0.0
    z_weight: float = 0.0
    by_experts: bool = False
    noisy: bool = False


ROUTERS = {
    "noisy-top-k": Kind(None, noisy=True),
    "gshard": Kind(2),
    "switch": Kind(1, jitter=1e-2),
    "st-moe": Kind(2, z_weight=1e-3),
    "top-k": Kind(None),
    "expert-choice": Kind(None, by_experts=True),
}
DISPATCHES = ("auto", "sort", "onehot", "dropless")


@dataclass(frozen=True)
class MoEConfig:
    """Settings of the mixture-of-experts blocks of a model.

    `capacity_factor` counts slots per routed choice: an expert takes factor · k · tokens / experts of each group, k
    being the choices per token (1 for switch, 2 for gshard and st-moe), rounded up, at most the tokens of the group.
    Experts that choose (expert-choice) take factor · tokens / experts: there the factor is the experts per token.

    Attributes:
        experts: number of experts X in each block.
        every: a mixture-of-experts block stands at every n-th layer of the model.
        router: "noisy-top-k" (Shazeer et al. 2017), "gshard" (Lepikhin et al. 2020), "switch" (Fedus et al. 2021),
            "st-moe" (Zoph et al. 2022), "top-k" (as Mixtral's), or "expert-choice" (Zhou et al. 2022).
        k: choices per token where the router leaves them open (noisy-top-k, top-k); None is 2.
        renormalize: whether top-k's gates are divided by their sum, as Mixtral's are; False keeps probabilities.
        priority: whether slots go to the surest tokens first (Riquelme et al. 2021), and not in the tokens' order.
        capacity_factor: slots per routed choice in training; 0 sends every token past the experts.
        evaluation_capacity_factor: slots per routed choice in evaluation.
        groups: groups G that the tokens of a batch are routed in; None makes every sequence a group.
        dispatch: "sort" (gather into the capacity buffer), "onehot" (the papers' einsums), "auto" (the better of the
            two on the platform; all three give one result), or "dropless" (no capacity: no token is lost).
        aux_weight: the load-balancing loss of perfectly balanced experts, whichever the router has it.
        z_weight: weight of the mean square of the logits' logsumexp; None is the router's paper's, 1e-3 for st-moe or
            none.
        importance_weight: weight of noisy-top-k's squared variation of the experts' summed gates.
        load_weight: weight of noisy-top-k's squared variation of the experts' smooth loads.
        router_scale: variance of the router's first values times its fan-in. Switch's 0.1 begins nearly even; where
            batches are many that is soon unlearnt, where they are few, experts differ sooner with more.
        jitter: half-width of the factor on the router's input in training; None is the router's paper's, 1e-2 for
            switch or none.
        dropout: share of the experts' hidden activations that training drops.
        shared: experts that every token uses besides those it is sent to.

    Raises:
        PlanError: naming every setting that cannot be.

    Example:
        >>> MoEConfig(experts=8, capacity_factor=1.25).capacity(tokens=128)
        20
        >>> MoEConfig(experts=8, router="gshard", capacity_factor=1.0).capacity(tokens=128)
        32
    """

    experts: int = 8
    every: int = 2
    router: str = "switch"
    k: int | None = None
    renormalize: bool = True
    priority: bool = False
    capacity_factor: float = 1.25
    evaluation_capacity_factor: float = 2.0
    groups: int | None = None
    dispatch: str = "auto"
    aux_weight: float = 1e-2
    z_weight: float | None = None
    importance_weight: float = 0.1
    load_weight: float = 0.1
    router_scale: float = 0.1
    jitter: float | None = None
    dropout: float = 0.0
    shared: int = 0

    def __post_init__(self):
        faults = [*_number_faults(self), *_name_faults(self)]
        if faults:
            listed = "".join(f"\n  {fault}" for fault in faults)
            raise PlanError(f"a mixture of experts cannot be built from these settings{listed}")

    @property
    def choices(self) -> int:
        """Choices per token, k: as many as there are experts where the experts choose."""
        return self.experts if ROUTERS[self.router].by_experts else self._per_token

    @property
    def used(self) -> float:
        """Experts that a token uses, as long as none overflows; where the experts choose, on average."""
        return min(self.capacity_factor, self.experts) if ROUTERS[self.router].by_experts else self._per_token

    @property
    def causal(self) -> bool:
        """Whether a token's result is independent of later tokens; experts that choose have read the whole group."""
        return not ROUTERS[self.router].by_experts

    @property
    def noisy(self) -> bool:
        """Whether the router has a second matrix, of its noise."""
        return ROUTERS[self.router].noisy

    @property
    def jitter_width(self) -> float:
        """Half-width of the uniform factor around 1 on the router's input in training."""
        return ROUTERS[self.router].jitter if self.jitter is None else self.jitter

    @property
    def z_coefficient(self) -> float:
        """Weight of the router's z-loss."""
        return ROUTERS[self.router].z_weight if self.z_weight is None else self.z_weight

    def capacity(self, tokens: int) -> int:
        """Slots that one expert has for a group of `tokens`: all of them where none may be lost, and 0 at factor 0.

        Raises:
            SpecError: tokens is no whole number, or below 0.
        """
        if not isinstance(tokens, Integral) or isinstance(tokens, bool) or tokens < 0:
            raise SpecError(
                f"cannot tell an expert's capacity for {shown(tokens)} tokens.\n  Pass the number of tokens of a group."
            )
        if self.dispatch == "dropless":
            return tokens
        # The factor is the decimal that was written: 1.1 · 100 / 10 is 11 slots, not the 12 of its binary rounding.
        slots = math.ceil(Fraction(str(self.capacity_factor)) * self._per_token * tokens / self.experts)
        return min(slots, tokens)

    def evaluation(self) -> "MoEConfig":
        """The same blocks as they are evaluated: their own capacity, no jitter, no dropout."""
        return replace(self, capacity_factor=self.evaluation_capacity_factor, jitter=0.0, dropout=0.0)

    @property
    def _per_token(self) -> int:
        """Choices per token that its experts' capacity is measured in."""
        kind = ROUTERS[self.router]
        return 1 if kind.by_experts else kind.choices or self.k or 2


_MAY_BE_NONE = ("groups", "k", "z_weight", "jitter")


def _number_faults(config: MoEConfig) -> Iterator[str]:
    for name, least in (("experts", 1), ("every", 1), ("groups", 1), ("k", 1), ("shared", 0)):
        value = getattr(config, name)
        if not _fits(name, value, Integral, lambda value, least=least: value >= least):
            yield f"{name} is {shown(value)}; it must be a whole number, at least {least}."
    for name in ("capacity_factor", "evaluation_capacity_factor", "importance_weight", "load_weight", "aux_weight",
                 "z_weight", "router_scale"):  # fmt: skip
        value = getattr(config, name)
        if not _fits(name, value, Real, lambda value: math.isfinite(value) and value >= 0):
            yield f"{name} is {shown(value)}; it must be a number that is not negative."
    for name in ("renormalize", "priority"):
        if not isinstance(getattr(config, name), bool):
            yield f"{name} is {shown(getattr(config, name))}; it must be True or False."
    for name in ("jitter", "dropout"):
        value = getattr(config, name)
        if not _fits(name, value, Real, lambda value: 0 <= value < 1):
            yield f"{name} is {shown(value)}; it must lie in [0, 1)."


def _fits(name: str, value: object, kind: type, holds: Callable[[Any], bool]) -> bool:
    if value is None:
        return name in _MAY_BE_NONE
    return isinstance(value, kind) and not isinstance(value, bool) and holds(value)


def _name_faults(config: MoEConfig) -> Iterator[str]:
    for name, known in (("dispatch", DISPATCHES), ("router", ROUTERS)):
        value = getattr(config, name)
        if not isinstance(value, str) or value not in known:
            hint = suggestion(value, known) if isinstance(value, str) else ""
            yield f"{name} is {shown(value)}. {hint}Choose from {', '.join(known)}."
    if not isinstance(config.router, str) or config.router not in ROUTERS:
        return
    kind, name = ROUTERS[config.router], config.router
    if not any(_number_faults(config)) and config.experts < config.choices:
        yield f"router {name} sends a token to {config.choices} experts; experts is {config.experts}."
    if config.k is not None and (kind.choices or kind.by_experts):
        fixed = "lets the experts choose" if kind.by_experts else f"sends a token to {kind.choices}"
        yield f"k is {shown(config.k)}, but router {name} {fixed}; leave k out, or take router top-k."
    if config.renormalize is False and name != "top-k":
        yield f"renormalize is false, but router {name} has gates of its own; take router top-k."
    if kind.by_experts and config.priority is True:
        yield f"priority orders tokens that wait for slots, and router {name} lets none wait; leave it out."
    if kind.by_experts and config.dispatch == "dropless":
        yield f"router {name} fills the slots of every expert, which dropless does not have; take dispatch auto."
