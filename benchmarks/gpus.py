"""Compare predicted with published training steps on GPUs, compiled offline for the same number and kind of GPUs.

    python benchmarks/gpus.py                               # renew the tables of docs/gpus.md from the saved figures
    python benchmarks/gpus.py --check                       # exit code 1 if the page differs from the saved figures
    python benchmarks/gpus.py --only llama-3.1-8b           # compile a row again, then renew the tables; `all` for all
    python benchmarks/gpus.py --only all --programs kept    # keep compiled programs, and simulate those that are there
    python benchmarks/gpus.py --only all --planned          # renew planned seconds only, in some minutes

A row is compiled as `gspmd compile` does, with the command that the page shows. Figures are saved after each row, in
benchmarks/results/gpus.json. A row that was not compiled, or whose compilation failed, says so in the tables. Needs
JAX's plugin for CUDA to compile, but no GPU. No figure of the model of time is fitted to a row.
"""

import argparse
import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import jax
from mfu import split
from page import Kept, write_between

import gspmd
from gspmd import host
from gspmd.audit import Timeline, compile_offline, hlo, timeline, topology
from gspmd.audit.offline.names import read_name
from gspmd.commands import compile as offline
from gspmd.display.units import amount_of_bytes, amount_of_seconds
from gspmd.lowerings.in_force import on_these_devices
from gspmd.pipeline import Schedule
from gspmd.tracing.program_plan import ProgramPlan
from gspmd.training.config import parse_mesh
from gspmd_models import ModelConfig

ROOT = Path(__file__).parents[1]
WIDTH = 127  # columns of a page's lines
PAGE, RESULTS = ROOT / "docs" / "gpus.md", ROOT / "benchmarks" / "results" / "gpus.json"
TITAN, SC21, KORTHIKANTI = "torchtitan", "Narayanan et al. 2021", "Korthikanti et al. 2022"


@dataclass(frozen=True)
class Row:
    """A training step with a published measurement.

    Attributes:
        source: the publication.
        published: the figure, in `unit`.
        unit: "tokens/s" or "TFLOP/s", both for one GPU; or "s", the seconds of a step.
        flags: flags of `gspmd compile`, without the phase.
        passes: number of passes that the published program computes, where a backward pass counts as two.
        unlike: the reason why the prediction is not comparable with the published figure; empty if it is comparable.
    """

    source: str
    published: float
    unit: str
    flags: str
    passes: float = 3.0
    unlike: str = ""

    @property
    def command(self) -> str:
        """The command line that compiles the row."""
        return f"gspmd compile --phase train {self.flags}"

    @cached_property
    def settings(self) -> offline.CompileSettings:
        """The settings that `gspmd compile` parses from the row's command."""
        return offline.parse(self.command.split()[2:])

    def seconds(self, settings: offline.CompileSettings, gpus: int) -> float:
        """Return the published seconds of a step."""
        if self.unit == "s":
            return self.published
        if self.unit == "tokens/s":
            return settings.batch * settings.length / (gpus * self.published)
        return megatron_flops(settings.model, settings.batch, settings.length) / (gpus * self.published * 1e12)


def megatron_flops(config: ModelConfig, batch: int, length: int) -> float:
    """Return a step's FLOPs as Megatron-LM counts them.

    They are 96 B s l h² (1 + s/6h + V/16lh), which includes a second forward pass.

    Args:
        config: the model.
        batch: sequences of a step.
        length: tokens of a sequence.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 5.1 and its appendix.
    """
    layers, embed = config.layers, config.embed
    share = 1 + length / (6 * embed) + config.vocabulary / (16 * layers * embed)
    return 96 * batch * length * layers * embed**2 * share


def gpt(layers: int, embed: int, heads: int) -> str:
    """Return the flags of a Megatron model, which is GPT-3 in other sizes, with all of its biases."""
    return (
        f"--config gpt-3 --model.layers {layers} --model.embed {embed} --model.heads {heads} --model.kv-heads {heads} "
        f"--model.head-size {embed // heads} --model.feed-forward {4 * embed}"
    )


