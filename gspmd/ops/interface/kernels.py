"""The work of a Pallas kernel, written into the named scope in which the kernel is called.

HLO shows neither the matrix products of a kernel nor the kernel's estimated cycles, so the scope states its work:

kernel[flops=1099511627776 bytes=402653184 steps=4096 blocks=2560 rows=1024]
"""

import re
from dataclasses import asdict, dataclass
from typing import Any

import jax

_SCOPE = re.compile(r"kernel\[((?:\w+=\d+ ?)+)\]")


@dataclass(frozen=True)
class KernelWork:
    """The work of a kernel in one run on one device.

    Attributes:
        flops: number of floating-point operations in the kernel's matrix products, two per multiplication, including
            padding and masked parts.
        bytes: number of bytes that the kernel reads from main memory and writes to main memory.
        steps: number of steps of the kernel's grid.
        blocks: number of steps with matrix products; the other steps are skipped.
        rows: number of steps that begin a sum; the same number of steps write a sum.
    """

    flops: int
    bytes: int
    steps: int
    blocks: int
    rows: int

    def scope(self) -> Any:
        """Return the named scope that states this work; this kernel, and no other kernel, must be called in it."""
        return jax.named_scope(f"kernel[{' '.join(f'{name}={value}' for name, value in asdict(self).items())}]")


def kernel_work(scopes: str) -> KernelWork | None:
    """Return the work of the kernel that an instruction calls.

    `scopes` are the instruction's named scopes. The work is None if no scope states it. If several scopes state work,
    the innermost one counts.

    >>> kernel_work("jit(f)/kernel[flops=8 bytes=4 steps=2 blocks=1 rows=1]/vmap(splash_mha_fwd)/pallas_call").flops
    8
    """
    found = _SCOPE.findall(scopes)
    return KernelWork(**{k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", found[-1])}) if found else None
