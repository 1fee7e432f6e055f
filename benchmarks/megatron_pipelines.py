"""Compilation time and predicted time of Megatron's models in pipelines over 1024 TPU v5p, compiled offline."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_memory import LENGTH, MEGATRON, RESIDUAL, Megatron
from page import Kept

import gspmd
from gspmd.audit import compile_offline, topology
from gspmd.audit.simulation.machine import COPY_ROWS, LOCAL_ROWS
from gspmd.audit.simulation.timeline import Timeline
from gspmd.commands import compile as command
from gspmd.display.units import amount_of_bytes, amount_of_seconds
from gspmd.pipeline import Schedule
from gspmd.training import ShardingConfig

TOPOLOGY, CHIPS = "tpu-v5p:8x8x16", 1024


@dataclass(frozen=True)
class Pipeline:
    """A model of `MEGATRON` on all chips; a microbatch has one sequence for each pipeline."""

    name: str
    schedule: str
    microbatches: int

    @property
    def model(self) -> Megatron:
        """The model, with its sizes and its number of stages."""
        return MEGATRON[self.name]

    @property
    def data(self) -> int:
        """Number of pipelines that run side by side."""
        return CHIPS // (self.model.tensor * self.model.stages)

    @property
    def settings(self) -> command.CompileSettings:
        """The settings of `gspmd compile`."""
        model = self.model
        sharding = ShardingConfig(
            layout="pipeline", lowering="blocking", schedule=self.schedule,
            mesh=f"p={model.stages},x={self.data},y={model.tensor},z=1",
            set=tuple(f"{key}={spec}" for key, spec in RESIDUAL.items()),
        )  # fmt: skip
        return command.CompileSettings(
            topology=TOPOLOGY, phase="train", batch=self.microbatches * self.data, length=LENGTH,
            microbatches=self.microbatches, model=model.config, sharding=sharding,
        )  # fmt: skip


PIPELINES = (Pipeline("175B", "1f1b", 96), Pipeline("175B", "gpipe", 96), Pipeline("1T", "1f1b", 512))
"""175B has a batch of 1536 sequences, which are GPT-3's 3.2 million tokens; 1T has Megatron's 512 microbatches."""


def pipelines(kept: Kept, _: Sequence[str]) -> Iterator[str]:
    """Yield a table of the processor seconds of each step's compilation, and its predicted time."""
    yield (
        "| model | tensor × pipeline × data | schedule | microbatches | trace | lower | compile | bytes of a chip "
        "| step | MFU | bubble | formula |"
    )
    yield f"|---|---|---|{'--:|' * 9}"
    for each in PIPELINES:
        found = kept(f"pipeline {each.name} {each.schedule}", lambda each=each: compiled(each))
        model, formula = each.model, Schedule.of(each.schedule, each.model.stages, each.microbatches).bubble
        times = " | ".join(f"{found[part]:.1f} s" for part in ("trace", "lower", "compile"))
        yield (
            f"| {each.name} | {model.tensor} × {model.stages} × {each.data} | {each.schedule} | {each.microbatches} | "
            f"{times} | {amount_of_bytes(found['bytes'])} | {amount_of_seconds(found['step'])} | {found['mfu']:.1%} | "
            f"{found['bubble']:.1%} | {formula:.1%} |"
        )


def compiled(each: Pipeline) -> dict[str, Any]:
    """Compile one training step, and return its figures."""
    settings, target, began = each.settings, topology(TOPOLOGY), {}
    layout, mesh = command.layout_of(settings), command.mesh_of(settings, target)
    program, args, options = command.program_of(settings, layout, mesh)
    with gspmd.lowering("blocking"):
        report = compile_offline(
            program, *args, topology=target, mesh=mesh, flops=flops(settings),
            progress=lambda doing: began.setdefault(doing, time.process_time()), **options,
        )  # fmt: skip
    assert report.timeline, report.reason
    phases = {
        "trace": ("planning", "lowering"),
        "lower": ("lowering", "compiling"),
        "compile": ("compiling", "reading"),
    }
    took = {name: began[end] - began[start] for name, (start, end) in phases.items()}
    return took | {"bytes": report.bytes_per_device} | simulated(report.timeline, each)


def flops(settings: command.CompileSettings) -> float:
    """Return the model FLOPs of a step."""
    return settings.batch * settings.length * settings.model.flops_per_token(settings.length)


def simulated(line: Timeline, each: Pipeline) -> dict[str, float]:
    """Return a step's seconds, its MFU, and its bubble, the share of time that does not grow with the microbatches.

    The time of a microbatch is the time that one more microbatch would add. This is one trip of each loop that has at
    least as many trips as there are microbatches. Everything else, such as the stages' waiting and the sums and update
    at the end, is fixed.
    """
    loops = [span for span in line.spans if span.category == "loop" and span.times == span.trips >= each.microbatches]
    of_one = sum(within(line, loop) / loop.trips for loop in loops)
    step = line.step_seconds
    return {"step": step, "mfu": line.mfu, "bubble": 1 - each.microbatches * of_one / step}


def within(line: Timeline, loop: Any) -> float:
    """Return the seconds of a loop: the sum over the spans drawn inside it, times their repetitions."""
    end = loop.start + loop.seconds
    inside = (span for span in line.spans if span.category != "loop" and loop.start <= span.start < end)
    waits = lambda span: span.rows[0] not in LOCAL_ROWS  # noqa: E731
    return sum(
        (span.exposed if waits(span) else span.seconds) * span.times for span in inside if span.rows[0] not in COPY_ROWS
    )
