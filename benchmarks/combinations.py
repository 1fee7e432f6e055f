"""Train combinations of data, model, expert, context and pipeline parallelism on eight host devices.

    python benchmarks/combinations.py                                  # all rows
    python benchmarks/combinations.py --only "data × context"          # the rows of one combination
    python benchmarks/combinations.py --write docs/combinations.md     # regenerates the page's tables

A row is green if the losses of 50 steps agree with the losses on one device to 1e-4 in float32, and if the compiled
step sends exactly the planned bytes. A row that a layout refuses shows the reason.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

import gspmd
import gspmd_models as models
from gspmd import host
from gspmd.annotate import LayoutError, PlanError
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd.training import OptimizerConfig
from gspmd.training.step import jit_step
from gspmd_models import step
from gspmd_models.stages import for_stages, schedule_of

STEPS, TOLERANCE, BATCH, LENGTH = 50, 1e-4, 8, 16
DENSE = models.ModelConfig(
    vocabulary=64, embed=32, layers=2, heads=8, kv_heads=8, head_size=8, feed_forward=64, remat=False
)  # fmt: skip
EXPERTS = replace(DENSE, moe=MoEConfig(experts=8, every=2))


@dataclass(frozen=True)
class Pipeline:
    """The schedule of a row's pipeline, and the model's number of layers."""

    schedule: str
    microbatches: int
    rounds: int = 1
    layers: int = 2

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `training_step`."""
        return {"schedule": self.schedule, "microbatches": self.microbatches, "rounds": self.rounds}

    def __str__(self) -> str:
        rounds = f", R={self.rounds}" if self.rounds > 1 else ""
        return f"{self.schedule}, M={self.microbatches}{rounds}, N={self.layers}"


@dataclass(frozen=True)
class Row:
    """One combination.

    Attributes:
        parts: the kinds of parallelism that the row combines, such as `"data × context"`.
        layout: name of the preset.
        mesh: sizes of the mesh axes, without those of size 1.
        change: specs that differ from the preset's, by key.
        lowering: lowering of every part of the model.
        length: tokens per sequence.
        config: the model; None for the default model, which has experts if `parts` names them.
        pipeline: the pipeline, or None. With a pipeline, the layout has `pipeline.layers` N_p, and either all layers
            have experts or no layer has.
        reason: part of the message with which the layout refuses the row; empty if it trains.
    """

    parts: str
    layout: str
    mesh: Mapping[str, int]
    change: Mapping[str, str] = field(default_factory=dict)
    lowering: str = "blocking"
    length: int = LENGTH
    config: models.ModelConfig | None = None
    pipeline: Pipeline | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        """A short name of the row, for test ids."""
        changed = ", ".join(f"{key} {spec}" for key, spec in self.change.items() if key in _TOLD)
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        stages = f" {self.pipeline}" if self.pipeline else ""
        return f"{self.layout} {mesh}{stages} {changed}".strip()

    @property
    def model(self) -> models.ModelConfig:
        """The model that the row trains."""
        config = self.config or (EXPERTS if "expert" in self.parts else DENSE)
        if self.pipeline is None:
            return config
        moe = replace(config.moe, every=1, jitter=0.0) if config.moe else None  # each microbatch has separate draws
        return replace(config, layers=self.pipeline.layers, moe=moe)

    @property
    def table(self) -> Layout:
        """The layout, with the row's changes."""
        layout = Layout.load(self.layout)
        if self.pipeline:
            layout = replace(layout, axes=("p", *layout.axes)).override({"pipeline.layers": "N_p"})
        return layout.override(self.change).lowered(self.lowering)


_TOLD = ("moe.expert_input", "moe.hidden", "attention.query", "moe.groups")
# Experts over the axis that shards sequences, each expert whole or split over z, on the same devices as attention.
OVER_Y = {
    "moe.expert_input": "G_xX_yCE", "moe.w_in": "X_yEF_z", "moe.w_gate": "X_yEF_z", "moe.hidden": "G_xX_yCF_z",
    "moe.w_out": "X_yF_zE", "moe.in_via": "G_xX_yCE, X_yEF_z", "moe.out_via": "G_xX_yCF_z, X_yF_zE",
}  # fmt: skip
OVER_ALL = {
    "moe.expert_input": "GX_xyzCE", "moe.w_in": "X_xyzEF", "moe.w_gate": "X_xyzEF", "moe.hidden": "GX_xyzCF",
    "moe.w_out": "X_xyzFE", "moe.in_via": "GX_xyzCE, X_xyzEF", "moe.out_via": "GX_xyzCF, X_xyzFE",
}  # fmt: skip

