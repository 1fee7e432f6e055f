"""What compilers leave of a program's collectives: which they merge, and which they take out of a loop.

Source: programs compiled with jax 0.10.2 for host devices and, with libtpu 0.0.42, for TPU v4; tests/collectives hold
both to it. In XLA's words: common subexpressions (`HloCSE`) and code motion (`WhileLoopInvariantCodeMotion`).
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax.extend.core import Literal


@dataclass(frozen=True)
class Compiler:
    """How a compiler treats values that are the same, or the same in every trip of a loop.

    Attributes:
        is_host: whether it is that of host devices. It takes out of all loops around it whatever does not change in
            them, branches included, and after dropping optimization barriers merges what is equal once more, but for
            all-reduces. Any other takes an operation out of one loop, and only if what that makes is no larger than
            what goes in (so no all-gather); what stands behind a barrier it never merges.
    """

    is_host: bool

    def leaves(self, equation: Any) -> bool:
        """Whether an operation is taken out of a loop in which its operands do not change."""
        return self.is_host or not _grows(equation)


HOST, OTHER = Compiler(True), Compiler(False)


def compiler() -> Compiler:
    """That of the devices in force."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return HOST if device is not None and device.device_kind == "cpu" else OTHER


def _grows(equation: Any) -> bool:
    """Whether an operation makes more bytes than go into it, as broadcasting a literal does."""
    arrays = [var.aval for var in equation.invars if not isinstance(var, Literal)]
    made, taken = (sum(map(_bytes, side)) for side in ([var.aval for var in equation.outvars], arrays))
    return made > taken or (len(arrays) < len(equation.invars) and any(var.aval.shape for var in equation.outvars))


def _bytes(aval: Any) -> int:
    return prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0
