"""Compare predicted with published MFU, for training steps of MaxText compiled offline for the same slices.

    python benchmarks/mfu.py --only runs parts --json mfu.json --write docs/mfu.md    # minutes for each run
    python benchmarks/mfu.py --only runs --run mixtral-8x7b-v6e --json mfu.json
    python benchmarks/mfu.py --only memory depth pipelines --json mfu.json --write docs/mfu.md

`runs` compiles steps as `gspmd compile` does, with the flags that the page shows. `parts` splits the time of a step
into parts. `memory` compares the planned memory of Megatron's models of 175, 530 and 1000 billion parameters with the
formulas of Korthikanti et al. `pipelines` compiles the steps of these models on 1024 chips. `depth` compares tracing
and compiling of many layers with that of few layers. Needs the compiler for TPUs, but no TPU.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from megatron_memory import MEGATRON, formulas, planned_bytes
from megatron_pipelines import pipelines
from page import Kept, write_tables

import gspmd
from gspmd import host
from gspmd.audit import topology
from gspmd.audit.simulation.timeline import Timeline
from gspmd.commands import compile as command
from gspmd.display.units import amount_of_bytes
from gspmd.layouts import Layout
from gspmd.training import OptimizerConfig
from gspmd_models import ModelConfig, abstract, abstract_batch, abstract_key, step


@dataclass(frozen=True)
class Run:
    """A training step with a published measurement.

    Attributes:
        flags: flags of `gspmd compile`, without phase and batch.
        chips: number of chips of the slice.
        rows: sequences per chip, over all microbatches.
        length: tokens per sequence.
        mfu: the published MFU; None if only tokens are published.
        tokens: the published tokens per second and chip; None if only the MFU is published.
        causal: whether the published count of FLOPs includes only half of attention's scores.
        options: the published options of the compiler.
        compiles: whether libtpu 0.0.42 compiles the step, and in less than half an hour.
    """

    flags: str
    chips: int
    rows: int
    length: int
    mfu: float | None = None
    tokens: float | None = None
    causal: bool = False
    options: tuple[str, ...] = ()
    compiles: bool = True

    @property
    def command(self) -> str:
        """The command line of the run."""
        sizes = f"--batch {self.chips * self.rows} --length {self.length}"
        options = "".join(f" --compiler-options {each}" for each in self.options)
        return f"gspmd compile --phase train {self.flags} {sizes}{options}"


ASYNCHRONOUS = (
    "xla_tpu_enable_async_collective_fusion=true", "xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps=true", "xla_tpu_overlap_compute_collective_tc=true",
    "xla_enable_async_all_gather=true",
)  # fmt: skip
"""MaxText's CF_FOR_ALL_GATHER: gathers run in parallel with computation."""
OVERLAPPED = ("xla_tpu_enable_data_parallel_all_reduce_opt=true", "xla_tpu_data_parallel_opt_different_sized_ops=true")
"""MaxText's DATA_PARALLEL_OVERLAP."""
BACKWARD = (
    "xla_tpu_megacore_fusion_allow_ags=false", "xla_enable_async_collective_permute=true",
    "xla_tpu_enable_ag_backward_pipelining=true",
)  # fmt: skip
"""Further options of MaxText's script for Llama 2 70B."""
DENSE = "--config llama-2-70b --model.vocabulary 32000"
"""A base for MaxText's own dense models, whose sizes are given by flags."""
RUNS = {
    "llama-2-70b-v5p": Run(
        "--config llama-2-70b --topology tpu-v5p:4x8x8 --layout zero-3 --lowering blocking "
        "--model.remat dots-except-hidden",
        256, 4, 4096, 0.654, 692, options=(*ASYNCHRONOUS, *OVERLAPPED, *BACKWARD),
    ),
    "llama-3.1-405b-v6e": Run(
        "--config llama-3.1-405b --topology tpu-v6e:16x16 --layout benchmarks/fsdp-tensor.toml --mesh x=64,y=4 "
        "--lowering blocking --microbatches 4 --moments int8",
        256, 1, 8192, 0.3855, 123, compiles=False,
    ),
    "llama-3.1-405b-v5p": Run(
        "--config llama-3.1-405b --topology tpu-v5p:8x8x8 --layout zero-3 --lowering blocking --model.offload",
        512, 2, 8192, 0.685, 124.6, causal=True, options=ASYNCHRONOUS,
    ),
    "mixtral-8x7b-v6e": Run(
        "--config mixtral-8x7b --topology tpu-v6e:16x16 --layout zero-3 --lowering blocking --microbatches 2",
        256, 12, 4096, 0.3523, 3899,
        options=("xla_tpu_scoped_vmem_limit_kib=81920", *ASYNCHRONOUS, *OVERLAPPED),
    ),
    "dense-16b-v5e": Run(
        f"{DENSE} --model.embed 4096 --model.feed-forward 28672 --model.heads 64 --model.kv-heads 64 --model.layers 32 "
        "--topology tpu-v5e:16x16 --layout zero-3 --lowering blocking",
        256, 6, 2048, 0.611, options=(*OVERLAPPED, *ASYNCHRONOUS),
    ),
    "dense-32b-v5p": Run(
        f"{DENSE} --model.embed 8192 --model.feed-forward 28672 --model.heads 64 --model.kv-heads 64 --model.layers 32 "
        "--topology tpu-v5p:4x4x4 --layout benchmarks/fsdp-tensor.toml --mesh x=16,y=4 --lowering blocking "
        "--model.remat dots",
        64, 6, 2048, 0.715, options=(*BACKWARD, *OVERLAPPED, *ASYNCHRONOUS),
    ),
    "dense-22b-v4": Run(
        f"{DENSE} --model.embed 6144 --model.feed-forward 24576 --model.heads 24 --model.kv-heads 24 "
        "--model.head-size 256 --model.layers 48 --model.activation relu "
        "--topology tpu-v4:4x4x4 --layout zero-3 --lowering blocking",
        64, 13, 2048, 0.567, options=("xla_enable_async_all_gather=true",),
    ),
    "llama-3.1-8b-v6e": Run(
        "--config llama-3.1-8b --topology tpu-v6e:2x4 --layout zero-3 --lowering blocking --microbatches 3",
        8, 3, 8192, tokens=7139, compiles=False,
    ),
    "llama-3.1-70b-v6e": Run(
        "--config llama-3.1-70b --topology tpu-v6e:4x8 --layout zero-3 --lowering blocking --moments int8 "
        "--microbatches 2",
        32, 2, 8192, tokens=921, compiles=False,
    ),
    "llama-3.1-70b-7x": Run(
        "--config llama-3.1-70b --topology tpu7x:4x4x4 --layout zero-3 --lowering blocking",
        64, 4, 8192, tokens=2687, compiles=False,
    ),
}  # fmt: skip
"""Figures are from MaxText's docs/reference/models/tiering.md, for its dense models from configs/v4, v5e and v5p, and
for 405B on v5p (68.5% = 314.5 of 459 TFLOP/s) and for Llama 3.1 8B and 70B from tpu-recipes. Options are from
MaxText's configs/v5p/llama2_70b.sh and benchmarks/xla_flags_library.py. Of the options of the recipe
training/v5p/Llama3.1-405B-MaxText, only those for gathers are used (docs/mfu.md says why).
"""


