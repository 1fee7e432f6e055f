"""The rules by which compilers merge common subexpressions and move operations out of loops.

XLA calls the passes that do this `HloCSE` and `WhileLoopInvariantCodeMotion`.

Source: programs compiled for host devices with jaxlib 0.10.2 and 0.12.0, and for TPU v4 with the corresponding libtpu
(0.0.42, 0.0.50); tests/tracing checks the rules against all these versions. For GPUs, programs compiled with version
0.10.2 of JAX's plugin for CUDA; tests/audit/offline checks the rules against that version.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax.extend.core import Literal

from gspmd.hardware.chips import Chip
from gspmd.jax_internals import HOST_MERGES_ACROSS_BARRIERS
from gspmd.lowerings.in_force import chip_in_force


@dataclass(frozen=True)
class Compiler:
    """A compiler's treatment of equal values and of loop-invariant values.

    Attributes:
        is_host: whether the compiler compiles for host devices (XLA:CPU). XLA:CPU hoists all loop-invariant operations,
            including conditionals, out of all surrounding loops. Other compilers hoist an operation out of only one
            loop, and only if the operation's results are no larger than its operands. So they never hoist an
            all-gather.
        merges_across_barriers: whether the compiler eliminates common subexpressions (except all-reduces) again after
            it has expanded optimization barriers. XLA:CPU did so up to jaxlib 0.10; no other compiler does.
        reduces_sums: whether the compiler adds partial sums before it reduces them, if only their sum is used. Only
            XLA:GPU does so.
    """

    is_host: bool
    merges_across_barriers: bool = False
    reduces_sums: bool = False

    def hoists(self, equation: Any) -> bool:
        """Return whether the compiler moves a loop-invariant operation out of its loop."""
        return self.is_host or not _inflates_size(equation)


HOST = Compiler(is_host=True, merges_across_barriers=HOST_MERGES_ACROSS_BARRIERS)
GPU = Compiler(is_host=False, reduces_sums=True)
OTHER = Compiler(is_host=False)


def compiler_for(chip: Chip) -> Compiler:
    """Return the compiler for a kind of chip."""
    return GPU if chip.is_switch else OTHER


def compiler_in_use() -> Compiler:
    """Return the compiler for the devices of the current mesh, or for the current chip if the devices are unknown."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        chip = chip_in_force()
        return compiler_for(chip) if chip else OTHER
    return {"cpu": HOST, "gpu": GPU, "cuda": GPU, "rocm": GPU}.get(device.platform, OTHER)


def _inflates_size(equation: Any) -> bool:
    """Return whether the results of an operation have more bytes than its operands.

    Literals have 0 bytes. The answer is also True for an operation that broadcasts a literal, even if other operands
    are large. XLA's option for hoisting such operations is `hoist_size_inflating_ops`.
    """
    arrays = [var.aval for var in equation.invars if not isinstance(var, Literal)]
    results = [var.aval for var in equation.outvars]
    has_literals = len(arrays) < len(equation.invars)
    return sum(map(_bytes, results)) > sum(map(_bytes, arrays)) or (has_literals and any(x.shape for x in results))


def _bytes(aval: Any) -> int:
    return prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0
