"""Compare layouts that `gspmd search` finds with the best preset, both compiled: seconds by part, and bytes.

    python benchmarks/search.py --folder searched --write docs/search-figures.md  # hours: the largest two take one each
    python benchmarks/search.py --folder searched --row palm-64-prefill

Each row runs `gspmd search` with the row's flags in a process of its own, which saves the figures in the folder. Rows
that have figures in the folder are not repeated. The table has the fastest program that was found, and the fastest
program of a preset. Needs the compiler for TPUs, but no TPU.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from page import write_between

from gspmd.display.units import amount_of_bytes, amount_of_seconds, mesh_text

PALM = "--config palm-540b --topology"
ROWS = {
    "palm-16-decode": f"{PALM} tpu-v5p:2x2x4 --phase decode --batch 256 --length 2048 --compile 4",
    "palm-16-prefill": f"{PALM} tpu-v5p:2x2x4 --phase prefill --batch 16 --length 2048 --compile 4",
    "palm-64-decode": f"{PALM} tpu-v4:4x4x4 --phase decode --batch 512 --length 2048 --compile 4",
    "palm-64-prefill": f"{PALM} tpu-v4:4x4x4 --phase prefill --batch 256 --length 2048 --compile 4",
    "palm-256-decode": f"{PALM} tpu-v4:4x8x8 --phase decode --batch 1024 --length 2048 --compile 4",
    "palm-256-prefill": f"{PALM} tpu-v4:4x8x8 --phase prefill --batch 512 --length 2048 --compile 4",
    "palm-62b": "--config palm-62b --topology tpu-v4:8x8x8 --batch 512 --length 2048 --compile 1",
    "llama-2-70b": "--config llama-2-70b --topology tpu-v5p:4x8x8 --batch 1024 --length 4096 --compile 4",
    "llama-3.1-405b": "--config llama-3.1-405b --topology tpu-v5p:4x8x8 --batch 512 --length 8192 --microbatches 2 "
    "--compile 1",
    "mixtral": "--config mixtral-8x7b --topology tpu-v6e:16x16 --batch 3072 --length 4096 --microbatches 2 "
    "--compiler-options xla_tpu_scoped_vmem_limit_kib=81920 --compile 1",
    "switch-c": "--config switch-c --topology tpu-v5p:8x8x16 --batch 1024 --length 512 --compile 4",
    "gshard-600b": "--config gshard-600b --topology tpu-v5p:8x8x16 --batch 4096 --length 1024 --compile 4",
}
"""Flags of `gspmd search`. PaLM 540B in bfloat16 takes 67 GB on each of 16 chips, so these rows use v5p; a v4 has 31
GB."""
MARKS = "<!-- rows: python benchmarks/search.py -->", "<!-- end of rows -->"


def main() -> None:
    """Search and compile the chosen rows, print the table, and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", choices=ROWS, nargs="+", default=list(ROWS), help="default: all")
    parser.add_argument("--folder", type=Path, required=True, help="where figures are kept, and taken from")
    parser.add_argument("--write", type=Path, help="replace the table in a page")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    table = "\n".join(rows({name: measured(name, options.folder) for name in options.row}))
    print(table)
    if options.write:
        write_between(options.write, MARKS, table)


def measured(name: str, folder: Path) -> dict[str, Any]:
    """Return the figures of a row; if they are not in the folder, search and compile the row."""
    kept = folder / f"{name}.json"
    if not kept.exists():
        fresh = kept.with_suffix(".part")
        flags = ["--out", str(kept.with_suffix(".toml")), "--json", str(fresh)]
        subprocess.run([sys.executable, "-m", "gspmd", "search", *shlex.split(ROWS[name]), *flags], check=True)
        fresh.rename(kept)
    return json.loads(kept.read_text())


def rows(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table with two rows for each step: the fastest program that was found, and the fastest of a preset."""
    yield "| step | layout | planned | compiled | of the preset | products | other | copies | waiting | memory |"
    yield f"|:--|:--|{'--:|' * 8}"
    for name, figures in found.items():
        fastest = {each["preset"]: each for each in reversed(figures["compiled"])}
        preset = fastest[True]["seconds"] if True in fastest else None
        for number, each in enumerate(fastest[which] for which in (False, True) if which in fastest):
            ours = {other["name"] for other in figures["compiled"] if not other["preset"] and not _improves(other)}
            what = ", ".join(_named(each, len(ours)))
            yield f"| {name if not number else ''} | {what} | {' | '.join(_figures(each, preset))} |"


def _named(each: Mapping[str, Any], count: int) -> Iterator[str]:
    chosen = count > 1 and not each["preset"] and not _improves(each)
    yield f"the fastest of {count} found" if chosen else each["name"]
    yield mesh_text(each["mesh"], trivial=False)
    if each["remat"]:
        yield f"remat {each['remat']}"
    if each.get("microbatches", 1) > 1:
        yield f"{each['microbatches']} microbatches"
    if each.get("lowering", "blocking") != "blocking":
        yield f"lowering {each['lowering']}"


def _improves(each: Mapping[str, Any]) -> bool:
    """Return whether a layout is a preset with changed lines: `zero-3, with ffn.w_in E_xyF`."""
    return ", with " in each["name"]


def _figures(each: Mapping[str, Any], preset: float | None) -> Iterator[str]:
    yield amount_of_seconds(each["planned_seconds"])
    if not each["seconds"]:
        yield "does not fit"
        yield from [""] * 5
    else:
        yield amount_of_seconds(each["seconds"])
        yield f"**{each['seconds'] / preset:.3f}**" if preset and not each["preset"] else ""
        spent = dict(each["spent"])
        shares = [spent.pop(kind, 0.0) for kind in ("einsum", "other", "copy")]
        yield from (f"{seconds / each['seconds']:.0%}" for seconds in [*shares, sum(spent.values())])
    yield amount_of_bytes(each["bytes"])


if __name__ == "__main__":
    main()