def flops_per_token(config: ModelConfig, length: int, causal: bool = False) -> float:
    """Return the model FLOPs per trained token as MaxText counts them.

    They are the FLOPs of all products, forward and backward, without recomputation.

    Args:
        config: the model.
        length: tokens per sequence.
        causal: whether to leave out attention's scores and weighted sums above the diagonal, as MaxText does since its
            pull request 1988.

    Source: MaxText, `calculate_tflops_training_per_device`, and docs/reference/performance_metrics.md.
    """
    scores = 12 * config.layers * config.heads * config.head_size * length
    return config.flops_per_token(length) - (scores / 2 if causal else 0)


def mfu(config: ModelConfig, length: int, tokens: float, peak: float, causal: bool = False) -> float:
    """Return the model FLOPs utilization at `tokens` per second and chip."""
    return flops_per_token(config, length, causal) * tokens / peak


def main() -> None:
    """Compile the chosen runs, print the tables, and write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=list(SECTIONS), help="default: all")
    compiled = [name for name, run in RUNS.items() if run.compiles]
    parser.add_argument("--run", choices=RUNS, nargs="+", default=compiled, help="default: all that can be compiled")
    parser.add_argument("--json", type=Path, help="keep what was compiled in this file, and take it from there")
    parser.add_argument("--write", type=Path, help="replace the tables in a page")
    options = parser.parse_args()
    host.keep_compiled(False)  # JAX cannot read back what was compiled for devices that are not there
    host.start(1, "cpu")  # for JAX itself: the slice's devices exist for the compiler only
    tables = {name: SECTIONS[name] for name in options.only}
    write_tables("mfu.py", tables, Kept(options.json), options.run, options.write)


def compared(kept: Kept, names: Sequence[str]) -> Iterator[str]:
    """Yield a table of predicted and published MFU and tokens per second and chip."""
    yield "| step | chips | seconds | tokens/s per chip | published | | MFU | published | |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for name in names:
        run, found, config = RUNS[name], measured(kept, name), config_of(RUNS[name])
        of_one = mfu(config, run.length, 1.0, found["peak"], run.causal)  # MFU at one token per second and chip
        wanted = run.mfu / of_one if run.tokens is None else run.tokens
        wanted_mfu = run.tokens * of_one if run.mfu is None else run.mfu
        if not found["fits"]:
            held, room = amount_of_bytes(found["bytes"]), amount_of_bytes(found["room"])
            fault = f"does not fit: {held} of {room}"
            yield f"| {name} | {run.chips} | {fault} | | {wanted:,.0f} | | | {wanted_mfu:.1%} | |"
            continue
        tokens = run.rows * run.length / found["step"]
        share = tokens * of_one
        yield (
            f"| {name} | {run.chips} | {found['step']:.2f} | **{tokens:,.0f}** | {wanted:,.0f} | "
            f"{tokens / wanted:.2f} | **{share:.1%}** | {wanted_mfu:.1%} | {share / wanted_mfu:.2f} |"
        )


def parts(kept: Kept, names: Sequence[str]) -> Iterator[str]:
    """Yield a table of the parts of each step's time, as shares."""
    yield "| step | products | other instructions | copies waited for | collectives waited for | hidden | as planned |"
    yield "|---|--:|--:|--:|--:|--:|---|"
    for name in names:
        found = measured(kept, name)
        if not found["fits"]:
            continue
        shares = (found[part] / found["step"] for part in ("products", "other", "copies", "waiting", "hidden"))
        agrees = "to the byte" if found["as_planned"] else "no, see below"
        yield f"| {name} | {' | '.join(f'{share:.1%}' for share in shares)} | {agrees} |"
    yield ""
    for name in names:
        found = measured(kept, name)
        if found["fits"]:
            yield from scopes(name, found)


