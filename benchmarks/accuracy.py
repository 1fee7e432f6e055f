"""Collect every published figure that has a prediction, and write them as one table, docs/accuracy.md.

    python benchmarks/accuracy.py            # print the tables
    python benchmarks/accuracy.py --write    # and write them into the page

Nothing is compiled here. docs/palm.md, docs/mfu.md, docs/gpus.md, docs/plans.md and docs/accuracy.md have tables that
other benchmarks renew. This script reads the figures from these tables, so that no figure is written twice by hand.
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

from page import write_between

DOCS = Path(__file__).parents[1] / "docs"
MARKS = {
    name: (f"<!-- {name}: python benchmarks/accuracy.py -->", f"<!-- end of {name} -->") for name in ("kinds", "rows")
}
NEAR = 0.15
"""A prediction counts as near if its ratio differs from 1 by at most this number."""


class Row(NamedTuple):
    """One published figure.

    Attributes:
        kind: the kind of step, and the hardware.
        name: the model, or the program.
        machine: the number and the kind of chips.
        published, predicted: the two figures, as the page shows them.
        ratio: predicted seconds over published seconds; for memory, predicted tokens over published tokens.
        page: the page that has the table, with the anchor of the table.
    """

    kind: str
    name: str
    machine: str
    published: str
    predicted: str
    ratio: float
    page: str


def rows() -> list[Row]:
    """Return all rows, kind by kind."""
    return [*_training(), *_gpus(), *_measured(), *_palm(), *_v5e(), *_llama(), *_one_chip(), *_contexts(), *_tpu7x()]


def _training() -> Iterator[Row]:
    for cells in _table("mfu.md", "## Predicted and published"):
        rate, wanted = cells["tokens/s per chip"], cells["published"]
        ratio = _number(wanted) / _number(rate)
        chip = cells["step"].rpartition("-")[2]
        yield Row(
            "training, TPU", cells["step"].rpartition("-")[0], f"{cells['chips']} {chip}", f"{wanted} tokens/s a chip",
            f"{rate} tokens/s a chip", ratio, "mfu.md#predicted-and-published",
        )  # fmt: skip


def _gpus() -> Iterator[Row]:
    for cells in _table("gpus.md", "## Published and predicted"):
        if not re.fullmatch(r"[\d.]+", cells["compiled / published"]):
            continue  # It is not supported, or published in another dtype.
        kind = "products, GPU" if "product" in cells["step"] else "training, GPU"
        card = "H100" if "llama" in cells["step"] or "product" in cells["step"] else "A100"
        yield Row(
            kind, cells["step"], f"{cells['GPUs']} {card}", cells["as seconds"], cells["compiled"],
            float(cells["compiled / published"]), "gpus.md#published-and-predicted",
        )  # fmt: skip


def _measured() -> Iterator[Row]:
    for kind, model in (("training", ""), ("decoding", "llama-3.1-8b, ")):
        for cells in _table("gpus.md", f"<!-- {kind}: python benchmarks/gpu.py --steps -->"):
            ratio, seconds = float(cells["simulated / measured"]), (cells["measured"], cells["simulated"])
            name, page = model + cells["step"], "gpus.md#simulated-and-measured"
            yield Row(f"{kind}, one H200, measured by us", name, "1 H200", *seconds, ratio, page)


def _palm() -> Iterator[Row]:
    for cells in _table("palm.md", "## Latency and MFU"):
        name, layout = cells["row"].partition(",")[::2]
        if "the paper's" not in layout:
            continue
        kind = "prompts, TPU" if name.startswith("prefill") else "decoding, TPU"
        yield Row(
            kind, f"PaLM 540B, {name}", "64 v4", f"{cells['paper']} s", f"{cells['seconds']} s",
            _number(cells["seconds"]) / _number(cells["paper"]), "palm.md#latency-and-mfu-table-2",
        )  # fmt: skip


def _v5e() -> Iterator[Row]:
    for cells in _table("palm.md", "## Published figures of TPU v5e"):
        name = f"{cells['model']}, {cells['precision']}, {cells['rows']} rows"
        wanted, found = cells["published"], cells["tokens/s, predicted"]
        yield Row(
            "decoding, TPU", name, "8 v5e", f"{wanted} tokens/s", f"{found} tokens/s", _number(wanted) / _number(found),
            "palm.md#published-figures-of-tpu-v5e",
        )  # fmt: skip


def _llama() -> Iterator[Row]:
    for cells in _table("palm.md", "### Llama 3.1 70B in int8 on 16 v5e"):
        name = f"Llama 3.1 70B, int8, {cells['rows']} rows, {cells['mesh']}"
        yield Row(
            "decoding, TPU", name, "16 v5e", cells["published"], cells["`--model.no-stacked`"],
            float(cells["of published"]), "palm.md#llama-31-70b-in-int8-on-16-v5e",
        )  # fmt: skip


def _one_chip() -> Iterator[Row]:
    for cells in _table("accuracy.md", "### Whole steps"):
        kind = "prompts" if cells["step"].endswith("prompt") else "decoding"
        yield Row(
            f"{kind}, one {cells['chip']}", cells["step"], f"1 {cells['chip']}", cells["published"],
            cells["predicted"], float(cells["of published"]), "accuracy.md#kernels-timed-on-a-tpu",
        )  # fmt: skip


def _contexts() -> Iterator[Row]:
    for cells in _table("palm.md", "## The longest context"):
        wanted, found = cells["paper"], cells["longest context"]
        yield Row(
            "memory, TPU", f"PaLM 540B, {cells['attention']}, {cells['batch']} rows", "64 v4", f"{wanted} tokens",
            f"{found} tokens", _number(found) / _number(wanted), "palm.md#the-longest-context-table-1",
        )  # fmt: skip


def _tpu7x() -> Iterator[Row]:
    for cells in _table("plans.md", "<!-- microbenchmarks: python benchmarks/microbenchmarks.py -->"):
        kind = "products, TPU7x" if cells["program"].startswith("product") else "gathers, TPU7x"
        yield Row(
            kind, cells["program"], "4 TPU7x", cells["published"], cells["compiled"],
            float(cells["compiled / published"]), "plans.md#seconds",
        )  # fmt: skip


def _table(page: str, after: str) -> Iterator[Mapping[str, str]]:
    """Yield the rows of the first table after a line, as mappings by column.

    If columns share a name, the first of these columns is used.
    """
    lines = (DOCS / page).read_text().partition(after)[2].splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("|"))
    names = _cells(lines[begin])
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            return
        yield dict(reversed([*zip(names, _cells(line))]))


def _cells(line: str) -> list[str]:
    return [cell.strip().strip("*") for cell in line.strip().strip("|").split("|")]


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def kinds(found: list[Row]) -> Iterator[str]:
    """Yield the lines of the table of kinds: the number of rows, and the median and the range of their ratios."""
    yield "| kind | rows | median | lowest | highest | within 15% |"
    yield "|:--|--:|--:|--:|--:|--:|"
    for kind in dict.fromkeys(row.kind for row in found):
        ratios = sorted(row.ratio for row in found if row.kind == kind)
        near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
        yield (
            f"| {kind} | {len(ratios)} | **{median(ratios):.2f}** | {ratios[0]:.2f} | {ratios[-1]:.2f} "
            f"| {near} of {len(ratios)} |"
        )


def table(found: list[Row]) -> Iterator[str]:
    """Yield the lines of the table of all rows."""
    yield "| kind | what | machine | published | predicted | predicted / published | page |"
    yield "|:--|:--|:--|--:|--:|--:|:--|"
    for row in found:
        link = f"[{row.page.partition('.')[0]}]({row.page})"
        yield (
            f"| {row.kind} | {row.name} | {row.machine} | {row.published} | {row.predicted} "
            f"| **{row.ratio:.2f}** | {link} |"
        )


def main() -> None:
    """Print the tables, and write them into the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write them into docs/accuracy.md")
    chosen, found = parser.parse_args(), rows()
    for name, lines in (("kinds", kinds(found)), ("rows", table(found))):
        text = "\n".join(lines)
        print(text)
        if chosen.write:
            write_between(DOCS / "accuracy.md", MARKS[name], text)


if __name__ == "__main__":
    main()
