"""Which platform a program is being made for, and what is fastest there."""

import jax

from gspmd.annotate.errors import PlanError, shown, suggestion
from gspmd.moe.config import MoEConfig

PICKED = {"cpu": "sort", "gpu": "sort", "tpu": "sort"}
"""What "auto" is: on CPUs measured, on TPUs as their compiler estimates it, on GPUs not tried yet."""
PLATFORMS = tuple(PICKED)


def current_platform() -> str:
    """The platform of the mesh in force, "cpu", "gpu" or "tpu", and without a mesh that of JAX's default devices.

    A mesh of an offline topology answers for the machine that it describes, not for the one that compiles.

    Example:
        >>> current_platform() in PLATFORMS
        True
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = device.platform if device is not None else jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def dispatch_form(config: MoEConfig, platform: str | None = None) -> str:
    """How a config's tokens come to their experts on a platform: what "auto" is there, or what the config says.

    "auto" is the faster of the two forms that have one result. That is "sort" on all platforms: its time is the rows',
    while "onehot" multiplies by zeros, tokens · slots of them, which even a matrix unit notices (docs/moe.md has the
    times). "dropless" has another result, so it is never picked by itself.

    Args:
        config: whose `dispatch` is asked for.
        platform: "cpu", "gpu" or "tpu"; None is the current one.

    Returns:
        "sort", "onehot" or "dropless".

    Raises:
        PlanError: there is no such platform.

    Example:
        >>> dispatch_form(MoEConfig(), "cpu"), dispatch_form(MoEConfig(dispatch="dropless"), "gpu")
        ('sort', 'dropless')
    """
    platform = current_platform() if platform is None else platform
    if not isinstance(platform, str) or platform not in PLATFORMS:
        hint = suggestion(str(platform), PLATFORMS)
        raise PlanError(
            f"cannot say how tokens are dispatched on {shown(platform)}.\n  {hint}Choose from {', '.join(PLATFORMS)}."
        )
    if not isinstance(config, MoEConfig):
        raise PlanError(f"cannot say how tokens are dispatched by {shown(config)}.\n  Pass a gspmd.moe.MoEConfig.")
    return PICKED[platform] if config.dispatch == "auto" else config.dispatch
