"""Console output of a run: a header and tables before the first step; plots, a sample and a summary at the end."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table

from gspmd.display.progress import Progress
from gspmd.display.units import duration
from gspmd.training.reporting import tables
from gspmd.training.reporting.metrics import Metrics, best_validation, read


def header(console: Console, lines: Mapping[str, str]) -> None:
    """Print a panel with a line for each name and its value."""
    grid = Table.grid(padding=(0, 2))
    for name, fact in lines.items():
        grid.add_row(f"[dim]{name}", escape(fact))
    console.print(Panel(grid, title="[bold]gspmd", title_align="left", border_style="dim", expand=False))


def show_tensors(console: Console, title: str, placed: tables.Placed, mesh: Any, dtype: str = "float32") -> None:
    """Print every tensor's spec, and its shape and bytes on one device.

    Args:
        console: the console to print to.
        title: the title of the table.
        placed: the spec and the global shape of every tensor, by its name.
        mesh: the mesh that the specs refer to.
        dtype: the dtype of all tensors except token ids (int32) and logits (float32).
    """
    narrow = jnp.dtype(dtype).itemsize
    itemsize = {name: 4 if name in ("embedding.tokens", "output.logits") else narrow for name in placed}
    console.print(tables.tensors(title, placed, dict(mesh.shape), itemsize))


def finish(
    console: Console, out: Path, name: str, prompt: str, sample: Callable[[], str] | None, metrics: Metrics
) -> None:
    """Draw the plots, and generate, write and print a sample text.

    Args:
        console: the console to print to.
        out: the run's folder.
        name: the name of the run, for the plots.
        prompt: the beginning of the sample text.
        sample: a function that returns the sample text, including the prompt; None for no sample.
        metrics: the metrics, in which the plots and the text are recorded too.
    """
    from gspmd.training.reporting import plots  # Slow to import, and only needed at the end.

    rows = read(out)
    step = rows[-1]["step"]
    with Progress(console, "Drawing the loss curve") as progress:
        plots.loss_curve(rows, out / "loss.png", name)
        metrics.picture(step, "loss curve", out / "loss.png")
        progress.begin("Drawing the load of the experts")
        if plots.expert_load(rows, out / "experts.png", name):
            metrics.picture(step, "expert load", out / "experts.png")
    if sample is not None:
        with Progress(console, "Generating a sample of text"):
            text = sample()
        (out / "sample.txt").write_text(text, encoding="utf-8")
        printable = "".join(mark if mark.isprintable() or mark in "\n\t" else "·" for mark in text.removeprefix(prompt))
        metrics.text(step, "sample", "\n".join(f"    {line}" for line in f"{prompt}{printable}".splitlines()))
        shown = f"[bold]{escape(prompt)}[/]{escape(printable)}"
        console.print(Panel(shown, title="generated text", title_align="left", border_style="dim"))


def closing(console: Console, out: Path, seconds: float, commands: Mapping[str, str]) -> None:
    """Print the summary of a run: time, scores, files, and commands that may come next.

    Args:
        console: the console to print to.
        out: the run's folder.
        seconds: the seconds since this start of the run.
        commands: commands by their purpose; each is printed on a line without a border, so that it can be copied.
    """
    rows = read(out)
    trained = [row for row in rows if row.get("tokens_per_second")]
    facts = {"steps": f"{rows[-1]['step']:,}"}
    if trained:
        facts["steps"] += f", {_mean(trained, 'tokens_per_second'):,.0f} tokens per second on average"
        facts["steps"] += f", {_mean(trained, 'mfu'):.1%} MFU" if trained[-1].get("mfu") else ""
    last, (best, step) = rows[-1].get("val_bits_per_byte"), best_validation(out)
    if last is not None:
        facts["held-out text"] = f"{last:.3f} bits per byte at the end; the best was {best:.3f}, at step {step:,}"
    files = {
        "checkpoints": ["checkpoints"],
        "figures": ["metrics.jsonl", "events"],
        "pictures": ["loss.png", "experts.png"],
    }
    for name, parts in (files | {"text": ["sample.txt"], "profile": ["profile"]}).items():
        if there := [str(out / part) for part in parts if (out / part).exists()]:
            facts[name] = ", ".join(there)
    rule = partial(Rule, align="left", style="dim", characters="─")
    console.print(rule(f"[dim]──[/] [bold green]done[/] in {duration(seconds)}"))
    for name, fact in facts.items():
        console.print(f"  [dim]{name:<14}[/] {escape(fact)}", soft_wrap=True, highlight=False)
    for what, line in commands.items():
        console.print(f"\n  [dim]{what}[/]\n  [bold cyan]{escape(line)}[/]", soft_wrap=True, highlight=False)
    console.print(rule())


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the mean of a rate over steps with equal work, which is the harmonic mean."""
    rates = [row[name] for row in rows if row.get(name)]
    return len(rates) / sum(1 / rate for rate in rates)