def narayanan(
    published: float, sizes: tuple[int, int, int], data: int, tensor: int, stages: int, batch: int, micro: int,
    rounds: int = 1,
) -> Row:  # fmt: skip
    """Return a row of table 1 of Narayanan et al. 2021.

    Args:
        published: TFLOP/s of one GPU.
        sizes: layers, hidden size and heads.
        data, tensor, stages: the degrees of parallelism.
        batch: sequences of a step.
        micro: sequences of a microbatch.
        rounds: number of chunks of layers on each stage.
    """
    microbatches = batch // (data * micro)
    if stages == 1:
        split_over, remat = f"--layout megatron-1d --mesh x={data},y={tensor},z=1", "full"
    else:
        split_over = f"--layout pipeline --mesh p={stages},x={data},y={tensor},z=1 --schedule 1f1b --rounds {rounds}"
        remat = "selective"  # a stage computes the chunk's forward pass twice, and that is Megatron's recomputation
    flags = (
        f"{gpt(*sizes)} --topology a100:{data * tensor * stages // 8}x8 {split_over} --lowering blocking "
        f"--batch {batch} --length 2048 --microbatches {microbatches} --model.remat {remat}"
    )
    return Row(SC21, published, "TFLOP/s", flags, 4)


def korthikanti(published: float, sizes: tuple[int, int, int], stages: int, batch: int, rounds: int, full: bool) -> Row:
    """Return a row of table 5 of Korthikanti et al. 2022.

    Args:
        published: seconds of a step.
        sizes: layers, hidden size and heads.
        stages: number of pipeline stages; each has 8 tensor-parallel devices.
        batch: sequences of a step; each is a microbatch if there are stages.
        rounds: number of chunks of layers on each stage.
        full: whether every layer is computed again in the backward pass. If false, the row is the table's "present
            work", with sequence parallelism and selective recomputation.
    """
    nodes = "8" if stages == 1 else f"{stages}x8"
    if stages == 1:
        split_over = f"--layout {'megatron-1d' if full else 'megatron-sequence'} --mesh x=1,y=8,z=1"
        remat = "full" if full else "selective"
    else:
        split_over, remat = f"--layout pipeline --mesh p={stages},x=1,y=8,z=1 --schedule 1f1b", "selective"
        split_over += f" --rounds {rounds} --microbatches {batch}"
        if not full:
            split_over += " --set attention.residual=B_xL_yzE --set ffn.residual=B_xL_yzE"
    flags = (
        f"{gpt(*sizes)} --topology a100:{nodes} {split_over} --lowering blocking --batch {batch} --length 2048 "
        f"--model.remat {remat}"
    )
    return Row(KORTHIKANTI, published, "s", flags, 4 if full else 3)


