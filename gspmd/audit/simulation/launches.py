"""Launches of GPU kernels by the host: each by itself, or several together as a CUDA graph."""

from gspmd.audit.hlo.module import Computation, Instruction
from gspmd.audit.simulation.roofline import runs
from gspmd.hardware.chips import Chip

GRAPH_KERNELS = 5
"""The minimum number of consecutive kernels that XLA records as one CUDA graph, which the host launches as a whole.

Source: XLA's flag `xla_gpu_graph_min_graph_size`. The compiled text does not show graphs. XLA makes them of fusions,
copies, and calls of cuBLAS and cuDNN, but not of collectives or loops (openxla/xla,
command_buffer_conversion_pass.cc).
"""

_CONTROL = ("while", "conditional", "call", "async-start", "send", "recv", "infeed", "outfeed")


def launched(computation: Computation, communicating: frozenset[str], chip: Chip) -> frozenset[str]:
    """Return the names of the kernels with which a launch by the host begins: of one kernel, or of a graph.

    Args:
        computation: instructions in the order of their schedule.
        communicating: names of the instructions that start or run collectives.
        chip: the GPU.
    """
    found: list[str] = []
    row: list[str] = []

    def close() -> None:
        found.extend(row[:1] if len(row) >= GRAPH_KERNELS else row)
        row.clear()

    for instruction in computation.instructions:
        if instruction.name in communicating or _divides_graphs(instruction):
            close()
        elif runs(computation, instruction, chip):
            row.append(instruction.name)
    close()
    return frozenset(found)


def _divides_graphs(instruction: Instruction) -> bool:
    """Return whether an instruction ends a graph, so that kernels before and after it are launched separately."""
    return instruction.opcode in _CONTROL or instruction.opcode.endswith(("-start", "-done"))