ROWS = (
    Row("data", "data-parallel", {"x": 8}),
    Row("data", "zero-2", {"x": 8}),
    Row("data", "zero-3", {"x": 8}, lowering="looped"),
    Row("model", "megatron-1d", {"y": 8}),
    Row("model", "megatron-sequence", {"y": 8}, lowering="looped"),
    Row("expert", "gshard", {"x": 8}),
    Row("context", "context-parallel", {"y": 8}, lowering="looped"),
    Row("data × model", "megatron-1d", {"x": 2, "y": 4}),
    Row("data × model", "megatron-sequence", {"x": 2, "y": 4}),
    Row("data × expert", "switch-expert-model", {"x": 4, "z": 2}),
    Row("data × context", "context-parallel", {"x": 2, "y": 4}),
    Row("data × context", "context-parallel", {"x": 2, "y": 4}, lowering="looped"),
    Row("model × expert", "switch-expert-model", {"x": 4, "y": 2}),
    Row("model × expert", "megatron-folded", {"y": 8}, lowering="looped"),
    Row("model × context", "context-parallel", {"y": 4, "z": 2}, lowering="looped"),
    Row("expert × context", "context-parallel", {"y": 8}, OVER_Y, "looped"),
    Row("data × model × expert", "switch-expert-model", {"x": 2, "y": 2, "z": 2}),
    Row("data × model × expert", "megatron-folded", {"x": 2, "y": 4}),
    Row("data × model × expert", "megatron-folded", {"x": 2, "y": 2, "z": 2}, OVER_ALL),
    Row("data × model × context", "context-parallel", {"x": 2, "y": 2, "z": 2}, lowering="looped"),
    Row("data × expert × context", "context-parallel", {"x": 2, "y": 4}, OVER_Y),
    Row("model × expert × context", "context-parallel", {"y": 4, "z": 2}, OVER_Y, "looped"),
    Row("data × model × expert × context", "context-parallel", {"x": 2, "y": 2, "z": 2}, OVER_Y, "looped"),
    Row("data × model × expert × context", "context-parallel", {"x": 2, "y": 2, "z": 2}, OVER_ALL),
    Row("data × pipeline", "zero-1", {"p": 4, "x": 2}, pipeline=Pipeline("gpipe", 4, layers=4)),
    Row("data × pipeline", "zero-2", {"p": 2, "x": 4}, pipeline=Pipeline("1f1b", 2)),
    Row("data × pipeline", "zero-2", {"p": 2, "x": 2, "z": 2}, pipeline=Pipeline("zero-bubble", 2)),
    Row("model × pipeline", "megatron-1d", {"p": 4, "y": 2}, pipeline=Pipeline("1f1b", 4, 3, layers=12)),
    Row("context × pipeline", "context-parallel", {"p": 2, "y": 4}, pipeline=Pipeline("1f1b", 4)),
    Row("data × model × pipeline", "megatron-1d", {"p": 2, "x": 2, "y": 2}, pipeline=Pipeline("zero-bubble", 4)),
    Row("data × expert × pipeline", "gshard", {"p": 2, "x": 4}, pipeline=Pipeline("1f1b", 2, 2, layers=4)),
    Row("model × expert × pipeline", "megatron-folded", {"p": 4, "y": 2}, pipeline=Pipeline("1f1b", 4, 2, layers=8)),
    Row("model × context", "context-parallel", {"y": 8}, {"attention.query": "BL_yH_yD"}, reason="mesh axis y"),
    Row("expert × context", "context-parallel", {"y": 8}, {"moe.groups": "GL_yE", "moe.dispatched": "GXCE"},
        reason="dimension L of moe.groups must not be sharded"),
    Row("context", "context-parallel", {"y": 8}, length=24, reason="zigzag order cuts it into 16 chunks"),
    Row("expert", "gshard", {"x": 8}, config=replace(DENSE, moe=MoEConfig(experts=4, every=2)),
        reason="dimension X has size 4"),
    Row("data × pipeline", "megatron-sequence", {"p": 2, "x": 2, "y": 2},
        {"gradients.ffn.norm": "E partialsum-xyz"}, pipeline=Pipeline("1f1b", 2),
        reason="the gradient of ffn.norm over y, z: write"),
    Row("data × pipeline", "data-parallel", {"p": 2, "x": 4}, pipeline=Pipeline("1f1b", 2, 2),
        reason="2 stacked layers do not make 2 rounds of 2 stages"),
    Row("model × pipeline", "megatron-1d", {"p": 4, "y": 2}, pipeline=Pipeline("1f1b", 2, 2, layers=8),
        reason="2 microbatches cannot go 2 times round 4 stages"),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The outcome of a row.

    Attributes:
        difference: the largest relative difference between a loss and the loss on one device.
        sent: bytes that one device sends in a compiled step.
        as_planned: whether the sent bytes equal the planned bytes for each kind of collective and its mesh axes.
        fell: the decrease of the loss, in nats.
        refused: the message with which the layout refuses the row; empty if it trains.
    """

    difference: float = 0.0
    sent: int = 0
    as_planned: bool = False
    fell: float = 0.0
    refused: str = ""

    @property
    def is_green(self) -> bool:
        """Whether the losses agree with the losses on one device, and the ledger agrees with the plan."""
        return not self.refused and self.difference <= TOLERANCE and self.as_planned


def outcome(row: Row) -> Outcome:
    """Train a row on its mesh and on one device, and compare the two runs."""
    try:
        layout, settings = row.table, row.pipeline.settings if row.pipeline else {}
        mesh = layout.complete_mesh(row.mesh)
        layout.check(row.model.sizes(BATCH, row.length), mesh)
        if schedule_of(row.model, layout, mesh, **settings):
            for_stages(row.model, layout)
    except LayoutError as error:
        return Outcome(refused=" ".join(filter(None, (error.faults[0].fact, error.faults[0].remedy))).split("\n")[0])
    except PlanError as error:
        return Outcome(refused=" ".join(str(error).split()))
    losses, comparison, sent = train(row.model, layout, mesh, row.length, settings)
    wanted = alone(row.model, row.length)
    difference = float(np.max(np.abs(losses - wanted) / np.abs(wanted)))
    return Outcome(difference, sent, comparison, float(wanted[0] - wanted[-1]))


@cache
def alone(config: models.ModelConfig, length: int) -> np.ndarray:
    """Return the losses of the training on one device."""
    return train(config, Layout.load("replicated"), {"x": 1}, length)[0]


def train(
    config: models.ModelConfig,
    layout: Layout,
    sizes: Mapping[str, int],
    length: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[np.ndarray, bool, int]:
    """Return the losses of the training loop's step, whether its ledger agrees with the plan, and the bytes sent."""
    sizes = layout.complete_mesh(sizes)
    devices = jax.devices()[: int(np.prod([*sizes.values()]))]
    types = (jax.sharding.AxisType.Explicit,) * len(sizes)
    mesh, optimizer = jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices), OptimizerConfig()
    with jax.set_mesh(mesh), gspmd.lowering(layout.lowering or "blocking"):
        model = models.build(config, layout, mesh, jax.random.key(0))
        state = step.initial_state(model, optimizer, STEPS, mesh)
        update = jit_step(step.training_step(model, optimizer, STEPS, **settings), state)
        where, key = jax.NamedSharding(mesh, models.batch_spec(layout).partition_spec()), placed_key(mesh)
        arguments = state, jax.device_put(text(0, length), where), key
        plan, compiled = gspmd.trace(update, *arguments), update.lower(*arguments).compile()
        ledger, losses = gspmd.ledger(compiled), []
        for number in range(STEPS):
            state, figures = compiled(state, jax.device_put(text(number, length), where), key)
            losses.append(float(figures["loss"]))
    return np.array(losses), ledger.compare(plan).agrees, ledger.wire_bytes


