"""An immutable mapping for the numbers in plans; plans are cached, so all callers share one object."""

from typing import Any, NoReturn


class FrozenDict(dict):
    """An immutable, hashable dict. It can be pickled and written as JSON like any dict; `copy()` returns a plain dict.

    Example:
        >>> sizes = FrozenDict(B=8, E=16)
        >>> sizes | {"B": 4}
        {'B': 4, 'E': 16}
        >>> sizes["B"] = 4
        Traceback (most recent call last):
            ...
        TypeError: these figures belong to a cached plan that others share, so they cannot be changed.
          Change a copy: dict(figures) | {...}.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "FrozenDict":
        frozen = super().__new__(cls)
        dict.__init__(frozen, *args, **kwargs)
        return frozen

    def __init__(self, *_: Any, **__: Any):
        """Do nothing: `__new__` has filled the dict, and a second call of `__init__` must not change it."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "these figures belong to a cached plan that others share, so they cannot be changed.\n"
            "  Change a copy: dict(figures) | {...}."
        )

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple:
        return FrozenDict, (dict(self),)
