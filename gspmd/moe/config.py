"""The configuration of a mixture-of-experts block: one frozen dataclass, checked when it is made."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from numbers import Integral, Real
from operator import le
from typing import Any

from gspmd.annotate.errors import PlanError, SpecError, shown, suggestion


@dataclass(frozen=True)
class Kind:
    """The properties of a router: they decide which settings of a `MoEConfig` apply, and some of their defaults.

    Attributes:
        choices: number of experts to which each token is sent; None if `MoEConfig.k` sets this number, or if experts
            choose tokens.
        jitter: half-width of the random factor that multiplies the router's input. It is the default of
            `MoEConfig.jitter`, and comes from the router's paper.
        z_weight: weight of the z-loss. It is the default of `MoEConfig.z_weight`, and comes from the router's paper.
        by_experts: whether experts choose tokens (expert choice). In all other routers, tokens choose experts.
        noisy: whether the router has a second matrix, which computes the width of the noise on the logits.
        scored: whether `scores`, `expert_groups`, `choice_bias`, `gate_factor` and related settings apply.
    """

    choices: int | None
    jitter: float = 0.0
    z_weight: float = 0.0
    by_experts: bool = False
    noisy: bool = False
    scored: bool = False

    def choices_of(self, k: int | None) -> int:
        """Return the number of choices per token with which capacity is computed, if `MoEConfig.k` is `k`.

        If experts choose tokens, this number is 1.
        """
        return 1 if self.by_experts else self.choices or k or 2


ROUTERS = {
    "noisy-top-k": Kind(None, noisy=True),
    "gshard": Kind(2),
    "switch": Kind(1, jitter=1e-2),
    "st-moe": Kind(2, z_weight=1e-3),
    "top-k": Kind(None, scored=True),
    "expert-choice": Kind(None, by_experts=True),
}
SCORES = ("softmax", "sigmoid")
SLOT_FORMS = ("sort", "onehot")
DISPATCHES = (*SLOT_FORMS, "dropless")


@dataclass(frozen=True)
class MoEConfig:
    """Configure the mixture-of-experts blocks of a model.

    `capacity_factor` is the number of slots per routed choice. In each group, an expert has factor · k · tokens /
    experts slots, where k is the number of choices per token (1 for switch, 2 for gshard and st-moe). The number of
    slots is rounded up, and is at most the number of tokens in the group. In expert-choice, an expert has
    factor · tokens / experts slots, so the factor is the mean number of experts per token.

    Attributes:
        experts: number of experts X in each block.
        every: distance n between mixture-of-experts blocks: every n-th layer of the model is one.
        offset: position of the mixture-of-experts block among n layers, counted from 0; None for the last.
        dense_layers: numbers, from 0, of layers that are dense although `every` makes them mixtures of experts: the
            first layers in DeepSeek and GLM, any layers in Qwen.
        dense_feed_forward: width of dense layers; 0 for the width of an expert.
        router: "noisy-top-k" (Shazeer et al. 2017), "gshard" (Lepikhin et al. 2020), "switch" (Fedus et al. 2021),
            "st-moe" (Zoph et al. 2022), "top-k" (as in Mixtral), or "expert-choice" (Zhou et al. 2022).
        k: choices per token for noisy-top-k and top-k; None means 2. In other routers k is fixed.
        renormalize: whether top-k's gates are divided by their sum, as in Mixtral; False keeps the probabilities.
        scores: the scores by which top-k chooses experts, and which become the gates: "softmax" of all logits, or
            "sigmoid" of each logit (DeepSeek-V3).
        expert_groups: number of groups of consecutive experts; top-k chooses a token's experts from the best groups.
        kept_groups: number of groups from which each token chooses; None for all.
        group_best: number of a group's best experts whose scores are added to give the group's score: 2 in DeepSeek-V3,
            1 in V2.
        choice_bias: whether top-k chooses by score plus a bias of each expert; the bias does not enter the gates, and
            no loss trains it.
        bias_rate: change of this bias after every training step: up for experts with fewer choices than the mean, down
            for experts with more (Wang et al. 2024); 0 for no change.
        gate_factor: factor of top-k's gates.
        gate_inputs: whether the gate multiplies the expert's input instead of its output (Llama 4); only for k = 1.
        router_bias: whether the router's logits have a bias, which is trained (gpt-oss).
        priority: whether slots go to the most confident tokens first (Riquelme et al. 2021), instead of in order.
        capacity_factor: slots per routed choice in training; with 0 no expert gets any token.
        evaluation_capacity_factor: slots per routed choice in evaluation.
        groups: number of groups G into which the tokens of a batch are divided; None makes every sequence a group.
        dispatch: "sort" (gathers tokens into the capacity buffer), "onehot" (the papers' einsums, with the same
            result), or "dropless" (no capacity, so no token is dropped).
        aux_weight: weight of the load-balancing loss; with every router, the weighted loss has this value for perfectly
            balanced experts.
        z_weight: weight of the mean square of the logits' logsumexp; None for the value of the router's paper: 1e-3 for
            st-moe, 0 for the others.
        importance_weight: weight of noisy-top-k's squared variation of the experts' summed gates.
        load_weight: weight of noisy-top-k's squared variation of the experts' smooth loads.
        router_scale: variance of the router's initial weights times its fan-in. With Switch's 0.1, routing begins
            nearly even; in short runs, experts specialize sooner with a larger value.
        jitter: half-width of the random factor on the router's input in training; None for the value of the router's
            paper: 1e-2 for switch, 0 for the others.
        dropout: fraction of the experts' hidden activations that training drops.
        shared: number of experts that every token uses in addition to those to which it is sent.
        shared_width: width of all shared experts together; 0 for `shared` times the width of an expert.
        shared_mix: whether the shared experts' output is multiplied by sigmoid(x · w), with a learned w (Qwen2-MoE).

    Raises:
        PlanError: a setting is invalid; the message names all invalid settings.

    Example:
        >>> MoEConfig(experts=8, capacity_factor=1.25).capacity(tokens=128)
        20
        >>> MoEConfig(experts=8, router="gshard", capacity_factor=1.0).capacity(tokens=128)
        32
    """

    experts: int = 8
    every: int = 2
    offset: int | None = None
    dense_layers: tuple[int, ...] = ()
    dense_feed_forward: int = 0
    router: str = "switch"
    k: int | None = None
    renormalize: bool = True
    scores: str = "softmax"
    expert_groups: int = 1
    kept_groups: int | None = None
    group_best: int = 2
    choice_bias: bool = False
    bias_rate: float = 0.0
    gate_factor: float = 1.0
    gate_inputs: bool = False
    router_bias: bool = False
    priority: bool = False
    capacity_factor: float = 1.25
    evaluation_capacity_factor: float = 2.0
    groups: int | None = None
    dispatch: str = "sort"
    aux_weight: float = 1e-2
    z_weight: float | None = None
    importance_weight: float = 0.1
    load_weight: float = 0.1
    router_scale: float = 0.1
    jitter: float | None = None
    dropout: float = 0.0
    shared: int = 0
    shared_width: int = 0
    shared_mix: bool = False

    def __post_init__(self):
        if isinstance(self.dispatch, str) and self.dispatch == "auto":  # the name in older configs and saved runs
            object.__setattr__(self, "dispatch", "sort")
        faults = [*_number_faults(self), *_name_faults(self)]
        if faults:
            listed = "".join(f"\n  {fault}" for fault in faults)
            raise PlanError(f"a mixture of experts cannot be built from these settings{listed}")

    @property
    def choices(self) -> int:
        """Number of choices per token: k or, in expert choice, the number of experts."""
        return self.experts if ROUTERS[self.router].by_experts else self._per_token

    @property
    def used(self) -> float:
        """Number of experts that a token uses if no expert overflows; in expert choice, the mean over the tokens."""
        return min(self.capacity_factor, self.experts) if ROUTERS[self.router].by_experts else self._per_token

    @property
    def causal(self) -> bool:
        """Whether a token's result is independent of later tokens.

        This is False in expert choice, because each expert chooses from all tokens of a group.
        """
        return not ROUTERS[self.router].by_experts

    @property
    def noisy(self) -> bool:
        """Whether the router has a second matrix for the width of its noise."""
        return ROUTERS[self.router].noisy

    @property
    def chosen_groups(self) -> int:
        """Number of groups of experts from which a token chooses its experts."""
        return self.expert_groups if self.kept_groups is None else self.kept_groups

    @property
    def jitter_width(self) -> float:
        """Half-width of the factor, uniform around 1, that multiplies the router's input in training."""
        return ROUTERS[self.router].jitter if self.jitter is None else self.jitter

    @property
    def z_coefficient(self) -> float:
        """Weight of the router's z-loss."""
        return ROUTERS[self.router].z_weight if self.z_weight is None else self.z_weight

    def capacity(self, tokens: int) -> int:
        """Return the number of slots per expert for a group of `tokens` tokens.

        With dispatch "dropless" this number is `tokens`, and with a capacity factor of 0 it is 0.

        Raises:
            SpecError: `tokens` is negative or not a whole number.
        """
        if not isinstance(tokens, Integral) or isinstance(tokens, bool) or tokens < 0:
            raise SpecError(
                f"cannot tell an expert's capacity for {shown(tokens)} tokens.\n  Pass the number of tokens of a group."
            )
        if self.dispatch == "dropless":
            return tokens
        # Computed exactly, in decimal: 1.1 · 100 / 10 is 11 slots, and in binary floating point it would be 12.
        slots = math.ceil(Fraction(str(self.capacity_factor)) * self._per_token * tokens / self.experts)
        return min(slots, tokens)

    def evaluation(self) -> "MoEConfig":
        """Return the config for evaluation: with evaluation_capacity_factor, and without jitter and dropout."""
        return replace(self, capacity_factor=self.evaluation_capacity_factor, jitter=0.0, dropout=0.0)

    @property
    def _per_token(self) -> int:
        """Number of choices per token with which capacity is computed."""
        return ROUTERS[self.router].choices_of(self.k)


