"""The search problems of serving: prompts that are read into a cache, and tokens that are read one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from gspmd.hardware.chips import Chip

from ..config import ModelConfig
from ..decoding.serving import for_serving
from .costs import Costs
from .parts.ends import Stream
from .parts.feed_forward import FeedForward
from .parts.parallel import ServedBlock
from .parts.part import Part
from .parts.served_experts import ServedExperts
from .parts.serving import CachedAttention, Served
from .problem import PhaseProblem
from .unsearched import Unsearched


class ServingProblem(PhaseProblem):
    """The search problem of one phase of serving on one mesh.

    Weights are in the compute dtype. Activations keep their length whole; what the two phases store may differ, since
    each is searched for itself.

    Args:
        config: the model; its experts drop nothing, as they are served.
        mesh: sizes of the mesh axes.
        chip: whose seconds.
        phase: `"prefill"`, `length` tokens of every row into an empty cache; or `"decode"`, one behind a full one.
        batch: rows.
        length: tokens of a row.
        room: tokens that a row of the cache has room for; 0 for `length`.
        dtype: of weights, activations and cache.

    Raises:
        Unsearched: experts that choose among tokens, experts in parallel blocks, or shared experts.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mapping[str, int],
        chip: Chip,
        phase: Literal["prefill", "decode"],
        batch: int,
        length: int,
        room: int = 0,
        dtype: str = "bfloat16",
    ):
        _check(config)
        config = for_serving(config)
        self.phase, self.read = phase, length if phase == "decode" else 0
        sizes = config.sizes(batch, 1 if phase == "decode" else length) | {"T": room or length}
        super().__init__(Costs(config, sizes, dict(mesh), chip, dtype, trains=False))

    def _parts(self) -> list[Part]:
        costs, config = self.costs, self.costs.config
        residual = costs.place("BLE", "L")
        last = replace(costs, sizes={**costs.sizes, "L": 1})
        attention = CachedAttention(costs, residual, self.read)
        if config.block == "parallel":
            blocks: list[Part] = [ServedBlock(costs, residual, attention)]
        else:
            blocks = [attention]
            if config.expert_layers < config.layers:
                blocks.append(FeedForward(costs, residual, config.layers - config.expert_layers))
            if config.expert_layers:
                blocks.append(ServedExperts(costs, residual, config.expert_layers))
        return [Stream(costs, residual), *blocks, Served(costs, last, residual)]


def _check(config: ModelConfig) -> None:
    moe = config.moe
    if moe is None:
        return
    faults = [
        (not moe.causal, f"the experts of router {moe.router} choose among tokens that are not there yet"),
        (config.block == "parallel", "its experts are in parallel blocks"),
        (bool(moe.shared), "it has shared experts"),
    ]
    found = [what for wrong, what in faults if wrong]
    if found:
        raise Unsearched("layouts to serve this model", found)
