"""FLOPs of the matrix products in compiled programs; a product is a dot, a convolution, a kernel or a library call."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

import numpy as np

from gspmd.audit.hlo.module import Computation, Instruction, Module
from gspmd.audit.hlo.text import integers

_PRODUCT = re.compile(r"gemm|matmul|fmha|conv(?!ert)", re.IGNORECASE)
ATTENTION = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}
"""The targets of calls of cuDNN's attention, with the number of matrix products in each call. The backward pass
computes the logits again."""
_MASKS = ("NO_MASK", "CAUSAL")
"""Masks for which the number of (query, key) pairs is known. For a padding mask this number is unknown, because the
lengths are computed values."""
_EXACT = re.compile(r"highest|dot_f32", re.IGNORECASE)
"""A pattern for precision HIGHEST and for algorithms that compute in float32. At precision HIGH, a GPU multiplies in
TF32."""
_WINDOW = re.compile(r"(\w+)=([\d_x\-]+)")


def product_flops(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Return the FLOPs of the matrix products in one execution of an instruction, two for each multiplication.

    Products of two vectors are not counted, because compilers write them as a sum of elementwise products.

    Args:
        module: the program.
        computation: the computation that contains the instruction.
        instruction: any instruction. For a fusion, the products inside the fusion are counted.
    """
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called[0]]
        return sum(product_flops(module, inner, each) for each in inner.instructions)
    if instruction.opcode in ("dot", "scaled-dot"):
        return _dot(computation, instruction, integers(instruction.attribute("lhs_contracting_dims")))
    if instruction.opcode == "convolution":
        return _convolution(computation, instruction)
    if instruction.is_kernel:
        return instruction.kernel_work.flops if instruction.kernel_work else 0
    if instruction.target in ATTENTION:
        return _attention(computation, instruction) if _mask(instruction) in _MASKS else 0
    contracted = _contracted(computation, instruction)
    return 0 if contracted is None else _dot(computation, instruction, contracted)


@dataclass(frozen=True)
class Product:
    """A matrix product [batch, left, contracted] x [batch, contracted, right], and the dtype of its arithmetic.

    Attributes:
        sizes: the sizes of batch, left, contracted and right on one device.
        dtype: the dtype in which a GPU multiplies. For operands in float32 it is `tensorfloat32`, or `float32` if the
            program requests that precision. For operands in float64 it is `float64`, and for all other operands
            `bfloat16`. TPUs have no TF32; `gspmd.audit.simulation.roofline` chooses their dtype.
    """

    sizes: tuple[int, int, int, int]
    dtype: str


def product(module: Module, computation: Computation, instruction: Instruction) -> Product | None:
    """Return the matrix product that a dot, a library call or a fusion computes.

    The result is None for any other instruction, and for a fusion that does not contain exactly one matrix product.

    Args:
        module: the program.
        computation: the computation that contains the instruction.
        instruction: any instruction.

    Source: the JAX documentation, 'Matmul precision', says that GPUs multiply float32 in TF32 by default. That they
    also do so at precision HIGH follows from `GetBlasComputationType` in openxla/xla,
    `stream_executor/gpu/gpu_blas_lt.cc`.
    """
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called[0]]
        found = [each for one in inner.instructions if (each := product(module, inner, one))]
        return found[0] if len(found) == 1 else None
    if instruction.opcode == "dot":
        contracted = integers(instruction.attribute("lhs_contracting_dims"))
        batched = integers(instruction.attribute("lhs_batch_dims"))
        asked = instruction.attribute("operand_precision") + instruction.attribute("algorithm")
    elif instruction.is_kernel or (found_dims := _contracted(computation, instruction)) is None:
        return None
    else:
        contracted, config = found_dims, instruction.config.get("gemm_backend_config", instruction.config)
        numbers, precision = config.get("dot_dimension_numbers", {}), config.get("precision_config", {})
        batched = tuple(int(d) for d in numbers.get("lhs_batch_dimensions", ()))
        asked = " ".join([*precision.get("operand_precision", ()), precision.get("algorithm", "")])
    first = computation.by_name[instruction.operands[0]].arrays[0]
    batch, depth = (prod(first.shape[d] for d in dims) for dims in (batched, contracted))
    left = first.size // max(1, batch * depth)
    right = instruction.arrays[0].size // max(1, batch * left)
    wide = "float32" if _EXACT.search(asked) else "tensorfloat32"
    dtype = {"f32": wide, "f64": "float64"}.get(first.dtype, "bfloat16")
    return Product((batch, left, depth, right), dtype)


