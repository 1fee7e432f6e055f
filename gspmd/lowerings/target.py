"""The devices that a program is being traced for."""

import jax


def device_kind() -> str:
    """What JAX calls them; empty where the mesh in force is of no devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "" if device is None else device.device_kind


def is_tpu() -> bool:
    """Whether they are TPUs."""
    return device_kind().startswith("TPU")


def is_host() -> bool:
    """Whether they are host devices: CPU cores, which have no links and no matrix unit."""
    return device_kind() == "cpu"
