"""Console output of a run: header, tables before the first step, plots and a text sample at the end."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from gspmd.training.reporting import metrics, plots, tables


def header(console: Console, lines: Mapping[str, str]) -> None:
    """Print a panel of names and values."""
    grid = Table.grid(padding=(0, 2))
    for name, fact in lines.items():
        grid.add_row(f"[dim]{name}", escape(fact))
    console.print(Panel(grid, title="[bold]gspmd", title_align="left", border_style="dim", expand=False))


def show_tensors(console: Console, title: str, placed: tables.Placed, mesh: Any, dtype: str = "float32") -> None:
    """Print every tensor's spec, and its shape and bytes on one device.

    Args:
        console: where to print.
        title: what the tensors are.
        placed: a spec and a global shape by name.
        mesh: their mesh.
        dtype: of all but token ids (int32) and logits (float32).
    """
    narrow = jnp.dtype(dtype).itemsize
    itemsize = {name: 4 if name in ("embedding.tokens", "output.logits") else narrow for name in placed}
    console.print(tables.tensors(title, placed, dict(mesh.shape), itemsize))


def finish(console: Console, out: Path, name: str, prompt: str, sample: Callable[[], str] | None) -> None:
    """Draw the plots, and write and print generated text.

    Args:
        console: where to print.
        out: the run's folder.
        name: of the run, for the plots.
        prompt: the beginning of the text.
        sample: generates the text, prompt included; None for no sample.
    """
    rows = metrics.read(out)
    drawn = [out / "loss.png"]
    plots.loss_curve(rows, drawn[0], name)
    if plots.expert_load(rows, out / "experts.png", name):
        drawn.append(out / "experts.png")
    console.print("Drawn: " + ", ".join(map(str, drawn)))
    if sample is not None:
        text = sample()
        (out / "sample.txt").write_text(text, encoding="utf-8")
        printable = "".join(mark if mark.isprintable() or mark in "\n\t" else "·" for mark in text.removeprefix(prompt))
        shown = f"[bold]{escape(prompt)}[/]{escape(printable)}"
        console.print(Panel(shown, title="generated text", title_align="left", border_style="dim"))