def placed_key(mesh: jax.sharding.Mesh) -> jax.Array:
    """Return the random key of the routers, replicated on all devices."""
    return jax.device_put(jax.random.key(1), jax.NamedSharding(mesh, jax.P()))


def text(number: int, length: int) -> np.ndarray:
    """Return tokens [B, L+1], each of which is its predecessor plus 1 or 5, modulo 64."""
    steps = np.random.default_rng(number).choice([1, 5], size=(BATCH, length + 1))
    return (np.cumsum(steps, axis=1) % 64).astype(np.int32)


def line(row: Row, found: Outcome) -> str:
    """Return a row of the page's table."""
    changed = "; ".join(f"`{key}` {spec}" for key, spec in row.change.items() if key in _TOLD)
    changed = "; ".join(filter(None, (changed, str(row.pipeline or ""))))
    mesh = ", ".join(f"{axis}={size}" for axis, size in row.mesh.items())
    first = f"| {row.parts} | `{row.layout}` | {mesh} | {changed}"
    if found.refused:
        length = f"L={row.length}" if row.length != LENGTH else ""
        experts = f"X={row.config.moe.experts}" if row.config else ""
        return f"{first}{length}{experts} | {found.refused} |"
    sent = f"{found.sent:,} | {'yes' if found.as_planned else '**no**'}"
    verdict = "green" if found.is_green else "**red**"
    return f"{first} | {row.lowering} | {found.difference:.1e} | {sent} | {verdict} |"


TRAINED = (
    "| parts | layout | mesh | changed | lowering | largest difference | bytes sent | as planned | |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)
REFUSED = "| parts | layout | mesh | changed | refused, because |\n| --- | --- | --- | --- | --- |"


def main() -> None:
    """Train all rows, print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help='rows of these parts, such as "data × context"')
    parser.add_argument("--write", type=Path, help="replace the tables in a page")
    options = parser.parse_args()
    if options.write and options.only:
        raise SystemExit("the page has all rows: leave out --only.")
    host.start(8, "cpu")
    found: dict[bool, list[str]] = {False: [], True: []}
    for row in (row for row in ROWS if options.only in ("", row.parts)):
        result: Any = outcome(row)
        print(line(row, result), flush=True)
        found[bool(result.refused)].append(line(row, result))
    if options.write:
        from page import write_between  # beside this file, which tests import from elsewhere

        tables = "\n".join([TRAINED, *found[False], "", REFUSED, *found[True]])
        write_between(options.write, ("<!-- combinations: begin -->", "<!-- combinations: end -->"), tables)


if __name__ == "__main__":
    main()
