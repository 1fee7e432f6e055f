"""The notation: specs, equations, and the calls that place arrays by them.

This package can be called like the public function of the same name: `gspmd.annotate(x, "BLE_x")` places an array.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gspmd.annotate.equation import Equation, Operand, Term, Via, parse_equation, parse_via
from gspmd.annotate.errors import Fault, LayoutError, PlanError, SpecError, report
from gspmd.annotate.parser import OPEN
from gspmd.annotate.spec import Spec
from gspmd.annotate.validation import mesh_sizes

if TYPE_CHECKING:
    from gspmd.annotate.annotation import annotate, spec_of
    from gspmd.annotate.gshard import mesh_split, replicate, shard, split

__all__ = [
    "OPEN", "Equation", "Fault", "LayoutError", "Operand", "PlanError", "Spec", "SpecError", "Term", "Via", "annotate",
    "mesh_sizes", "mesh_split", "parse_equation", "parse_via", "replicate", "report", "shard", "spec_of", "split",
]  # fmt: skip


# These import JAX, which specs and equations do not need.
_HOMES = dict.fromkeys(("annotate", "spec_of"), "annotation")
_HOMES |= dict.fromkeys(("mesh_split", "replicate", "shard", "split"), "gshard")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _CallablePackage(ModuleType):
    """A package that can be called like its function `annotate`.

    The package and the function have the same name, `gspmd.annotate`, and neither may hide the other.
    """

    def __call__(self, x: Any, spec: str | Spec) -> Any:
        """Place an array on the mesh of `jax.set_mesh` as its spec says; see `gspmd.annotate.annotate`."""
        return self.annotate(x, spec)

    def __reduce__(self) -> tuple:
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _CallablePackage
