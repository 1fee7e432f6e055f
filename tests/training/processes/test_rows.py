"""Rows of a batch that a process reads: those that its devices hold, and few others."""

import jax
import numpy as np
import pytest

from gspmd.training.processes import part_of, placer
from gspmd.training.toml import ConfigError


class Held:
    """A sharding of a batch, of which this process's devices hold these rows."""

    def __init__(self, *rows):
        self._rows = rows

    def addressable_devices_indices_map(self, shape):
        return {device: (rows, slice(None)) for device, rows in enumerate(self._rows)}


@pytest.mark.parametrize(("held", "part"), [
    ([slice(0, 8)], (0, 1)),
    ([slice(None)], (0, 1)),
    ([slice(4, 6), slice(6, 8)], (1, 2)),
    ([slice(2, 4), slice(2, 4)], (1, 4)),
    ([slice(0, 2), slice(4, 6)], (0, 1)),  # spread over the batch
    ([slice(2, 4), slice(4, 6)], (0, 1)),  # no part of equal ones
])  # fmt: skip
def test_a_process_reads_the_smallest_part_that_has_its_rows(held, part):
    assert part_of(Held(*held), 8) == part


@pytest.mark.parametrize("spec", [("x",), (("y", "x"),), (None,)])
def test_a_batch_is_placed_as_its_sharding_says(make_mesh, spec):
    batch = np.arange(8 * 16).reshape(8, 16)
    sharding = jax.NamedSharding(make_mesh({"x": 4, "y": 2}), jax.P(*spec))
    assert part_of(sharding, 8) == (0, 1)
    placed = placer(sharding, 8)(batch)
    assert placed.sharding == sharding
    assert placed.dtype == np.int32
    np.testing.assert_array_equal(placed, batch)


def test_ids_outside_of_the_vocabulary_are_refused_on_the_host(make_mesh):
    """Complements stand for tokens that are not predicted; numbers of segments are no ids."""
    place = placer(jax.NamedSharding(make_mesh({"x": 1}), jax.P()), 2, vocabulary=8)
    place(np.array([[0, 7], [-1, -8]]))
    place({"tokens": np.array([[0, 7]] * 2), "source": np.array([[7]] * 2), "segments": np.array([[9, 9]] * 2)})
    with pytest.raises(ConfigError) as error:
        place({"tokens": np.array([[0, 8], [-9, 1]]), "source": np.array([[-1], [0]])})
    assert str(error.value) == (
        "cannot train on these tokens:\n"
        "  the ids in 'tokens' of a batch range from -9 to 8.\n"
        "  the ids in 'source' of a batch range from -1 to 0.\n"
        "  The model's vocabulary is 8: encode the text with its tokenizer, or raise model.vocabulary."
    )
    with pytest.raises(ConfigError, match="the ids in 'tokens' of a batch range from 3 to 8"):
        place(np.array([[3, 8], [4, 4]]))
