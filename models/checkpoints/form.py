"""The form of a tensor in a checkpoint, which may merge several dimensions into one and hold several parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: A dimension of a tensor: a letter, merged letters, or parts in sequence, possibly after merged letters.
_GROUP = re.compile(r"\((\w+)\(([\w|]+)\)\)|\((\w+(?:\|\w+)+)\)|\((\w+)\)|(\w)")


@dataclass(frozen=True)
class Form:
    """The form in which a tensor holds a parameter, as described by `Stored.dims`.

    Attributes:
        dims: the letters of the parameter's dimensions, in the order of the tensor.
        split: the sizes of the dimensions `dims`.
        shape: the shape of the whole tensor.
        outer: the shape to which the tensor is reshaped, so that the parameter is a slice of it.
        window: the slice, for each dimension of `outer`, that is the parameter.

    Example:
        >>> form = Form.of("(K(D|D|D))E", 1, {"K": 2, "D": 4, "E": 6})  # the key of every head follows its query
        >>> form.shape, form.view(np.arange(24 * 6))[1, 0, :2].tolist()
        ((24, 6), [96, 97])
    """

    dims: tuple[str, ...]
    split: tuple[int, ...]
    shape: tuple[int, ...]
    outer: tuple[int, ...]
    window: tuple[slice, ...]

    @classmethod
    def of(cls, dims: str, part: int, sizes: Mapping[str, int]) -> Form:
        """Return the form of parameter number `part` in a tensor with the dimensions `dims`.

        Args:
            dims, part: the fields of a `Stored` with these names.
            sizes: the sizes of all letters in `dims`.
        """
        letters: list[str] = []
        shape: list[int] = []
        outer: list[int] = []
        window: list[slice] = []
        for before, inner, parts, merged, single in _GROUP.findall(dims):
            if single == "1":
                shape.append(1)
                continue
            whole, alternatives = before or merged or single, [each for each in (inner or parts).split("|") if each]
            of_whole = [sizes[letter] for letter in whole]
            letters += whole
            outer += of_whole
            window += [slice(0, size) for size in of_whole]
            if alternatives:
                widths = [math.prod(1 if letter == "1" else sizes[letter] for letter in each) for each in alternatives]
                start, total = sum(widths[:part]), sum(widths)
                letters += alternatives[part].replace("1", "")
                outer.append(total)
                window.append(slice(start, start + widths[part]))
            else:
                total = 1
            shape.append(math.prod(of_whole) * total)
        split = tuple(sizes[letter] for letter in letters)
        return cls(tuple(letters), split, tuple(shape), tuple(outer), tuple(window))

    @classmethod
    def whole(cls, sizes: Sequence[int]) -> Form:
        """Return the form of a parameter that is a whole tensor with these sizes."""
        return cls((), tuple(sizes), tuple(sizes), tuple(sizes), tuple(slice(0, size) for size in sizes))

    def rows(self, region: Sequence[slice]) -> tuple[int, int]:
        """Return the range of indices along the tensor's first dimension that covers a region.

        >>> Form.of("X(F|F)E", 1, {"X": 8, "F": 4, "E": 2}).rows((slice(2, 5), slice(0, 4), slice(0, 1)))
        (2, 5)
        """
        first = last = 0
        size, place, plain = 1, 0, True
        for width, part in zip(self.outer, self.window):
            if size == self.shape[0]:
                break
            plain = plain and part == slice(0, width) and self.split[place] == width
            # From the first dimension of which the parameter is only a part, all of it is taken, not only the region.
            start, stop, _ = (region[place] if plain else part).indices(width)
            first, last, size, place = first * width + start, last * width + stop - 1, size * width, place + 1
        return first, last + 1

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """Return the parameter, with shape `split`, as a view of a contiguous tensor."""
        return tensor.reshape(self.outer)[self.window].reshape(self.split)
