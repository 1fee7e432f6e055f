"""The platform of a program, and choices that depend on it."""

import jax

BLOCKS = (256, 64)
"""The sizes of blocks on CPUs: an expert's rows are cut into blocks of 256 rows, and the remainder into blocks of 64.

Every product reads all weights of its expert, so blocks should be large. Rows that are computed beyond an expert's last
row are wasted, so the last blocks should be small. On two CPU cores, blocks of 256 and 64 rows took 1.1 to 1.25 times
as long as one dense product of all rows; blocks of 128 rows alone took 1.3 to 2 times as long.
"""


def current_platform() -> str:
    """Return the platform, "cpu", "gpu" or "tpu", of the mesh in force or, without a mesh, of JAX's default devices.

    The mesh of an offline topology has the platform of the machine that the topology describes, which may differ from
    the machine that compiles.

    Example:
        >>> current_platform() in ("cpu", "gpu", "tpu")
        True
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = device.platform if device is not None else jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def grouped_form() -> str:
    """Return the fastest form of a grouped product: "ragged" on TPUs, and "blocks" where `lax.ragged_dot` is dense.

    On CPUs and GPUs, `lax.ragged_dot` multiplies every row by every expert's weights. On an H200, it takes 7.5 times as
    long as a dense product of the rows with 8 experts, and 61 times as long with 64 experts. In blocks, the product
    takes 3.7 times as long with 8 experts, and 5.4 times as long with 64 experts (docs/gpus.md).
    """
    return "ragged" if current_platform() == "tpu" else "blocks"
