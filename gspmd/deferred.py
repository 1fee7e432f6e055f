"""Deferred imports: the names of a package are imported at their first use, so that the package itself loads fast.

A command reads its flags before JAX starts, but the classes of its settings are in packages whose other modules need
JAX.
"""

import sys
from collections.abc import Callable, Mapping
from importlib.util import resolve_name
from typing import Any


def deferred(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package whose names are imported at their first use.

    For type checkers the package imports the same names under `TYPE_CHECKING`.

    Args:
        package: the `__name__` of the package.
        homes: maps each module, by its name relative to the package, to the names that it defines, separated by spaces.
    """
    module_of = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        this = sys.modules[package]
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=this)
        # `fromlist` makes this `from module import name`, which also finds a submodule of that name.
        value = getattr(__import__(resolve_name(module_of[name], package), fromlist=[name]), name)
        setattr(this, name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *module_of})