def scopes(name: str, found: dict[str, Any]) -> Iterator[str]:
    """Yield the largest parts of a step, by category and by source line."""
    largest = sorted(found["lines"].items(), key=lambda line: -line[1])[:6]
    told = "; ".join(f"{what} {seconds / found['step']:.1%}" for what, seconds in largest)
    yield f"- {name}: {told}."


def config_of(run: Run) -> ModelConfig:
    """Return the model that a run trains."""
    return settings_of(run).model


def settings_of(run: Run) -> command.CompileSettings:
    """Return the settings that `gspmd compile` parses from a run's flags."""
    return command.parse(run.command.split()[2:])


def measured(kept: Kept, name: str) -> dict[str, Any]:
    """Return the figures of a run's simulated step, compiled as `gspmd compile` does."""
    run = RUNS[name]

    def compiled() -> dict[str, Any]:
        settings = settings_of(run)
        target = topology(settings.topology)
        report = command.compiled(settings, target)
        figures = {
            "fits": report.fits, "bytes": report.bytes_per_device, "room": report.hbm_bytes,
            "compile_seconds": report.compile_seconds, "reason": report.reason,
            "peak": target.chip.flops("bfloat16") * target.num_devices / run.chips,  # a chip may be two devices
        }  # fmt: skip
        if not report.fits:
            return figures
        return figures | {"as_planned": report.ledger.compare(report.plan).agrees} | split(report.timeline)

    return kept(run.command, compiled)