_SCORED = (
    "scores", "expert_groups", "kept_groups", "group_best", "choice_bias", "bias_rate", "gate_factor", "gate_inputs",
)  # fmt: skip
_MAY_BE_NONE = ("offset", "groups", "k", "z_weight", "jitter", "kept_groups")


def _number_faults(config: MoEConfig) -> Iterator[str]:
    for name, least in (("experts", 1), ("every", 1), ("offset", 0), ("groups", 1), ("k", 1), ("shared", 0),
                        ("expert_groups", 1), ("kept_groups", 1), ("group_best", 1), ("shared_width", 0),
                        ("dense_feed_forward", 0)):  # fmt: skip
        value = getattr(config, name)
        if not _fits(name, value, Integral, partial(le, least)):
            yield f"{name} is {shown(value)}; it must be a whole number, at least {least}."
    if isinstance(config.offset, int) and isinstance(config.every, int) and config.offset >= config.every > 0:
        yield f"offset is {config.offset}; it must be less than every, {config.every}."
    dense = config.dense_layers
    whole = isinstance(dense, tuple) and all(_fits("dense_layers", each, Integral, partial(le, 0)) for each in dense)
    if not whole or list(dense) != sorted(set(dense)):
        yield f"dense_layers is {shown(dense)}; it must be a tuple of numbers of layers from 0, each once, in order."
    for name in ("capacity_factor", "evaluation_capacity_factor", "importance_weight", "load_weight", "aux_weight",
                 "z_weight", "router_scale", "bias_rate", "gate_factor"):  # fmt: skip
        value = getattr(config, name)
        if not _fits(name, value, Real, lambda value: math.isfinite(value) and value >= 0):
            yield f"{name} is {shown(value)}; it must be a number that is not negative."
    for name in ("renormalize", "priority", "choice_bias", "gate_inputs", "router_bias", "shared_mix"):
        if not isinstance(getattr(config, name), bool):
            yield f"{name} is {shown(getattr(config, name))}; it must be True or False."
    for name in ("jitter", "dropout"):
        value = getattr(config, name)
        if not _fits(name, value, Real, lambda value: 0 <= value < 1):
            yield f"{name} is {shown(value)}; it must be in [0, 1)."


