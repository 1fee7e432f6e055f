"""Names of a package that are imported when they are asked for, so that importing the package takes no time.

Settings are in packages with much that needs JAX, and a command reads its flags before JAX starts.
"""

import sys
from collections.abc import Callable, Mapping
from importlib.util import resolve_name
from typing import Any


def deferred(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose names are imported at their first use.

    For type checkers the package imports the same names under `TYPE_CHECKING`.

    Args:
        package: its `__name__`.
        homes: modules, relative to the package, and the names that each has, with spaces between them.
    """
    module_of = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        this = sys.modules[package]
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=this)
        # As `from module import name` does, so that a name may be a module too.
        value = getattr(__import__(resolve_name(module_of[name], package), fromlist=[name]), name)
        setattr(this, name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *module_of})