def split(line: Timeline) -> dict[str, Any]:
    """Split a step's seconds in two ways: into products, other instructions and waiting, and by source line.

    An instruction that contains a product counts as a product, with everything that is fused into it.
    """
    computed = {"einsum": 0.0, "other": 0.0}
    for part in line.parts:
        if part.category in computed:
            computed[part.category] += part.seconds
    lines: dict[str, float] = {}
    for span in line.spans:
        if span.category in computed:
            what = f"{'products' if span.category == 'einsum' else 'other'} of `{Path(span.source).name or span.name}`"
            lines[what] = lines.get(what, 0.0) + span.seconds * span.times
    return {
        "step": line.step_seconds, "products": computed["einsum"], "other": computed["other"],
        "copies": line.compute_seconds - sum(computed.values()), "waiting": line.exposed_seconds,
        "hidden": line.hidden_seconds, "flops": line.flops, "lines": lines,
    }  # fmt: skip


def memory(kept: Kept, names: Sequence[str]) -> Iterator[str]:
    """Yield a table of the bytes per device of Megatron's models, as planned and by formulas."""
    yield (
        "| model | tensor × pipeline | parameters, gradients, Adam | formula | | a layer, none | selective | formula | "
        "| full | held by 1F1B here | Megatron's 1F1B, selective |"
    )
    yield f"|---|---|{'--:|' * 10}"
    for name, model in MEGATRON.items():
        found = kept(f"memory {name}", lambda each=model: planned_bytes(each))
        state, selective = formulas(model)
        # A stage holds its input for each microbatch in flight, and the activations of one microbatch's backward pass.
        in_flight = min(model.microbatches, 2 * model.stages - 1)
        held = in_flight * found["full"] + model.layers // model.stages * found["selective"]
        planned = (amount_of_bytes(found[part]) for part in ("state", "none", "selective", "full"))
        state_, none_, selective_, full_ = planned
        yield (
            f"| {name} | {model.tensor} × {model.stages} | {state_} | {amount_of_bytes(round(state))} | "
            f"{found['state'] / state:.3f} | {none_} | {selective_} | {amount_of_bytes(round(selective))} | "
            f"{found['selective'] / selective:.3f} | {full_} | {amount_of_bytes(held)} | "
            f"{amount_of_bytes(round(model.layers * selective))} |"
        )


def depth(kept: Kept, names: Sequence[str]) -> Iterator[str]:
    """Yield a table of the processor seconds to trace, lower and compile training steps of 12 and of 96 layers."""
    found = kept("depth", seconds_by_layers)
    yield "| processor seconds | 12 layers | 96 layers | |"
    yield "|---|--:|--:|--:|"
    for what, (few, many) in found.items():
        yield f"| {what} | {few:.2f} | {many:.2f} | {many / few:.2f} |"


def seconds_by_layers(target_name: str = "tpu-v5p:2x2x2") -> dict[str, list[float]]:
    """Return processor seconds of planning, of tracing and lowering, and of compiling, for 12 and for 96 layers."""
    found: dict[str, list[float]] = {"plan": [], "trace and lower": [], "compile": [], "all": []}
    target, layout = topology(target_name), Layout.load("zero-3")
    mesh = target.mesh(layout.mesh_for(target.num_devices))
    for layers in (2, 12, 96):  # the first run fills the plan caches and is not counted
        config = ModelConfig(
            vocabulary=32_000, embed=1024, layers=layers, heads=8, head_size=128, feed_forward=2816, tied=False
        )
        model, optimizer = abstract(config, layout, mesh, "bfloat16", stored="float32"), OptimizerConfig()
        args = (
            step.training_step(model, optimizer, 1000), step.abstract_state(model, optimizer, 1000, mesh),
            abstract_batch(layout, mesh, 32, 512), abstract_key(mesh),
        )  # fmt: skip
        began = [time.process_time()]
        with jax.set_mesh(mesh), gspmd.lowering("blocking"):
            gspmd.trace(*args)
            began.append(time.process_time())
            lowered = jax.jit(args[0], donate_argnums=(0,)).lower(*args[1:])
            began.append(time.process_time())
            lowered.compile()
            began.append(time.process_time())
        if layers > 2:
            for what, start, end in zip(found, (*began[:3], began[0]), (*began[1:], began[3])):
                found[what].append(end - start)
    return found


SECTIONS = {"runs": compared, "parts": parts, "memory": memory, "depth": depth, "pipelines": pipelines}

if __name__ == "__main__":
    main()