def _fits(name: str, value: object, kind: type, holds: Callable[[Any], bool]) -> bool:
    if value is None:
        return name in _MAY_BE_NONE
    return isinstance(value, kind) and not isinstance(value, bool) and holds(value)


def _name_faults(config: MoEConfig) -> Iterator[str]:
    for name, known in (("dispatch", DISPATCHES), ("router", ROUTERS), ("scores", SCORES)):
        value = getattr(config, name)
        if not isinstance(value, str) or value not in known:
            hint = suggestion(value, known) if isinstance(value, str) else ""
            yield f"{name} is {shown(value)}. {hint}Choose from {', '.join(known)}."
    if not isinstance(config.router, str) or config.router not in ROUTERS:
        return
    kind, name = ROUTERS[config.router], config.router
    if not any(_number_faults(config)) and config.experts < config.choices:
        yield f"router {name} sends a token to {config.choices} experts, but experts is {config.experts}."
    if config.k is not None and (kind.choices or kind.by_experts):
        fixed = "lets the experts choose" if kind.by_experts else f"sends a token to {kind.choices}"
        yield f"k is {shown(config.k)}, but router {name} {fixed}; leave k out, or use router top-k."
    if config.renormalize is False and name != "top-k":
        yield f"renormalize is false, but that is a setting of router top-k, not of {name}; leave it out, or use top-k."
    for setting in ("shared_width", "shared_mix"):
        if getattr(config, setting) and config.shared == 0:
            yield f"{setting} is {shown(getattr(config, setting))}, but there are no shared experts; set shared."
    yield from _score_faults(config, kind)
    if kind.by_experts and config.priority is True:
        yield f"priority orders tokens that wait for slots, but in router {name} no token waits; leave out priority."
    if kind.by_experts and config.dispatch == "dropless":
        yield f"router {name} fills the slots of every expert, but dropless has no slots; use dispatch sort."


