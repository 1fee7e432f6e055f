"""The ledger of every preset's training step as text to review: tests/golden/PRESET.txt.

    python -m tests.audit.golden                  # rewrite all of them
    python -m tests.audit.golden zero-3 gshard    # or some

The text has no file names and no line numbers, since code may move. It names no release of JAX either: planned programs
send the same with every supported one.
"""

import difflib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from gspmd import host
from gspmd.audit import Entry, Ledger
from gspmd.layouts import presets
from tests.audit import steps

GOLDEN = Path(__file__).parents[1] / "golden"
REWRITE = "python -m tests.audit.golden"


def text(ledger: Ledger) -> str:
    """Return a ledger as sorted lines, one for equal collectives; the totals last."""
    return "\n".join([*header(ledger), *lines(ledger.entries), *totals(ledger)]) + "\n"


def header(ledger: Ledger) -> Iterator[str]:
    """Yield the heading, which names the step of the figures."""
    mesh = " ".join(f"{axis}={size}" for axis, size in ledger.mesh.items())
    yield f"# mesh {mesh}; {model()}"
    yield f"# One training step, lowering blocking, float32: what one device sends. Rewritten by `{REWRITE}`."
    yield _line("kind", "axes", "dtype", "count", "bytes", "asked for by")


def model() -> str:
    """Return the sizes of the model."""
    sizes = steps.SMALL.sizes(steps.BATCH, steps.LENGTH)
    sizes = {**{letter: size for letter, size in sizes.items() if letter != "N"}, "N": steps.SMALL.layers}
    return f"model {' '.join(f'{letter}={size}' for letter, size in sizes.items())}"


def lines(entries: Sequence[Entry]) -> list[str]:
    """Return a line for each kind, axes, dtype, equation and step."""
    counts, sent = Counter(), Counter()
    for entry in entries:
        together = f"{entry.arrays} arrays in each: " if entry.arrays > 1 else ""
        asked = f"{together}{' '.join(filter(None, (entry.equation, entry.step))) or 'the compiler'}"
        key = entry.kind, ",".join(entry.axes), entry.dtype, asked
        counts[key] += entry.count
        sent[key] += entry.wire_bytes
    return [_line(*key[:3], counts[key], sent[key], key[3]) for key in sorted(counts)]


def totals(ledger: Ledger) -> Iterator[str]:
    """Yield the bytes by kind and axes, all bytes, and the FLOPs."""
    yield ""
    for (kind, axes), (count, sent) in ledger.by_kind_and_axes().items():
        yield _line(kind, ",".join(axes), "", count, sent, "in all, every array counted").rstrip()
    yield _line("all", "", "", sum(entry.count for entry in ledger.entries), ledger.wire_bytes, "").rstrip()
    yield f"{ledger.flops} FLOP in matrix products"


def _line(kind: str, axes: str, dtype: str, count: int | str, sent: int | str, asked: str) -> str:
    return f"{kind:<18} {axes:<6} {dtype:<5} {count:>5} {sent:>8}  {asked}"


def path(preset: str) -> Path:
    """Return the path of a preset's golden ledger."""
    return GOLDEN / f"{preset}.txt"


def difference(preset: str, ledger: Ledger) -> str:
    """Return a unified diff from the golden ledger to this one, with a remedy; empty if they are equal."""
    old, new = path(preset).read_text().splitlines(), text(ledger).splitlines()
    diff = list(difflib.unified_diff(old, new, f"tests/golden/{preset}.txt", "as compiled now", n=1, lineterm=""))
    if not diff:
        return ""
    told = f"What a training step of {preset} sends has changed. If that is meant, rewrite with:\n\n    {REWRITE}\n"
    return "\n".join([told, *diff])


def main(names: Sequence[str]) -> None:
    """Write the golden ledgers of these presets, or of all."""
    host.use_host_devices(8)
    jax.config.update("jax_platforms", "cpu")
    GOLDEN.mkdir(exist_ok=True)
    for name in names or presets():
        path(name).write_text(text(steps.training(name).ledger))
        print(f"tests/golden/{name}.txt")


if __name__ == "__main__":
    main(sys.argv[1:])
