"""Compare the planned and the compiled ledger of a training step, for every preset, as Markdown tables.

    python benchmarks/ledgers.py --lowering xla                              # eight host devices, float32
    python benchmarks/ledgers.py --topology tpu-v4:4x4x4 --dtype bfloat16    # the real TPU compiler, no TPU needed
    python benchmarks/ledgers.py --presets zero-3,gshard                     # some presets
    python benchmarks/ledgers.py --lowering xla --write docs/ledgers.md      # regenerates the page's tables

Nothing is allocated or run. Figures are the bytes that one device sends in one step.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax

import gspmd
import gspmd_models as models
from gspmd import host
from gspmd.audit import Comparison, Ledger, compile_offline, topology
from gspmd.display import console as printing
from gspmd.display.units import axes_text
from gspmd.layouts import Layout, presets
from gspmd.moe import MoEConfig
from gspmd.tracing.trace import ProgramPlan
from gspmd.training import OptimizerConfig
from gspmd.training.step import jit_step
from gspmd_models import step

# Two repeats of a dense block and an expert block, so that there is a loop and the backward pass recomputes.
SMALL = models.ModelConfig(
    vocabulary=64, embed=32, layers=4, heads=8, kv_heads=8, head_size=8, feed_forward=64, moe=MoEConfig(experts=8)
)  # fmt: skip
# A dimension that is split over all 64 chips fills a tile of the vector unit, which is 128 wide: 8192 / 64.
LARGE = models.ModelConfig(
    vocabulary=32768, embed=8192, layers=4, heads=64, kv_heads=64, head_size=64, feed_forward=8192,
    moe=MoEConfig(experts=64, capacity_factor=2.0),
)  # fmt: skip
# Presets that hold all parameters on every device, or gather a whole layer's parameters, only have room for a smaller
# model: if memory is nearly full, the compiler repeats gathers whose results it could have kept.
THIN = replace(LARGE, embed=2048, feed_forward=512, heads=16, kv_heads=16)
SMALLER = {
    "replicated": THIN,
    "data-parallel": THIN,
    "megatron-1d": replace(LARGE, feed_forward=4096),
    "switch-expert-model": replace(LARGE, feed_forward=4096),
    "zero-3": replace(LARGE, feed_forward=2048),
    "weight-gathered-xyz": replace(LARGE, feed_forward=4096),
}
HOST, SLICE = (8, 16), (64, 1024)  # batch and length
ROOT = f"{Path(__file__).parents[1]}/"


def main() -> None:
    """Compile, print the tables, and write them preset by preset."""
    options = parsed()
    host.start(8, "cpu")
    for name in options.presets.split(","):
        print(f"{name} ...", file=sys.stderr)
        text = "\n".join(section(Layout.load(name), options))
        print(text, flush=True)
        if options.write:
            options.write.write_text(written(options.write.read_text(), mark(options), name, text))


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lowering", choices=("blocking", "xla"), default="blocking", help="default: %(default)s")
    parser.add_argument("--topology", default="", help="a TPU slice, such as tpu-v4:4x4x4; host devices if not given")
    parser.add_argument("--mesh", default="", help="sizes of x, y and z; the torus of a slice, or else a layout's own")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    parser.add_argument("--presets", default=",".join(presets()), help="default: all of them")
    parser.add_argument("--write", type=Path, help="replace these tables in a page")
    return parser.parse_args()


def section(layout: Layout, options: argparse.Namespace) -> Iterator[str]:
    """Yield the tables of one preset."""
    model = model_of(layout, options)
    plan, ledger = (on_slice if options.topology else on_host)(layout, options, *model)
    mesh = ", ".join(f"{axis}={size}" for axis, size in ledger.mesh.items())
    sizes = ", ".join(f"{dim}={size}" for dim, size in model[0].sizes(*model[1:]).items() if dim not in "TG")
    yield f"### {layout.name}\n\nMesh {mesh}; {sizes}; {ledger.flops:,} FLOP in matrix products.\n"
    comparison = ledger.compare(plan)
    yield from totals(comparison)
    yield from by_equation(plan, ledger) if options.lowering == "xla" else by_step(comparison)


def model_of(layout: Layout, options: argparse.Namespace) -> tuple[models.ModelConfig, int, int]:
    """Return the model, the batch and the length."""
    if not options.topology:
        return SMALL, *HOST
    batch, length = SLICE
    # Every device of `replicated` computes the whole batch.
    return SMALLER.get(layout.name, LARGE), batch, 64 if layout.name == "replicated" else length


def on_host(
    layout: Layout, options: argparse.Namespace, config: models.ModelConfig, batch: int, length: int
) -> tuple[ProgramPlan, Ledger]:
    """Return the plan of a step with lowering `blocking`, and the ledger of the step in the chosen lowering."""
    sizes = mesh_of(layout, 8, options)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Explicit,) * len(sizes))
    with jax.set_mesh(mesh):
        update, arguments = program(config, layout.lowered("blocking"), mesh, options.dtype, batch, length)
        with gspmd.lowering("blocking"):
            plan = gspmd.trace(update, *arguments)
        update, arguments = program(config, layout.lowered(options.lowering), mesh, options.dtype, batch, length)
        with gspmd.lowering(options.lowering):
            lowered = jit_step(update, arguments[0]).lower(*arguments)
    # Combined all-reduces would send the same bytes, but would all be listed under one equation.
    separate = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner,all-reduce-combiner"}
    return plan, gspmd.ledger(lowered.compile(separate), mesh)


def on_slice(
    layout: Layout, options: argparse.Namespace, config: models.ModelConfig, batch: int, length: int
) -> tuple[ProgramPlan, Ledger]:
    """Return the plan of a step with the chosen lowering, and its ledger as compiled by the TPU compiler."""
    target = topology(options.topology)
    mesh = target.mesh(mesh_of(layout, target.num_devices, options))
    with gspmd.lowering(options.lowering), jax.set_mesh(mesh):
        update, arguments = program(config, layout.lowered(options.lowering), mesh, options.dtype, batch, length)
        report = compile_offline(update, *arguments, topology=target, mesh=mesh, donate_argnums=(0,))
    if not report.fits:
        raise SystemExit(f"{layout.name} does not fit: {report.reason}")
    printing.console(stderr=True).print(report.summary())
    return report.plan, report.ledger


def program(config: models.ModelConfig, layout: Layout, mesh: jax.sharding.Mesh, dtype: str, batch: int, length: int):
    """Return a training step and its abstract arguments."""
    layout.check(config.sizes(batch, length), mesh)
    model, optimizer = models.abstract(config, layout, mesh, dtype), OptimizerConfig()
    state = step.abstract_state(model, optimizer, 100, mesh)
    arguments = state, models.abstract_batch(layout, mesh, batch, length), models.abstract_key(mesh)
    return step.training_step(model, optimizer, 100), arguments


def mesh_of(layout: Layout, devices: int, options: argparse.Namespace) -> dict[str, int]:
    """Return the chosen mesh.

    By default this is a slice's torus if the torus has three axes, and otherwise the layout's own choice of factors.
    """
    shape = options.mesh.split(",") if options.mesh else options.topology.partition(":")[2].split("x")
    return dict(zip("xyz", map(int, shape))) if len(shape) == 3 else layout.mesh_for(devices)


# -- tables -----------------------------------------------------------------------------------------------------------


def totals(comparison: Comparison) -> Iterator[str]:
    """Yield a table of planned and compiled bytes by kind and axes."""
    yield "| kind | mesh axes | planned | compiled | |"
    yield "|---|---|--:|--:|--:|"
    rows = {f"{kind} | {axes_text(axes)}": figures for (kind, axes), figures in sorted(comparison.totals.items())}
    sums = [sum(side) for side in zip(*rows.values())] or [0, 0]
    for name, (planned, compiled) in {**rows, "**all** | ": sums}.items():
        yield f"| {name} | {planned:,} | {compiled:,} | {ratio(planned, compiled)} |"
    yield ""


def ratio(planned: int, compiled: int) -> str:
    """Return the compiled bytes relative to the planned bytes, as text."""
    return "=" if planned == compiled else f"× {compiled / planned:.2f}" if planned and compiled else ""


def by_step(comparison: Comparison) -> Iterator[str]:
    """Yield a table of the steps that are not compiled as planned, in descending order of bytes."""
    rows = sorted(comparison.differing, key=lambda row: -max(row.planned[1], row.compiled[1]))
    if not rows:
        yield "Every step is compiled as planned.\n"
        return
    yield "| what became of it | kind | mesh axes | planned | compiled | step |"
    yield "|---|---|---|--:|--:|---|"
    for row in rows:
        told = f"{row.verdict}: {row.how}" if row.how else row.verdict
        figures = " | ".join(f"{count} × {sent // max(1, count):,}" for count, sent in (row.planned, row.compiled))
        asked = f"`{row.equation}`, {row.step.partition('.')[0]}" if row.equation else line(row.source)
        yield f"| {told} | {row.kind} | {axes_text(row.axes)} | {figures} | {asked} |"
    yield ""


def by_equation(plan: ProgramPlan, ledger: Ledger) -> Iterator[str]:
    """Yield a table of the equations, each with its gradient, whose compiled bytes differ from the planned bytes."""
    planned = sent([(e.equation, e.step.kind, e.step.axes, e.wire_bytes) for e in plan.entries if e.step.is_collective])
    compiled = sent([(e.equation or line(e.source), e.kind, e.axes, e.wire_bytes) for e in ledger.entries])
    names = [name for name in {**planned, **compiled} if planned.get(name) != compiled.get(name)]
    if not names:
        yield "Every equation sends what was planned.\n"
        return
    yield "| equation, with its gradient | planned | compiled |"
    yield "|---|---|---|"
    for name in sorted(names, key=lambda name: -max(total(planned.get(name)), total(compiled.get(name)))):
        shown = f"`{name}`" if name in planned else name
        yield f"| {shown} | {amounts(planned.get(name))} | {amounts(compiled.get(name))} |"
    yield ""


Sent = Mapping[tuple[str, tuple[str, ...]], int]


def sent(collectives: Sequence[tuple]) -> dict[str, Sent]:
    """Sum bytes by equation and, for each equation, by kind and axes."""
    found: dict[str, Counter] = {}
    for equation, kind, axes, count in collectives:
        if count:
            found.setdefault(equation.removeprefix("gradient of "), Counter())[kind, tuple(sorted(axes))] += count
    return found


def total(amounts: Sent | None) -> int:
    return sum((amounts or {}).values())


def amounts(of: Sent | None) -> str:
    """Format amounts as `all-gather yz 1,024, ...`."""
    return ", ".join(f"{kind} {axes_text(axes)} {count:,}" for (kind, axes), count in sorted((of or {}).items()))


def line(source: str) -> str:
    """Format a source line relative to the repository's root."""
    return f"(no equation) {source.removeprefix(str(ROOT))}" if source else "(the compiler)"


def mark(options: argparse.Namespace) -> str:
    """Return the name of these tables in a page."""
    return options.topology or f"host {options.lowering}"


def written(old: str, name: str, preset: str, tables: str) -> str:
    """Return a page in which one preset's section between two markers is replaced, or inserted in order if new."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    if begin not in old or end not in old:
        raise SystemExit(f"the page has no lines '{begin.strip()}' and '{end}'; add them where these tables belong.")
    before, _, rest = old.partition(begin)
    block, _, after = rest.partition(end)
    found = {part.partition("\n")[0]: f"### {part.strip()}\n" for part in block.split("### ")[1:]}
    found[preset] = tables.strip() + "\n"
    return "\n".join([before + begin, *(found[each] for each in presets() if each in found), end + after])


if __name__ == "__main__":
    main()