LLAMA_8B = (
    "--config llama-3.1-8b --topology h100:8 --layout zero-3 --lowering blocking --batch 16 --length 8192 "
    "--model.remat dots-except-hidden"
)
ROWS = {
    "llama-3.1-8b": Row(TITAN, 5762, "tokens/s", LLAMA_8B),
    "llama-3.1-8b, compiled": Row(TITAN, 6667, "tokens/s", LLAMA_8B),
    "llama-3.1-8b, 128 GPUs": Row(
        TITAN, 6514, "tokens/s", LLAMA_8B.replace("h100:8", "h100:16x8").replace("--batch 16", "--batch 256")
    ),
    "llama-3.1-70b": Row(
        TITAN, 829, "tokens/s",
        "--config llama-3.1-70b --topology h100:32x8 --layout benchmarks/fsdp-tensor.toml --mesh x=32,y=8,z=1 "
        "--set attention.residual=B_xL_yzE --set ffn.residual=B_xL_yzE --set attention.norm=E --set ffn.norm=E "
        "--set output.norm=E --lowering blocking --batch 512 --length 8192",
        4, "published in float8",
    ),
    "1.7B": narayanan(137, (24, 2304, 24), 32, 1, 1, 512, 16),
    "3.6B": narayanan(138, (30, 3072, 32), 32, 2, 1, 512, 16),
    "7.5B": narayanan(142, (36, 4096, 32), 32, 4, 1, 512, 16),
    "18.4B": narayanan(135, (40, 6144, 48), 32, 8, 1, 1024, 8),
    "39.1B": narayanan(138, (48, 8192, 64), 32, 8, 2, 1536, 4),
    "76.1B": narayanan(140, (60, 10_240, 80), 32, 8, 4, 1792, 2, 3),
    "145.6B": narayanan(148, (80, 12_288, 96), 24, 8, 8, 2304, 2, 2),
    "310.1B": narayanan(155, (96, 16_384, 128), 15, 8, 16, 2160, 1, 2),
    "529.6B": narayanan(163, (105, 20_480, 128), 9, 8, 35, 2520, 1, 3),
    "1008B": narayanan(163, (128, 25_600, 160), 6, 8, 64, 3072, 1),
    "22B, full": korthikanti(1.42, (48, 6144, 64), 1, 4, 1, True),
    "22B, selective": korthikanti(1.10, (48, 6144, 64), 1, 4, 1, False),
    "175B, full": korthikanti(18.13, (96, 12_288, 96), 8, 64, 3, True),
    "175B, selective": korthikanti(13.75, (96, 12_288, 96), 8, 64, 3, False),
    "530B, full": korthikanti(49.05, (105, 20_480, 128), 35, 280, 3, True),
    "530B, selective": korthikanti(37.83, (105, 20_480, 128), 35, 280, 3, False),
    "1T, full": korthikanti(94.42, (128, 25_600, 160), 64, 512, 1, True),
    "1T, selective": korthikanti(71.49, (128, 25_600, 160), 64, 512, 1, False),
}  # fmt: skip
"""torchtitan: benchmarks/llama3_h100_202412_torchtitan.md, tables 1, 3 and 4. Narayanan et al. 2021 (arXiv 2104.04473):
table 1; sizes of microbatches and chunks are those of Megatron-LM's examples/sc21/run_table_1.sh. Korthikanti et al.
2022 (arXiv 2205.05198): tables 3 and 5."""

GATHERED, GATHERED_SECONDS = "B_xE, EF_x -> BF_x", 565e-6
GATHERED_SIZES, GATHERED_COMMAND = (
    {"B": 8 * 1024, "E": 4096, "F": 8 * 4096},
    (
        f'gspmd explain "{GATHERED}" --sizes B=8192,E=4096,F=32768 --mesh x=8 --dtype float16 --chip h100 '
        "--lowering blocking --no-gradients"
    ),
)
"""A gather and a product over eight H100 by NCCL and cuBLAS: JAX's docs/pallas/gpu/collective_matmul.md, "reference
time". M = 1024 and N = 4096 are sizes of one device."""
SLICES = "dynamic_slice", "dynamic_update_slice"
"""Kernels that cut one layer's arrays out of the arrays of all layers, or write them back."""
NOT_COMPILED = {
    "gpt-oss-120b": (
        "64", "5,630 tokens/s", "Megatron-Bridge's performance summary: 64 H100, 512 rows of 4,096 tokens, PP 4, EP 8",
        "its sinks and windows are supported since this release, and the row has not been compiled",
    ),
}  # fmt: skip
"""Published steps that have not been compiled: number of GPUs, figure, source, and reason."""


