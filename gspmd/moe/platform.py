"""Which platform a program is being made for."""

import jax


def current_platform() -> str:
    """The platform of the mesh in force, "cpu", "gpu" or "tpu", and without a mesh that of JAX's default devices.

    A mesh of an offline topology answers for the machine that it describes, not for the one that compiles.

    Example:
        >>> current_platform() in ("cpu", "gpu", "tpu")
        True
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = device.platform if device is not None else jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name
