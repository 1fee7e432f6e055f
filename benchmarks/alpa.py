"""Compare Alpa's published plans with the best of our search, by predicted seconds on the same clusters.

    python benchmarks/alpa.py --write docs/search-figures.md     # minutes

Alpa (Zheng et al. 2022, arXiv 2201.12023) trains GPT and GShard MoE models on 1 to 64 V100 of p3.16xlarge nodes. Its
repository has the plan that it found for each model (benchmark/alpa/suite_auto_gpt.py and suite_auto_moe.py): the
stages, the mesh of each stage, the axes that split the batch, and the microbatches. It does not say how the tensors of
a stage are sharded; here the search chooses the best sharding on that mesh. Alpa's plan and ours have AdamW's state in
float32, and may recompute blocks in the backward pass (a pipeline's stage is always recomputed from its input). Both
plans are priced with the embedding on the first stage and the output on the last stage, as Alpa runs them;
`gspmd.pipeline` has embedding and output on every stage.

Differs: there are no biases; a token group of experts is one sequence, where Alpa's groups are two sequences; NVLink's
    hybrid cube counts as a switch.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from page import write_between

from gspmd.display.units import amount_of_seconds, mesh_text
from gspmd.hardware.chips import Chip
from gspmd.moe import MoEConfig
from gspmd.search import NothingFits
from gspmd.search.answers.candidate import TOLERANCE, StepBudget
from gspmd.search.phase import PhaseProblem
from gspmd_models import ModelConfig
from gspmd_models.search.pipeline import StageProblem
from gspmd_models.search.training import TrainingProblem
from gspmd_models.search.workload import Workload

V100 = Chip(
    "v100", bf16_flops=125e12, float32_flops=15.7e12, hbm_bytes=16 * 2**30, hbm_bandwidth=900e9,
    link_bandwidth=25e9, links=6, torus=0, wrap_multiple=1, hop_seconds=3e-6, clock=1.53e9,
    node_devices=8, network_bandwidth=25e9 / 8 / 8, network_seconds=2e-5,
)  # fmt: skip
"""From NVIDIA's data sheet of the SXM2 module with 16 GB, in float16; 8 GPUs of a p3.16xlarge share 25 Gbit/s."""
BATCH, LENGTH = 1024, 1024
MICROBATCHES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
MARKS = "<!-- alpa: python benchmarks/alpa.py -->", "<!-- end of alpa -->"


def gpt(embed: int, layers: int, heads: int) -> ModelConfig:
    """Return a GPT of Alpa's table 5."""
    return ModelConfig(
        vocabulary=51_200, embed=embed, layers=layers, heads=heads, kv_heads=heads, head_size=embed // heads,
        feed_forward=4 * embed, activation="gelu", norm="layer", tied=True,
    )  # fmt: skip


def moe(embed: int, layers: int, experts: int) -> ModelConfig:
    """Return a GShard MoE of Alpa's table 5, with experts in every second layer."""
    return ModelConfig(
        vocabulary=32_000, embed=embed, layers=layers, heads=16, kv_heads=16, head_size=embed // 16,
        feed_forward=8 * embed, activation="gelu", norm="layer", tied=True,
        moe=MoEConfig(experts=experts, every=2, router="gshard", capacity_factor=1.0),
    )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A plan with equal stages.

    Attributes:
        stages: number of stages.
        microbatches: number of microbatches.
        batch: number of devices of a stage along the mesh axis over which Alpa was required to split the batch.
        other: number of devices of a stage along the second mesh axis, over which Alpa could shard any dimension.
    """

    stages: int
    microbatches: int
    batch: int
    other: int

    def __str__(self) -> str:
        sizes = {"p": self.stages, "x": self.batch, "y": self.other}
        return f"{mesh_text(sizes, trivial=False) or 'one device'}; {self.microbatches} microbatches"


CASES = {
    "GPT 350M": (gpt(1024, 24, 16), Plan(1, 512, 1, 1)),
    "GPT 760M": (gpt(1536, 24, 16), Plan(2, 128, 1, 1)),
    "GPT 1.3B": (gpt(2048, 24, 32), Plan(2, 128, 2, 1)),
    "GPT 6.7B": (gpt(4096, 32, 32), Plan(2, 64, 2, 4)),
    "GPT 15B": (gpt(5120, 48, 40), Plan(4, 128, 2, 4)),
    "GPT 39B": (gpt(8192, 48, 64), Plan(16, 1024, 1, 4)),
    "MoE 380M": (moe(768, 8, 8), Plan(1, 512, 1, 1)),
    "MoE 690M": (moe(768, 8, 16), Plan(1, 32, 2, 1)),
    "MoE 1.3B": (moe(768, 16, 16), Plan(2, 32, 2, 1)),
    "MoE 2.4B": (moe(1024, 16, 16), Plan(2, 32, 4, 1)),
    "MoE 10B": (moe(1536, 16, 32), Plan(2, 16, 1, 8)),
    "MoE 27B": (moe(2048, 16, 48), Plan(8, 128, 1, 4)),
    "MoE 70B": (moe(2048, 32, 64), Plan(8, 64, 1, 8)),
}
"""Alpa's plans. GPT 2.6B is left out, because its stages of 8, 8 and 16 layers are unequal."""


