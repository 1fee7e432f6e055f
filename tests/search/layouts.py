"""Random picks of a search problem, and the layout that they stand for."""

import random
from pathlib import Path

import numpy as np

from gspmd.layouts import Layout


def layout_of(lines, folder: Path, axes: tuple[str, ...] = ("x", "y", "z")) -> Layout:
    sections: dict[str, list[str]] = {}
    for line in lines:
        part, _, name = line.key.partition(".")
        key = f'"{line.key}"' if line.section else name
        sections.setdefault(line.section or part, []).append(f'{key} = "{line.text}"')
    names = ", ".join(f'"{axis}"' for axis in axes)
    text = "\n".join(f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items())
    file = folder / "found.toml"
    file.write_text(f"[mesh]\naxes = [{names}]\nfactor = [{names}]\n\n{text}\n")
    return Layout.load(file)


def drawn(problem, rng: random.Random) -> dict[str, int]:
    """Random picks of finite cost: vias last, since they hang on all others."""
    while True:
        picks: dict[str, int] = {}
        for choice in sorted(problem.choices, key=lambda choice: choice.name.endswith("_via")):
            allowed = np.ones(len(choice.options), bool)
            for term in problem.terms:
                if choice.name in term.of and {*term.of} <= {*picks, choice.name}:
                    at = tuple(slice(None) if name == choice.name else picks[name] for name in term.of)
                    allowed &= np.isfinite(term.seconds[at])
            if not allowed.any():
                break
            picks[choice.name] = int(rng.choice(np.flatnonzero(allowed).tolist()))
        else:
            return picks