def _score_faults(config: MoEConfig, kind: Kind) -> Iterator[str]:
    """Yield the faults in the settings that apply only to routers with scores (`Kind.scored`)."""
    if kind.scored:
        yield from _scored_faults(config, kind)
        return
    wrong = [name for name in _SCORED if getattr(config, name) != getattr(MoEConfig, name)]
    for name in wrong:
        fact = f"{name} is {shown(getattr(config, name))}, but that is a setting of router top-k"
        yield f"{fact}, not of {config.router}; leave it out, or use top-k."
    if wrong:  # The other router alone may not be enough.
        yield from (f"with router top-k, {fault}" for fault in _scored_faults(config, ROUTERS["top-k"]))


def _scored_faults(config: MoEConfig, kind: Kind) -> Iterator[str]:
    """Yield the faults that the settings of scores would have if `config.router` were a router of kind `kind`."""
    if any(_number_faults(config)):
        return
    choices = kind.choices_of(config.k)
    groups, each, kept = config.expert_groups, config.experts // config.expert_groups, config.chosen_groups
    if config.experts % groups:
        yield f"expert_groups is {groups}, which does not divide experts, {config.experts}."
    elif kept > groups:
        yield f"kept_groups is {kept}, but expert_groups is {groups}."
    elif groups > 1 and config.group_best > each:
        yield f"group_best is {config.group_best}, but a group has {each} of the {config.experts} experts."
    elif kept * each < choices:
        yield f"{kept} groups of {each} experts have fewer than the {choices} that a token is sent to."
    if config.bias_rate and not config.choice_bias:
        yield f"bias_rate is {config.bias_rate}, but there is no bias to change; set choice_bias."
    if config.gate_inputs and choices != 1:
        yield f"gate_inputs multiplies an input by one gate, but a token has {choices} choices; set k to 1."
    if config.gate_inputs and config.renormalize:
        yield "gate_inputs multiplies by one gate, which divided by itself is always 1; set renormalize to false."
