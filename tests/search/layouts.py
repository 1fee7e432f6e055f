"""Random picks of a search problem, and the layout of such picks."""

import random
from pathlib import Path

import numpy as np

from gspmd.layouts import Layout
from gspmd.search.finding import NORM


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


def drawn(problem, rng: random.Random, sharded: int | None = None) -> dict[str, int]:
    """Return random picks of finite cost: vias last, since they depend on all others.

    The axes of the norm are the fewest that the others allow; `sharded` is the number of axes that may shard weights.
    """
    while True:
        picks = {NORM: sharded} if sharded is not None else {}
        for choice in sorted(problem.choices, key=lambda choice: choice.name.endswith("_via")):
            if choice.name != NORM:
                possible = np.flatnonzero(allowed(problem, choice, picks)).tolist()
                if not possible:
                    break
                picks[choice.name] = int(rng.choice(possible))
        else:
            for norm in (choice for choice in problem.choices if choice.name == NORM):
                picks[NORM] = int(np.argmax(allowed(problem, norm, picks)))
            return picks


def allowed(problem, choice, picks: dict[str, int]) -> np.ndarray:
    """Return which options have finite cost beside these picks."""
    found = np.ones(len(choice.options), bool)
    for term in problem.terms:
        if choice.name in term.of and {*term.of} <= {*picks, choice.name}:
            at = tuple(slice(None) if name == choice.name else picks[name] for name in term.of)
            found &= np.isfinite(term.seconds[at])
    return found
