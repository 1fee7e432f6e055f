"""Descriptions of GPUs for XLA's compiler, with figures that chips.toml does not have.

The compiler reads the description of a GPU as a text protocol buffer, `stream_executor.GpuTargetConfigProto`. In this
description, the clock, the memory and the name come from chips.toml, and all other figures come from `CARDS`. No GPU is
queried.
"""

from dataclasses import dataclass

from gspmd.hardware.chips import Chip


@dataclass(frozen=True)
class Card:
    """Figures of a GPU that only the compiler needs.

    Attributes:
        capability: compute capability, as (major, minor).
        multiprocessors: number of enabled streaming multiprocessors (SMs).
        lanes: number of float32 units per SM.
        cache_bytes: bytes of the L2 cache.
        shared_bytes: bytes of shared memory per SM. A block of threads may use all but 1 KiB.
    """

    capability: tuple[int, int]
    multiprocessors: int
    lanes: int
    cache_bytes: int
    shared_bytes: int


# Capability, float32 units and shared memory: NVIDIA CUDA C++ Programming Guide, 'Compute capabilities', tables
# 'Arithmetic instructions' and 'Technical specifications per compute capability'. SMs and L2 cache: the whitepapers
# 'NVIDIA A100 Tensor Core GPU Architecture' (108 SMs, 40 MB) and 'NVIDIA H100 Tensor Core GPU Architecture' (SXM5: 132
# SMs, 50 MB; the H200 has the same GPU), and for B200, of which a GB200 has two, the 'NVIDIA Blackwell Tuning Guide'
# (126 MB) and jax-ml's scaling book, part 12 (148 SMs).
_AMPERE = Card((8, 0), 108, 64, 40 * 2**20, 164 * 2**10)
_HOPPER = Card((9, 0), 132, 128, 50 * 2**20, 228 * 2**10)
_BLACKWELL = Card((10, 0), 148, 128, 126 * 2**20, 228 * 2**10)

CARDS = {
    "a100": _AMPERE,
    "a100-40gb": _AMPERE,
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": _BLACKWELL,
    "gb200": _BLACKWELL,
}
"""The GPUs for which programs can be compiled, indexed by their names in chips.toml."""

HOST_GPUS = {"gb200": 4}
"""Number of GPUs per host, for GPUs whose NVLink switch several hosts share. The NVIDIA GB200 NVL72 consists of 18
trays of 4 GPUs."""

# The same for every capability in CARDS (the tables of the Programming Guide named above). The limits of a grid are
# XLA's `block_dim_limit`. A block gets 48 KiB of shared memory unless it asks for more.
_SAME = """
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
"""
# CUDA and cuDNN of the machine that will run the program: the oldest that jax[cuda12] of supported releases installs.
_LIBRARIES = "runtime_version { major: 12 minor: 8 patch: 0 } dnn_version_info { major: 9 minor: 8 patch: 0 }"
CUDNN = 90800
"""The version of cuDNN for which programs are compiled, in cuDNN's own numbering."""


def described(chip: Chip) -> str:
    """Return the compiler's description of a GPU, as the text of a `GpuTargetConfigProto`.

    Args:
        chip: a GPU whose name is in `CARDS`.

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> "cuda_compute_capability { major: 9 minor: 0 }" in described(chip("h100"))
        True
    """
    card, (name, *_) = CARDS[chip.name], chip.device_kinds
    major, minor = card.capability
    return f"""gpu_device_info {{{_SAME}
  name: "{name}" cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {card.multiprocessors} fpus_per_core: {card.lanes} clock_rate_ghz: {chip.clock / 1e9}
  l2_cache_size: {card.cache_bytes} shared_memory_per_core: {card.shared_bytes}
  shared_memory_per_block_optin: {card.shared_bytes - 2**10}
  device_memory_size: {chip.hbm_bytes} memory_bandwidth: {int(chip.hbm_bandwidth)}
}}
platform_name: "CUDA" device_description_str: "{name}" {_LIBRARIES}
"""