def uncounted(module: Module, computation: Computation, instruction: Instruction) -> Iterator[tuple[str, str]]:
    """Yield the (name, target) of each kernel or library call whose FLOPs `product_flops` cannot count.

    Args:
        module: the program.
        computation: the computation that contains the instruction.
        instruction: any instruction. For a fusion, all instructions inside the fusion are examined.
    """
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called[0]]
        for each in inner.instructions:
            yield from uncounted(module, inner, each)
        return
    attends = instruction.target in ATTENTION and _mask(instruction) in _MASKS
    known = attends or _contracted(computation, instruction) is not None
    library = _PRODUCT.search(instruction.target) and not known
    if library or (instruction.is_kernel and not instruction.kernel_work):
        yield instruction.name, instruction.target


def _dot(computation: Computation, dot: Instruction, contracted: tuple[int, ...]) -> int:
    left = computation.by_name[dot.operands[0]].arrays[0]
    return 2 * dot.arrays[0].size * prod(left.shape[d] for d in contracted)


def _attention(computation: Computation, call: Instruction) -> int:
    """Return the FLOPs of cuDNN's attention, with queries [B, L, H, D] and keys [B, T, K, D].

    Pairs of a query and a key that the mask excludes are not counted.
    """
    queries, keyed = (computation.by_name[name].arrays[0].shape for name in call.operands[:2])
    (rows, length, heads, size), keys = queries, keyed[1]
    pairs = sum(min(keys, query + 1) for query in range(length)) if _mask(call) == "CAUSAL" else length * keys
    return 2 * ATTENTION[call.target] * rows * heads * pairs * size


def _mask(call: Instruction) -> str:
    """Return the mask type of cuDNN's attention, or "SLIDING" if the attention has a sliding window."""
    config = call.config.get("cudnn_fmha_backend_config", {})
    return "SLIDING" if config.get("sliding_window_length") else config.get("mask_type", "NO_MASK")


def _contracted(computation: Computation, call: Instruction) -> tuple[int, ...] | None:
    """Return the contracted dimensions of the first operand of a library call.

    The result is None if these dimensions are unknown, or if the call is not a matrix product.
    """
    if call.target == "__onednn$matmul":  # XLA:CPU, rows times columns
        rank = len(computation.by_name[call.operands[0]].arrays[0].shape)
        across = call.config.get("onednn_matmul_config", {}).get("transpose_a", False)
        return (rank - 2 if across else rank - 1,) if rank > across else None
    config = call.config.get("gemm_backend_config", call.config)
    if not _PRODUCT.search(call.target) or "dot_dimension_numbers" not in config:
        return None
    return tuple(int(d) for d in config["dot_dimension_numbers"].get("lhs_contracting_dimensions", ()))


def _convolution(computation: Computation, convolution: Instruction) -> int:
    """Return the FLOPs of a convolution, two for each multiplication by an element inside the input.

    Multiplications by padding are not counted. The TPU compiler writes every dot as a convolution, in which a batch
    dimension becomes a window with only one valid element.
    """
    left, kernel, out = _labels(convolution.attribute("dim_labels"))
    shapes = [computation.by_name[name].arrays[0].shape for name in convolution.operands[:2]]
    shapes.append(convolution.arrays[0].shape)
    window = dict(_WINDOW.findall(convolution.attribute("window")))
    size = lambda which, labels, label: shapes[which][labels.index(label)]  # noqa: E731
    taps = 1
    for number in sorted(set(out) - {"b", "f"}):
        lengths = size(0, left, number), size(1, kernel, number), size(2, out, number)
        taps *= _taps(*lengths, window, int(number))
    return 2 * size(2, out, "b") * size(2, out, "f") * size(1, kernel, "i") * taps


def _labels(text: str) -> tuple[str, str, str]:
    """Return the labels of the input's, the kernel's and the output's dimensions from a text such as `bf_io->bf`."""
    operands, _, out = text.partition("->")
    left, _, kernel = operands.partition("_")
    return left, kernel, out


def _taps(left: int, kernel: int, out: int, window: dict[str, str], number: int) -> int:
    """Return the number of (output position, kernel element) pairs that read an existing input element.

    Args:
        left, kernel, out: the sizes of the input, the kernel and the output along one spatial dimension.
        window: the fields of the HLO attribute `window`, such as `stride` and `pad`, as text.
        number: the number of the spatial dimension.
    """
    part = lambda name, default: window.get(name, "").split("x")[number] if name in window else default  # noqa: E731
    stride, spread, hole = (int(part(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    low = int(str(part("pad", "0_0")).split("_")[0])
    # Output position o and tap k read input element (o * stride + k * hole - low) / spread if that is an integer in
    # the input. For each tap, such positions are `period` apart, between `first` and `last`.
    offset, common = low - np.arange(kernel) * hole, gcd(stride, spread)
    period = spread // common
    phase = offset // common * pow(stride // common, -1, period) % period
    first = np.maximum(0, -(-offset // stride))
    last = np.minimum(out - 1, (offset + (left - 1) * spread) // stride)
    counts = (last - phase) // period - (first - 1 - phase) // period
    return int(np.sum(counts[(offset % common == 0) & (last >= first)]))
