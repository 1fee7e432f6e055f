"""Launches of GPU kernels by the host, one kernel at a time or several kernels together as a CUDA graph."""

from gspmd.audit.hlo.module import Computation, Instruction
from gspmd.audit.simulation.roofline import runs
from gspmd.hardware.chips import Chip

GRAPH_KERNELS = 5
"""The minimum number of consecutive kernels that XLA records as one CUDA graph; the host launches a graph as a whole.

The text of a compiled program does not show graphs. XLA makes graphs of fusions, copies, and calls of cuBLAS and cuDNN,
but not of collectives or loops.

Source: XLA's flag `xla_gpu_graph_min_graph_size`; openxla/xla, command_buffer_conversion_pass.cc.
"""

_CONTROL = ("while", "conditional", "call", "async-start", "send", "recv", "infeed", "outfeed")


def launched(computation: Computation, communicating: frozenset[str], chip: Chip) -> frozenset[str]:
    """Return the names of the kernels that begin a launch by the host.

    A launch is a single kernel or a CUDA graph; the launch of a graph begins with the first kernel of the graph.

    Args:
        computation: the computation, with its instructions in scheduled order.
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
    """Return whether an instruction ends a CUDA graph, so that kernels before and after it are launched separately."""
    return instruction.opcode in _CONTROL or instruction.opcode.endswith(("-start", "-done"))
