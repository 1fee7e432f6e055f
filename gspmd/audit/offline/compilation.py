"""`gspmd.audit.compile_offline`: compilation for a machine that is not attached, with a report of memory and time."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.layout import Format, Layout

from gspmd.annotate.errors import PlanError, shown
from gspmd.audit.arguments import argument_numbers, operations
from gspmd.audit.hlo import parse
from gspmd.audit.hlo.slices import of_all_slices
from gspmd.audit.ledgers.reader import of_module
from gspmd.audit.offline import memory
from gspmd.audit.offline.libtpu import own_schedules, with_schedules
from gspmd.audit.offline.memory import KEPT
from gspmd.audit.offline.options import check_compiler_options
from gspmd.audit.offline.report import Report
from gspmd.audit.offline.topology import Topology, topology
from gspmd.audit.simulation.simulator import timeline
from gspmd.display.units import amount_of_bytes, mesh_text
from gspmd.interruption import answering
from gspmd.lowerings import in_force
from gspmd.tracing.program_plan import ProgramPlan
from gspmd.tracing.trace import check_call, trace

_FULL = re.compile(r"RESOURCE_EXHAUSTED")
_NEEDED = re.compile(r"(?:required for HLO temporaries \(|Used )([\d.]+)([KMGTP]?)")
_OFFERED = re.compile(r"(?:available HBM \(|Used [\d.]+[KMGTP]? of )([\d.]+)([KMGTP]?)")
_BINARY = re.compile(r"\b([\d.]+)([KMGTP])(?=[\s.,;)]|$)")
_FAULTY_PASS = "while_loop_all_reduce_code_motion"
"""A pass in which libtpu 0.0.42 fails, as its message spells it."""
_REMEDY = (
    "\n  This is a fault of the compiler, in a pass that moves reductions out of loops. To compile without the pass,\n"
    "  add --xla_disable_hlo_passes=while-loop-all-reduce-code-motion to XLA_FLAGS in the environment."
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}


def compile_offline(
    fn: Callable,
    *abstract_args: Any,
    topology: "Topology | str",
    mesh: Any = None,
    donate_argnums: Sequence[int] = (),
    auto_layout_argnums: Sequence[int] = (),
    out_shardings: Any = None,
    compiler_options: Mapping[str, Any] | None = None,
    flops: float = 0,
    progress: Callable[[str], None] = lambda what: None,
) -> Report:
    """Compile a function for a machine that is not attached, with the machine's real compiler.

    The TPU compiler refuses a program that does not fit in memory. The GPU compiler accepts such a program, so you
    still get a report with a ledger and a timeline.

    Args:
        fn: any function that JAX can trace.
        abstract_args: the arguments of `fn`, as `jax.ShapeDtypeStruct`s with shardings over a mesh of `topology`.
        topology: a name such as `"tpu-v4:4x4x4"` or `"h100:16x8"`, or the result of `gspmd.audit.topology(...)`.
        mesh: a `Mesh`, or a mapping from mesh axes to sizes; needed only if no argument has a mesh.
        donate_argnums: positions of arguments whose memory the results may reuse, such as a training state.
        auto_layout_argnums: positions of the arguments for which the compiler may choose the memory layout (the order
            of dimensions in memory). Use this, for example, for the weights of a decode step, which are stored once and
            read in every step. With JAX's default order, a TPU may have to reorder a weight before it can multiply by
            it. All other arguments keep the memory layout of their formats.
        out_shardings: shardings of the results, as for `jax.jit`. They are needed if the compiler chooses the memory
            layout of a donated argument.
        compiler_options: options for this program, as for `jax.jit`, such as
            `{"xla_tpu_scoped_vmem_limit_kib": 81920}`.
        flops: model FLOPs of one execution over all devices, for the model FLOPs utilization (MFU). The default is the
            FLOPs of the program's matrix products.
        progress: a function that is called with the name of each phase when the phase starts: "planning", "lowering",
            "compiling" and "reading".

    Returns:
        A `Report`. If the compiler refuses the program for lack of memory, or the arguments alone do not fit in memory,
        the report says so. Its figures then come from the plan, and from the compiler's message if there is one.

    Raises:
        PlanError: the topology does not exist, or its compiler is missing; the mesh does not fit the topology, or no
            argument has a mesh and `mesh` is not given; the compiler does not know an option, or refuses the program
            for a reason other than memory; or an argument has the wrong type.

    Example:
        >>> topology = gspmd.audit.topology("tpu-v4:4x4x4")             # doctest: +SKIP
        >>> mesh = topology.mesh({"x": 4, "y": 4, "z": 4})              # doctest: +SKIP
        >>> print(compile_offline(step, *args, topology=topology))      # doctest: +SKIP
    """
    target = _topology(topology)
    check_call("compile", fn, abstract_args)
    if not callable(progress):
        raise PlanError(f"cannot call progress={shown(progress)}.\n  Give a function of one string, such as print.")
    donated, ordered = (
        argument_numbers(name, given, len(abstract_args))
        for name, given in (("donate_argnums", donate_argnums), ("auto_layout_argnums", auto_layout_argnums))
    )
    _check_shardings(out_shardings)
    share = operations(flops) / target.num_devices
    placed, chosen = _mesh(mesh, target, abstract_args), {} if compiler_options is None else compiler_options
    check_compiler_options(chosen, target.devices[0])
    sizes, began = dict(placed.shape), time.perf_counter()
    held = tuple(memory.arguments(abstract_args, sizes))
    with jax.set_mesh(placed), in_force.on_these_devices():
        progress("planning")
        plan = trace(fn, *abstract_args)
        compiled, module, reason = None, None, _overfull(held, target)
        if not reason:
            progress("lowering")
            options = _formats(abstract_args, ordered)
            if out_shardings is not None:
                options["out_shardings"] = out_shardings
            # Arguments are held whether the program reads them or not, such as a decoder's weights while sources are
            # encoded; jax.jit would drop those that it does not read.
            jitted = jax.jit(fn, donate_argnums=donated, keep_unused=True, **options)
            lowered = jitted.lower(*abstract_args)
            progress("compiling")
            with own_schedules():
                compiled, reason = _compile(lowered, chosen, target.compiler_options)
                module = with_schedules(parse(compiled.as_text())) if compiled is not None else None
    seconds = time.perf_counter() - began
    if compiled is None or module is None:
        with jax.set_mesh(placed), in_force.on_these_devices():
            values = memory.values(jax.make_jaxpr(fn)(*abstract_args).jaxpr)
        return _too_large(target, sizes, plan, (*held, *values), reason, seconds)
    progress("reading")
    text, stats = compiled.as_text(), compiled.memory_analysis()
    module = of_all_slices(module, placed)
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    needed = stats.argument_size_in_bytes, results, stats.temp_size_in_bytes
    reason = _overfilled(sum(needed), target)
    buffers = sorted([*held, *memory.temporaries(module)], key=lambda buffer: -buffer.bytes)[:KEPT]
    return Report(
        target, sizes, not reason, *needed, target.chip.hbm_bytes, plan,
        of_module(module, sizes, target.chip),
        timeline(module, target.chip, sizes, flops=share, torus=target.rings(placed)),
        module, text, tuple(buffers), seconds, reason, stats.peak_memory_in_bytes,
        stats.host_argument_size_in_bytes + stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes,
    )  # fmt: skip


def _topology(given: Topology | str) -> Topology:
    if isinstance(given, Topology):
        return given
    if not isinstance(given, str):
        raise PlanError(
            f"cannot compile for topology={shown(given)}: it is not a topology.\n"
            "  Give a name, such as 'tpu-v4:4x4x4', or gspmd.audit.topology('tpu-v4:4x4x4')."
        )
    return topology(given)


def _check_shardings(given: Any) -> None:
    wrong = next((leaf for leaf in jax.tree.leaves(given, is_leaf=_is_sharding) if not _is_sharding(leaf)), None)
    if wrong is not None:
        raise PlanError(
            f"cannot place the results by {shown(wrong)} in out_shardings: it is not a sharding.\n"
            "  Give a tree of jax.NamedSharding or jax.P with the structure of the results, or leave it out."
        )


def _is_sharding(leaf: Any) -> bool:
    return isinstance(leaf, (jax.sharding.Sharding, jax.P, Format))


def _formats(args: Sequence[Any], chosen: Sequence[int]) -> dict[str, Any]:
    """Return the formats of the arguments, as keyword arguments for `jax.jit`.

    The compiler chooses the format of the arguments at the positions in `chosen`.
    """
    if not chosen:
        return {}

    def of(leaf: Any, auto: bool) -> Any:
        return Format(Layout.AUTO, leaf.sharding) if auto and _is_placed(leaf) else getattr(leaf, "format", None)

    shown = [jax.tree.map(lambda leaf, auto=number in chosen: of(leaf, auto), arg) for number, arg in enumerate(args)]
    return {"in_shardings": tuple(shown)}


def _mesh(given: Any, target: Topology, args: Any) -> jax.sharding.Mesh:
    """Return the mesh of the arguments, or the given mesh if no argument has a mesh.

    Raises:
        PlanError: there is no mesh, there are two different meshes, or a mesh does not consist of the topology's
            devices.
    """
    meshes = [leaf.sharding.mesh for leaf in jax.tree.leaves(args) if _is_placed(leaf)]
    if isinstance(given, Mapping):
        meshes.append(target.mesh(given))
    elif isinstance(given, jax.sharding.Mesh):
        meshes.append(given)
    elif given is not None:
        raise PlanError(
            f"cannot compile for {target.name} with mesh={shown(given)}: it is not a mesh.\n"
            "  Give a mesh of its devices, or sizes of its axes, such as {'x': 4, 'y': 4, 'z': 4}."
        )
    if not meshes:
        raise PlanError(
            f"cannot compile for {target.name}: no argument is on a mesh.\n"
            "  Give mesh=, such as mesh={'x': 4, 'y': 4, 'z': 4}, or arguments with shardings."
        )
    for mesh in meshes:
        if set(mesh.devices.flat) != set(target.devices):
            raise PlanError(
                f"cannot compile for {target.name}: an argument, or mesh=, has a mesh of {mesh.devices.size} "
                f"devices that are not its own.\n  Make the mesh with topology({target.name!r}).mesh(...), over all "
                f"{target.num_devices}."
            )
        if mesh != meshes[-1]:
            raise PlanError(
                f"cannot compile for {target.name}: there are two meshes, {mesh_text(mesh.shape)} and "
                f"{mesh_text(meshes[-1].shape)}.\n"
                "  Place every argument on the same mesh."
            )
    return meshes[-1]


def _is_placed(leaf: Any) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, jax.NamedSharding) and isinstance(sharding.mesh, jax.sharding.Mesh)


def _overfull(held: Sequence[memory.AllocatedArray], target: Topology) -> str:
    """Return the reason why the arguments alone do not fit in memory, or an empty string if they fit."""
    taken, room = sum(buffer.bytes for buffer in held), target.chip.hbm_bytes
    if taken <= room:
        return ""
    return f"Its arguments alone take {amount_of_bytes(taken)} per device, and a device has {amount_of_bytes(room)}."


def _overfilled(needed: int, target: Topology) -> str:
    """Return the reason why a compiled program does not fit in memory, or an empty string if it fits.

    Only programs for GPUs need this check. The TPU compiler itself refuses a program that does not fit in the memory
    that this compiler assumes.
    """
    room = target.chip.hbm_bytes
    if needed <= room or not target.chip.is_switch:
        return ""
    return f"The compiled program takes {amount_of_bytes(needed)} per device, and a device has {amount_of_bytes(room)}."


def _compile(lowered: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[Any, str]:
    """Compile a program, and return (compiled program, "").

    If the program does not fit in memory, return (None, the compiler's message). The user's `options` override
    `defaults`. Error messages name only the user's options.

    Raises:
        PlanError: the compiler refuses the program for another reason.
    """
    try:
        return answering(lowered.compile, compiler_options={**defaults, **options} or None), ""
    except jax.errors.JaxRuntimeError as error:
        if _FULL.search(str(error)):
            return None, str(error).partition("RESOURCE_EXHAUSTED: ")[2].strip()
        given = f" with {', '.join(f'{name}={value}' for name, value in options.items())}" if options else ""
        remedy = _REMEDY if _FAULTY_PASS in str(error) else ""
        raise PlanError(
            f"cannot compile the program{given}.\n  The compiler says: {str(error).strip()}{remedy}"
        ) from error


def _too_large(
    target: Topology,
    mesh: Mapping[str, int],
    plan: ProgramPlan,
    buffers: tuple[memory.AllocatedArray, ...],
    reason: str,
    seconds: float,
) -> Report:
    """Return the report of a function that was not compiled because it does not fit in memory.

    Its figures come from the plan, and from the compiler's message `reason` if the compiler refused the program.
    """
    taken = sum(buffer.bytes for buffer in buffers if buffer.kind == "argument")
    room = target.chip.hbm_bytes
    needed = max(0, _amount(_NEEDED, reason) - taken)  # The compiler counts arguments and results too.
    room = _amount(_OFFERED, reason) or room
    first = _BINARY.sub(lambda found: amount_of_bytes(_amount(_BINARY, found[0])), reason.partition("\n")[0])
    buffers = tuple(sorted(buffers, key=lambda buffer: -buffer.bytes)[:KEPT])
    return Report(target, mesh, False, taken, 0, needed, room, plan, None, None, None, "", buffers, seconds, first)


def _amount(pattern: re.Pattern, text: str) -> int:
    found = pattern.search(text)
    return round(float(found[1]) * _UNITS[found[2]]) if found else 0
