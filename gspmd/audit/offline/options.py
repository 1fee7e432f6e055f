"""A check of compiler options, which runs before the work that takes long."""

from collections.abc import Mapping
from typing import Any

import jax

from gspmd.annotate.errors import PlanError, shown


def check_compiler_options(options: Mapping[str, Any], device: "jax.Device | None" = None) -> None:
    """Check, by compiling a trivial program, that the compiler knows the options and can read their values.

    Args:
        options: a mapping from names to values, as for `jax.jit`, such as `{"xla_tpu_scoped_vmem_limit_kib": 81920}`.
        device: the device to compile for; by default JAX's first device.

    Raises:
        PlanError: the compiler for the device's platform does not know an option, or cannot read the option's value; or
            an argument has the wrong type.

    Example:
        >>> check_compiler_options({"xla_cpu_enable_fast_math": "perhaps"}, jax.devices("cpu")[0])
        Traceback (most recent call last):
        gspmd.PlanError: cannot compile with xla_cpu_enable_fast_math=perhaps on cpu.
          The compiler says: While setting option xla_cpu_enable_fast_math, 'perhaps' is not a valid bool value.
    """
    if not (isinstance(options, Mapping) and all(isinstance(name, str) for name in options)):
        raise PlanError(
            f"cannot compile with options {shown(options)}.\n"
            "  Give names and values, as in {'xla_tpu_scoped_vmem_limit_kib': 81920}."
        )
    if not (device is None or isinstance(device, jax.Device)):
        raise PlanError(f"cannot compile for {shown(device)}.\n  Give one of jax.devices(), or of a topology.")
    device = device or jax.devices()[0]
    # On a mesh of one device: JAX refuses a number on one device while a mesh of others is set.
    mesh = jax.sharding.Mesh([device], ("device",))
    with jax.set_mesh(mesh):
        number = jax.ShapeDtypeStruct((), "float32", sharding=jax.NamedSharding(mesh, jax.P()))
        lowered = jax.jit(lambda x: x + 1).lower(number)
    for name, value in options.items():
        try:
            lowered.compile(compiler_options={name: value})
        except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:
            reason = str(error).partition("INVALID_ARGUMENT: ")[2].strip() or str(error)
            raise PlanError(
                f"cannot compile with {name}={value} on {device.platform}.\n  The compiler says: {reason}"
            ) from None
