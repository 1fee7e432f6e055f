"""Mappings that nobody can change: plans are kept and handed out again, so no holder may alter what others get."""

from typing import Any, NoReturn


class FrozenDict(dict):
    """A dict that stays as it was made; it can be hashed, pickled, and written as JSON. `copy()` is a plain dict.

    Example:
        >>> sizes = FrozenDict(B=8, E=16)
        >>> sizes | {"B": 4}
        {'B': 4, 'E': 16}
        >>> sizes["B"] = 4
        Traceback (most recent call last):
            ...
        TypeError: these figures belong to a plan that others hold too, and stay as they are.
          Change a copy: dict(figures) | {...}.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "FrozenDict":
        made = super().__new__(cls)
        dict.__init__(made, *args, **kwargs)
        return made

    def __init__(self, *_: Any, **__: Any):
        """Do nothing: it is made by then, and called again it changes nothing."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "these figures belong to a plan that others hold too, and stay as they are.\n"
            "  Change a copy: dict(figures) | {...}."
        )

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple:
        return FrozenDict, (dict(self),)