def main() -> None:
    """Price every case, print the table, and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES), help="default: all")
    parser.add_argument("--write", type=Path, help="replace the table in a page")
    options = parser.parse_args()
    lines = []
    for line in table(options.case):
        print(line, flush=True)
        lines.append(line)
    if options.write:
        write_between(options.write, MARKS, "\n".join(lines))


def table(names: Sequence[str]) -> Iterator[str]:
    """Yield a Markdown table of Alpa's plan and ours, with a row for each model."""
    yield "| model | GPUs | Alpa's plan | predicted | as pipelines run here | our plan | predicted | ours / Alpa's |"
    yield "|:--|--:|:--|--:|--:|:--|--:|--:|"
    for name in names:
        config, theirs = CASES[name]
        devices = theirs.stages * theirs.batch * theirs.other
        found = [(price, plan) for plan in plans(config, devices) if (price := priced(config, plan))]
        best, ours = min(found, key=lambda pair: pair[0].seconds, default=(None, "nothing fits"))
        before = priced(config, theirs)
        said = [amount_of_seconds(before.seconds), amount_of_seconds(before.here)] if before else ["does not fit", ""]
        own = amount_of_seconds(best.seconds) if best else ""
        ratio = f"**{best.seconds / before.seconds:.3f}**" if before and best else ""
        yield f"| {' | '.join((name, str(devices), str(theirs), *said, str(ours), own, ratio))} |"


def plans(config: ModelConfig, devices: int) -> Iterator[Plan]:
    """Yield the plans with every number of stages and microbatches, and every mesh of two axes in a stage."""
    for stages in (each for each in range(1, devices + 1) if devices % each == 0):
        if config.repeats % stages == 0:
            own = devices // stages
            for batch in (each for each in range(1, own + 1) if own % each == 0):
                for count in MICROBATCHES:
                    if BATCH % (count * batch) == 0:
                        yield Plan(stages, count, batch, own // batch)


@dataclass(frozen=True)
class Price:
    """Seconds of a step with the embedding only on the first stage and the output only on the last stage.

    `here` has the seconds with embedding and output on all stages.
    """

    seconds: float
    here: float


def priced(config: ModelConfig, plan: Plan) -> Price | None:
    """Return the seconds of a plan with the best specs and the best choice of remat; None if no layout fits."""
    found = [_priced(replace(config, remat=remat), plan) for remat in ("none", "full")]
    return min(filter(None, found), key=lambda price: price.seconds, default=None)


def _priced(config: ModelConfig, plan: Plan) -> Price | None:
    asked, budget = problem(config, plan), StepBudget()
    try:
        answer = asked.search(0.9 * V100.hbm_bytes, budget, budget.start, TOLERANCE).best()
    except NothingFits:
        return None
    if not isinstance(asked, StageProblem):
        return Price(answer.seconds, answer.seconds)
    prices = asked.apart(answer.picks)
    inner = prices.layers + prices.sent
    stages = [prices.first + inner, *[inner] * (plan.stages - 2), inner + prices.last]
    once = answer.seconds - asked.slots * (prices.first + inner + prices.last)
    return Price(once + sum(stages) + (plan.microbatches - 1) * max(stages), answer.seconds)


def problem(config: ModelConfig, plan: Plan) -> PhaseProblem:
    """Return the search problem of a stage; with a single stage, the problem of the whole step."""
    mesh = {axis: size for axis, size in (("x", plan.batch), ("y", plan.other)) if size > 1} or {"x": 1}
    workload = Workload(config, V100, BATCH, LENGTH, microbatches=plan.microbatches)
    if plan.stages == 1:
        return TrainingProblem(workload, mesh)
    side = ("x",) if plan.batch > 1 and not config.moe else ()
    return StageProblem(workload, plan.stages, mesh, side)


if __name__ == "__main__":
    main()
