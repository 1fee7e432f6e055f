"""The rows of a batch that a process reads, and the transfer of these rows to the process's devices."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from gspmd.training.toml import ConfigError


def part_of(sharding: Sharding, batch: int) -> tuple[int, int]:
    """Return the smallest part of a batch that has all rows of this process's devices, as (index, number of parts).

    A batch is cut into parts of equal size. Processes whose devices hold the same rows get the same part. The part is
    the whole batch, (0, 1), if the rows are scattered over the batch, or if there is only one process.

    Args:
        sharding: the sharding of a batch, [B, L+1], with L unsharded.
        batch: number of sequences in the batch.
    """
    rows = sharding.addressable_devices_indices_map((batch, 1)).values()
    held = [index[0].indices(batch) for index in rows if index is not None]
    first, last = min(start for start, _, _ in held), max(stop for _, stop, _ in held) - 1
    sizes = (size for size in range(1, batch + 1) if batch % size == 0)
    size = next(size for size in sizes if first // size == last // size)
    return first // size, batch // size


def placer(sharding: Sharding, batch: int, vocabulary: int | None = None) -> Callable[[Any], Any]:
    """Return a function that puts this process's part of a batch onto its devices, as part of a global array.

    The part is the one that `part_of` returns.

    Args:
        sharding: the sharding of the batch, [B, L+1], or of each array of the batch, with L unsharded.
        batch: number of sequences in the batch.
        vocabulary: number of ids that the model has. The returned function raises ConfigError for ids outside of the
            vocabulary, because a compiled program cannot detect them. None for no check.
    """
    part, parts = part_of(sharding, batch)
    first = part * (batch // parts)

    def place(rows: np.ndarray) -> jax.Array:
        rows = np.asarray(rows, np.int32)

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # `index` belongs to a device of this process.
            start, stop, _ = index[0].indices(batch)
            return rows[start - first : stop - first, *index[1:]]

        return jax.make_array_from_callback((batch, *rows.shape[1:]), sharding, shard)

    def checked(rows: np.ndarray | Mapping[str, np.ndarray]) -> Any:
        if vocabulary is not None:
            _check_ids(rows, vocabulary)
        return jax.tree.map(place, rows)

    return checked


def _check_ids(rows: np.ndarray | Mapping[str, np.ndarray], vocabulary: int) -> None:
    """Raise an error if ids are outside of a vocabulary; a token t that is not predicted may be stored as `~t`."""
    arrays = rows if isinstance(rows, Mapping) else {"tokens": rows}
    least = {"tokens": -vocabulary, "source": 0}
    wrong = [
        f"the ids in {name!r} of a batch range from {np.min(arrays[name])} to {np.max(arrays[name])}."
        for name in least
        if name in arrays and not least[name] <= np.min(arrays[name]) <= np.max(arrays[name]) < vocabulary
    ]
    if wrong:
        remedy = (
            f"The model's vocabulary is {vocabulary}: encode the text with its tokenizer, or raise model.vocabulary."
        )
        raise ConfigError("cannot train on these tokens:", [*wrong, remedy])
