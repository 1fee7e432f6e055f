"""The search problems of serving: prompts that are read into a cache, and tokens that are read one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..config import ModelConfig
from ..decoding.serving import for_serving
from .costs import Costs
from .parts.ends import Stream
from .parts.feed_forward import FeedForward
from .parts.parallel import ServedBlock
from .parts.part import Part
from .parts.served_experts import ServedExperts
from .parts.serving import CachedAttention, Served
from .parts.shared_experts import SharedExperts
from .problem import PhaseProblem
from .unsearched import Unsearched
from .workload import Workload


class ServingProblem(PhaseProblem):
    """The search problem of one phase of serving on one mesh.

    Weights are in the compute dtype. Activations keep their length whole; what the two phases store may differ, since
    each is searched for itself.

    Args:
        workload: the step, whose phase is `"prefill"` or `"decode"`.
        mesh: sizes of the mesh axes.

    Raises:
        Unsearched: experts that choose among tokens, or experts in parallel blocks.
    """

    def __init__(self, workload: Workload, mesh: Mapping[str, int]):
        _check(workload.config)
        config, length, decodes = for_serving(workload.config), workload.length, workload.phase == "decode"
        self.phase, self.read = workload.phase, length if decodes else 0
        sizes = config.sizes(workload.batch, 1 if decodes else length) | {"T": workload.room or length}
        super().__init__(Costs(config, sizes, dict(mesh), workload.chip, workload.dtype, trains=False))

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
                blocks.append(experts := ServedExperts(costs, residual, config.expert_layers))
                if config.moe.shared:
                    blocks.append(SharedExperts(costs, residual, experts))
        return [Stream(costs, residual), *blocks, Served(costs, last, residual)]


def _check(config: ModelConfig) -> None:
    moe = config.moe
    if moe is None:
        return
    faults = [
        (not moe.causal, f"the experts of router {moe.router} choose among tokens that are not there yet"),
        (config.block == "parallel", "its experts are in parallel blocks"),
    ]
    found = [what for wrong, what in faults if wrong]
    if found:
        raise Unsearched("layouts to serve this model", found)
