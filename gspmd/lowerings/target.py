"""The devices that a program is being traced for."""

import jax


def device_kind() -> str:
    """Return JAX's name of the devices; empty where the mesh in force has none."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "" if device is None else device.device_kind


def is_tpu() -> bool:
    """Return whether they are TPUs."""
    return device_kind().startswith("TPU")


def is_host() -> bool:
    """Return whether they are host devices: CPU cores, which have no links and no matrix unit."""
    return device_kind() == "cpu"
