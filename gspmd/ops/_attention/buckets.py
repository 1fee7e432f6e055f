"""T5's buckets of relative positions: one bucket for each short distance, and wider buckets for longer distances."""

from dataclasses import dataclass
from functools import lru_cache
from math import log

import jax
import jax.numpy as jnp
import numpy as np

from gspmd.annotate.errors import PlanError, shown
from gspmd.annotate.validation import whole


@jax.tree_util.register_static
@dataclass(frozen=True)
class Buckets:
    """A division of relative positions into buckets, each with its own bias.

    Half of the buckets hold one distance each. The others hold ranges of distances, which grow by a constant factor up
    to `distance`, and the last bucket also holds all longer distances. With `bidirectional`, half of all buckets are
    for keys up to the query's position, and the other half for keys after the query. Without `bidirectional`, all keys
    after the query are in bucket 0.

    Attributes:
        count: the number of buckets, R. T5 calls it `relative_attention_num_buckets`.
        distance: the distance from which on all keys share a bucket. T5 calls it `relative_attention_max_distance`.
        bidirectional: whether keys after a query have buckets of their own, as in an encoder.

    Raises:
        PlanError: `count` is not a positive multiple of 2 (of 4 with `bidirectional`); or `distance` is not above the
            number of buckets that hold one distance each, or is not below 2^24; or an argument has the wrong type.

    Example:
        >>> Buckets(count=8, distance=16).of(jnp.array([-100, -6, -4, -3, -1, 0, 5])).tolist()
        [7, 5, 4, 3, 1, 0, 0]

    Source: Raffel et al. 2020 (arXiv 1910.10683), section 2.1; `_relative_position_bucket` of the public T5 code.
    """

    count: int = 32
    distance: int = 128
    bidirectional: bool = False

    def __post_init__(self):
        doing = "cannot group relative positions into buckets"
        if not isinstance(self.bidirectional, bool):
            raise PlanError(f"{doing}: bidirectional is {shown(self.bidirectional)}.\n  Pass True or False.")
        least = 4 if self.bidirectional else 2
        if whole(self.count) is None or self.count < least or self.count % least:
            raise PlanError(
                f"{doing}: the number of buckets is {shown(self.count)}.\n  Use a multiple of {least}, such as 32."
            )
        if whole(self.distance) is None or not self.single < self.distance < 2**24:
            raise PlanError(
                f"{doing}: the largest distance is {shown(self.distance)}, and {self.single} buckets hold one distance "
                f"each.\n  Use a whole number above {self.single} and below 2**24, such as 128."
            )

    @property
    def single(self) -> int:
        """The number of buckets in one direction that hold a single distance each."""
        return self.count // (4 if self.bidirectional else 2)

    def of(self, relative: jax.Array) -> jax.Array:
        """Return the bucket of each relative position.

        Args:
            relative: int32 of any shape, the position of a key minus the position of a query.

        Returns:
            int32 of the same shape, in [0, R).
        """
        away = jnp.abs(relative) if self.bidirectional else jnp.maximum(-relative, 0)
        # Distances are compared with constants, because backends round the logarithm of a float32 differently.
        starts = jnp.asarray(_starts(self))
        bucket = jnp.searchsorted(starts, away, side="right", method="compare_all").astype(jnp.int32)
        return bucket + jnp.where(relative > 0, self.count // 2, 0) if self.bidirectional else bucket


@lru_cache(maxsize=64)
def _starts(buckets: Buckets) -> np.ndarray:
    """Return the shortest distance in every bucket of one direction, except in the first bucket."""
    single = buckets.single
    away = np.arange(single, buckets.distance + 1)
    # In float32, as in T5: the rounding decides the bucket of a distance on a border.
    factor = np.log(away.astype(np.float32) / np.float32(single)) / np.float32(log(buckets.distance / single))
    of_away = np.minimum(single + (factor * np.float32(single)).astype(np.int32), 2 * single - 1)
    later = np.searchsorted(of_away, np.arange(single + 1, 2 * single))
    return np.array([*range(1, single + 1), *(away[later])], np.int32)