def main() -> None:
    """Compile the chosen rows, and renew the page; or check it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["all", GATHERED, *ROWS]
    parser.add_argument("--only", choices=names, metavar="ROW", nargs="+", default=[], help=f"of {', '.join(names)}")
    parser.add_argument("--programs", type=Path, help="keep compiled programs in this folder, and simulate them again")
    parser.add_argument(
        "--planned", action="store_true", help="renew planned seconds only, which needs no compiling; with --only"
    )
    parser.add_argument("--check", action="store_true", help="only compare the page with the saved figures")
    options = parser.parse_args()
    if options.planned and (options.programs or not options.only):
        parser.error("--planned needs --only, and has no use for --programs")
    if options.only:
        host.keep_compiled(False)  # JAX cannot read back what was compiled for devices that are not there
        host.start(1, "cpu")  # for JAX itself: the GPUs exist for the compiler only
    chosen = names[1:] if "all" in options.only else options.only
    for name in dict.fromkeys(first_of(name) for name in chosen):
        if options.planned:
            plan_again(name)
        else:
            measure(name, options.programs)
        print(*compared(Kept(RESULTS).figures), sep="\n", flush=True)
    kept = Kept(RESULTS).figures
    if options.check:
        changed = [name for name, text in tables(kept).items() if marked(name, text) not in PAGE.read_text()]
        raise SystemExit(f"{PAGE.name} is not what the figures give: {', '.join(changed)}" if changed else 0)
    for name, text in tables(kept).items():
        write_between(PAGE, marks(name), text)


def marks(name: str) -> tuple[str, str]:
    """Return the marks of a table in the page."""
    return f"<!-- {name}: python benchmarks/gpus.py -->", f"<!-- end of {name} -->"


def marked(name: str, text: str) -> str:
    """Return a table as the page has it, between its marks."""
    begin, end = marks(name)
    return f"{begin}\n{text}\n\n{end}"


def tables(kept: dict[str, Any]) -> dict[str, str]:
    """Return the text of every table of the page."""
    return {name: "\n".join(table(kept)) for name, table in TABLES.items()}


def first_of(name: str) -> str:
    """Return the first row with the same command as this row; rows with the same command share their figures."""
    return next((each for each, row in ROWS.items() if name in ROWS and row.command == ROWS[name].command), name)


def measure(name: str, programs: Path | None) -> None:
    """Compile a row, and save its figures, or the first line of the error."""
    saved = Kept(RESULTS)
    ran = GATHERED_COMMAND if name == GATHERED else ROWS[name].command
    before = {key: value for key, value in saved.figures.pop(ran, {}).items() if key != "failure"}
    program = programs / f"{name.replace(' ', '-').replace(',', '')}.hlo.gz" if programs else None

    def figures() -> dict[str, Any]:
        try:
            if name == GATHERED:
                return gathered()
            if program and program.exists() and before:
                return before | simulated_again(ROWS[name], gzip.decompress(program.read_bytes()).decode())
            return compiled(ROWS[name], program)
        except ValueError as error:
            return before | {"failure": str(error).partition("\n")[0]}

    saved(ran, figures)


def plan_again(name: str) -> None:
    """Save the planned seconds of a row that was compiled before."""
    saved = Kept(RESULTS)
    ran = GATHERED_COMMAND if name == GATHERED else ROWS[name].command
    if "step" not in saved.figures.get(ran, {}):
        print(f"{name} has not been compiled, and keeps what is saved.")
        return
    before = saved.figures.pop(ran)
    if name == GATHERED:
        plan = gspmd.plan(GATHERED, GATHERED_SIZES, {"x": 8}, "float16", "h100", "blocking")
    else:
        plan, _ = planned(ROWS[name])
    saved(ran, lambda: before | {"planned": plan.seconds})


def compiled(row: Row, program: Path | None) -> dict[str, Any]:
    """Compile a row as `gspmd compile` does, and return its figures; if a file is given, write the program into it."""
    settings = row.settings
    report = offline.compiled(settings, topology(settings.topology))
    figures = {
        "fits": report.fits, "bytes": report.bytes_per_device, "room": report.hbm_bytes,
        "compile_seconds": report.compile_seconds,
    }  # fmt: skip
    if not report.timeline:
        return figures | {"failure": report.reason}
    if program:
        program.parent.mkdir(exist_ok=True)
        program.write_bytes(gzip.compress(report.hlo.encode()))
    return figures | {"as_planned": report.ledger.compare(report.plan).agrees} | timed(report.plan, report.timeline)


def simulated_again(row: Row, text: str) -> dict[str, Any]:
    """Return those figures of a row that change with the plan and the model of time, from its compiled program."""
    plan, mesh = planned(row)
    figures = {"as_planned": gspmd.ledger(text, mesh).compare(plan).agrees}
    return figures | timed(plan, timeline(hlo.parse(text), topology(row.settings.topology).chip, dict(mesh.shape)))


def planned(row: Row) -> tuple[ProgramPlan, jax.sharding.Mesh]:
    """Return the plan of a row's program, and the mesh."""
    settings = row.settings
    layout, mesh = offline.layout_of(settings), offline.mesh_of(settings, topology(settings.topology))
    program, args, _ = offline.program_of(settings, layout, mesh)
    with jax.set_mesh(mesh), on_these_devices(), gspmd.lowering(layout.lowering or "auto"):
        return gspmd.trace(program, *args), mesh


