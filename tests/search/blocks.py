"""Problems to search: random small ones with all their combinations, and one in the shape of a transformer's block."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from gspmd.search import Choice, Problem, Term


@dataclass
class Small:
    """A random problem, all its assignments, and the cost of each by the problem's tables."""

    choices: list[Choice]
    terms: list[Term]
    limit: float | None
    combinations: list[tuple[dict[str, int], float, float]] = field(repr=False)

    def problem(self) -> Problem:
        return Problem(self.choices, self.terms, self.limit)

    def cheapest(self, ok: Callable[[dict[str, int]], bool] = lambda picks: True) -> float:
        """The fewest seconds of all assignments that fit; inf if none fits."""
        fitting = (s for picks, s, b in self.combinations if (self.limit is None or b <= self.limit) and ok(picks))
        return min(fitting, default=math.inf)

    def fewest_bytes(self) -> float:
        return min((held for _, seconds, held in self.combinations if seconds < math.inf), default=math.inf)


@cache
def small(seed: int) -> Small:
    """Return a problem of 3 to 6 choices of 1 to 5 options, with terms over 1 to 4 choices.

    Half of these problems have many equal costs.
    """
    rng = np.random.default_rng(seed)
    choices = [Choice(f"c{number}", tuple(range(rng.integers(1, 6)))) for number in range(rng.integers(3, 7))]
    equal = rng.random() < 0.5
    terms, tables = [], []
    for number in range(rng.integers(1, len(choices) + 4)):
        of = rng.choice(len(choices), rng.integers(1, min(4, len(choices)) + 1), replace=False)
        shape = [len(choices[choice].options) for choice in of]
        true = rng.integers(1, 20, shape) / 4 if equal else 5 * rng.random(shape)
        true[rng.random(shape) < 0.12] = math.inf
        held = None if rng.random() < 0.4 else rng.integers(0, 10, shape) if equal else 10 * rng.random(shape)
        terms.append(Term(f"t{number}", tuple(choices[choice].name for choice in of), true, held))
        tables.append((true, 0 * true.astype(bool) if held is None else held, tuple(of)))
    combinations = []
    for options in itertools.product(*(range(len(choice.options)) for choice in choices)):
        entries = [tuple(options[choice] for choice in of) for *_, of in tables]
        seconds = sum(float(true[entry]) for (true, *_), entry in zip(tables, entries))
        held = math.fsum(float(held[entry]) for (_, held, _), entry in zip(tables, entries))
        combinations.append(({c.name: o for c, o in zip(choices, options)}, seconds, held))
    limit, some = None, [held for _, seconds, held in combinations if seconds < math.inf]
    if some and rng.random() < 0.7:
        limit = float(rng.choice([*np.quantile(some, [0.02, 0.2, 0.5]), min(some), min(some) - 0.1]))
    return Small(choices, terms, limit, combinations)


def knapsack(seed: int, choices: int = 16, options: int = 50) -> tuple[Problem, float]:
    """Return choices that share only the limit, and whose seconds nearly follow from their bytes; and the optimum.

    Bytes are powers of two, or three times those, so that many sums are equal. The optimum is computed
    by a table over all sums.
    """
    rng = np.random.default_rng(seed)
    held = 2 ** rng.integers(0, 9, (choices, options)) * rng.integers(1, 4, (choices, options))
    seconds = (800 - held) * 1e-3 * (1 + 0.3 * rng.random((choices, options)))
    limit = 150 * choices
    least = np.zeros(limit + 1)  # the seconds by the number of bytes that are left
    for each, cost in zip(held, seconds):
        candidates = [np.concatenate([np.full(b, math.inf), least[: limit + 1 - b] + s]) for b, s in zip(each, cost)]
        least = np.min(candidates, axis=0)
    names = [f"c{number}" for number in range(choices)]
    terms = [Term(f"t{name}", (name,), cost, each) for name, cost, each in zip(names, seconds, held)]
    return Problem([Choice(name, tuple(range(options))) for name in names], terms, limit), float(least[-1])


def block(seed: int = 0, layers: int = 5, scale: float = 1.0, fraction: float | None = None) -> Problem:
    """A transformer's block: triangles of the residual, a via and a hidden activation, each with two weights.

    The residual has 106 options, a hidden activation 106 to 240, a via 193 to 1,680, a weight 50 to 1,000 that hold
    bytes. Costs have the magnitude of a planner's: factors of the options, and a part for each combination. A tenth of
    the combinations with a weight are not allowed.

    Args:
        layers: number of hidden activations; there are five choices for each, minus a shared one.
        scale: factor of the numbers of options.
        fraction: place of the limit between the fewest bytes of all terms and the most; None for no limit.
    """
    rng = np.random.default_rng(seed)
    sizes, terms = {"residual": int(106 * scale)}, []

    def cost(*of: str, fail: float = 0.0, held: np.ndarray | None = None) -> None:
        shape = [sizes[choice] for choice in of]
        table = rng.gamma(2.0, 1e-3, shape)
        for axis, size in enumerate(shape):
            table += np.expand_dims(rng.gamma(2.0, 1e-3, size), [other for other in range(len(of)) if other != axis])
        table[rng.random(shape) < fail] = math.inf
        terms.append(Term(" ".join(of), of, table, held))

    cost("residual")
    for layer in range(layers):
        hidden = f"hidden{layer}"
        sizes[hidden] = int(scale * rng.integers(106, 241))
        cost(hidden, held=1e8 * rng.integers(1, 64, sizes[hidden]))
        for way, (left, result) in {"in": ("residual", hidden), "out": (hidden, "residual")}.items():
            via, weight = f"{way}_via{layer}", f"{way}_weight{layer}"
            sizes[via] = int(scale * np.exp(rng.uniform(np.log(193), np.log(1680))))
            sizes[weight] = int(scale * np.exp(rng.uniform(np.log(50), np.log(1000))))
            cost(left, via)
            cost(via, result)
            cost(weight, via, fail=0.1)
            cost(weight, held=16e9 / 2.0 ** rng.integers(0, 9, sizes[weight]))
    limit = None
    if fraction is not None:
        least, most = (sum(pick(t.bytes) for t in terms if t.bytes is not None) for pick in (np.min, np.max))
        limit = float(least + fraction * (most - least))
    return Problem([Choice(name, tuple(range(size))) for name, size in sizes.items()], terms, limit)