def gathered() -> dict[str, Any]:
    """Return the figures of `GATHERED`, compiled for eight H100."""
    target = topology("h100:8")
    mesh = target.mesh({"x": 8})

    def abstract(text: str) -> jax.ShapeDtypeStruct:
        spec = gspmd.Spec.parse(text)
        shape = [GATHERED_SIZES[dim] for dim in spec.dims]
        return jax.ShapeDtypeStruct(shape, "float16", sharding=jax.NamedSharding(mesh, spec.partition_spec()))

    with gspmd.lowering("blocking"):
        report = compile_offline(
            lambda x, w: gspmd.einsum(GATHERED, x, w), abstract("B_xE"), abstract("EF_x"), topology=target
        )
    return timed(report.plan, report.timeline)


def timed(plan: ProgramPlan, line: Timeline) -> dict[str, Any]:
    """Return the figures that state the seconds of a plan and of a timeline."""
    waits = {f"{part.category} {''.join(part.axes)}": part.exposed for part in line.parts if part.exposed > 1e-6}
    slices = sum(span.seconds * span.times for span in line.spans if span.category == "other" and span.name in SLICES)
    return {"planned": plan.seconds, "waits": waits, "slices": slices} | split(line)


def compared(kept: dict[str, Any]) -> Iterator[str]:
    """Yield a table of published, planned and compiled seconds."""
    yield (
        "| step | GPUs | published | as seconds | planned | compiled | compiled / published | memory of a GPU | "
        "bytes sent |"
    )
    yield "|:--|--:|--:|--:|--:|--:|--:|:--|:--|"
    for name, row in ROWS.items():
        settings, found = row.settings, kept.get(row.command, {"failure": "not compiled"})
        gpus = gpus_of(settings)
        told = f"{row.published:,} {row.unit}" if row.unit != "s" else ""
        seconds = row.seconds(settings, gpus)
        begin = f"| {name} | {gpus:,} | {told} | {amount_of_seconds(seconds)} |"
        memory = "" if "room" not in found else f"{amount_of_bytes(found['bytes'])} of {amount_of_bytes(found['room'])}"
        if "failure" in found:
            yield f"{begin} | {found['failure']} | | {memory} | |"
            continue
        ratio = row.unlike or f"**{found['step'] / seconds:.2f}**"
        memory += "" if found["fits"] else ": does not fit"
        planned, compiled = amount_of_seconds(found["planned"]), amount_of_seconds(found["step"])
        yield (
            f"{begin} {planned} | {compiled} | {ratio} | {memory} | "
            f"{'as planned' if found['as_planned'] else 'not as planned'} |"
        )
    for name, (gpus, told, _, reason) in NOT_COMPILED.items():
        yield f"| {name} | {gpus} | {told} | | | {reason} | | | |"
    if found := kept.get(GATHERED_COMMAND):
        planned, step = found["planned"], found["step"]
        yield (
            f"| gather, then product | 8 | | {amount_of_seconds(GATHERED_SECONDS)} | {amount_of_seconds(planned)} | "
            f"{amount_of_seconds(step)} | **{step / GATHERED_SECONDS:.2f}** | | |"
        )


def parts(kept: dict[str, Any]) -> Iterator[str]:
    """Yield a table of the parts of each step's time as shares, and of the largest parts by source line."""
    yield "| step | products | other kernels | slices among them | waiting | waiting for | hidden | largest parts |"
    yield "|:--|--:|--:|--:|--:|:--|--:|:--|"
    for name, found in compiled_rows(kept):
        step, waits = found["step"], sorted(found["waits"].items(), key=lambda wait: -wait[1])[:2]
        lines = sorted(found["lines"].items(), key=lambda line: -line[1])[:3]
        shares = [f"{found[part] / step:.1%}" for part in ("products", "other", "slices", "waiting")]
        told = "; ".join(f"{what} {seconds / step:.1%}" for what, seconds in waits)
        largest = "; ".join(f"{what} {seconds / step:.1%}" for what, seconds in lines)
        # The loop of a pipeline has no line in the model; its source is the command.
        largest = re.sub(rf"`{Path(__file__).name}:\d+`", "the loop over ticks", largest)
        yield f"| {name} | {' | '.join(shares)} | {told} | {found['hidden'] / step:.1%} | {largest} |"


def pipelines(kept: dict[str, Any]) -> Iterator[str]:
    """Yield a table of the FLOPs of pipelines' products, as multiples of the model's FLOPs."""
    yield (
        "| step | stages × rounds | microbatches | bubble | FLOPs of a GPU | of the model | published program | "
        "second forward pass | slots that wait | output in every slot | together |"
    )
    yield f"|:--|:--|{'--:|' * 9}"
    for name, found in compiled_rows(kept):
        row, settings = ROWS[name], ROWS[name].settings
        if settings.sharding.layout != "pipeline":
            continue
        schedule, model = schedule_of(settings), model_flops(settings) / gpus_of(settings)
        again, slots = 4 / 3, 1 / (1 - schedule.bubble)
        output = 1 + (schedule.stages * schedule.rounds - 1) * output_share(settings)
        yield (
            f"| {name} | {schedule.stages} × {schedule.rounds} | {schedule.microbatches} | {schedule.bubble:.1%} | "
            f"{found['flops'] / 1e15:.2f} P | {found['flops'] / model:.2f} | {row.passes / 3:.2f} | {again:.2f} | "
            f"{slots:.2f} | {output:.2f} | {again * slots * output:.2f} |"
        )


def commands(kept: dict[str, Any]) -> Iterator[str]:
    """Yield the commands of all rows."""
    yield "<!-- run never: it needs JAX's plugin for CUDA -->"
    yield "```sh"
    for line in dict.fromkeys(row.command for row in ROWS.values()):
        yield from wrapped("; ".join(name for name, row in ROWS.items() if row.command == line), line)
    yield from wrapped("gather, then product", GATHERED_COMMAND)
    yield "```"


def wrapped(name: str, line: str) -> Iterator[str]:
    """Yield the lines of a command under its name, none wider than the page."""
    yield f"# {name}"
    flags = line.replace(" --", "\n--").split("\n")
    while flags:
        taken = 1
        while len(" ".join(flags[: taken + 1])) < WIDTH - 6 and taken < len(flags):
            taken += 1
        text, flags = " ".join(flags[:taken]), flags[taken:]
        yield ("" if text.startswith("gspmd") else "    ") + text + " \\" * bool(flags)


def compiled_rows(kept: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and figures of the rows that were compiled; rows of the same program appear once."""
    seen = set()
    for name, row in ROWS.items():
        found = kept.get(row.command, {})
        if "step" in found and row.command not in seen:
            seen.add(row.command)
            yield name, found


def gpus_of(settings: offline.CompileSettings) -> int:
    """Return the number of GPUs of a row."""
    return prod(read_name(settings.topology)[1])


def schedule_of(settings: offline.CompileSettings) -> Schedule:
    """Return the schedule of a row's pipeline."""
    sharding = settings.sharding
    return Schedule.of(sharding.schedule, parse_mesh(sharding.mesh)["p"], settings.microbatches, sharding.rounds)


def model_flops(settings: offline.CompileSettings) -> float:
    """Return the FLOPs of a step's products, forward and backward, without recomputation."""
    return settings.batch * settings.length * settings.model.flops_per_token(settings.length)


def output_share(settings: offline.CompileSettings) -> float:
    """Return the share of the model's FLOPs that the product of the logits takes."""
    config = settings.model
    return 6 * config.vocabulary * config.embed / config.flops_per_token(settings.length)


TABLES = {"rows": compared, "parts": parts, "pipelines": pipelines, "commands": commands}

if __name__ == "__main__":
    main()
