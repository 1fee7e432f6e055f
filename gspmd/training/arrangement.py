"""Arrangements of a run: each is a layout on a mesh for a range of steps; the state is moved from one to the next."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import jax
from jax.sharding import AxisType, Mesh

import gspmd
from gspmd import host
from gspmd.display import manual
from gspmd.hardware.chips import slice_of
from gspmd.layouts import Layout
from gspmd.training.config import ShardingConfig, TrainingConfig
from gspmd.training.state import TrainState
from gspmd.training.syntax import parse_mesh, parse_relayout
from gspmd.training.toml import ConfigError

# Largest number of arrays that an error names.
_SHOWN = 4


@dataclass(frozen=True)
class Arrangement:
    """A layout on a mesh that a run uses from a given step on.

    Attributes:
        after: the step after which the arrangement is used; 0 for the arrangement in which the run begins.
        layout: the layout, resolved for this mesh.
        mesh: the mesh. Its devices are those of the run, the same for all arrangements.
    """

    after: int
    layout: Layout
    mesh: Mesh

    @contextmanager
    def context(self) -> Iterator[None]:
        """Make the mesh the current one, and the layout's lowering the default."""
        with jax.set_mesh(self.mesh), gspmd.lowering(self.layout.lowering or "auto"):
            yield

    def __str__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        return f"layout {self.layout.name} on mesh {mesh}"


def arrange(
    training: TrainingConfig, sharding: ShardingConfig, sizes: Mapping[str, int], begin: Layout | None = None
) -> list[Arrangement]:
    """Check all layouts of a run, start the JAX backend, and return the arrangements in the order of their steps.

    Args:
        training: the settings of the run, including its changes of layout.
        sharding: the settings of the first layout and mesh. Their lowering and axis types apply to all arrangements.
        sizes: sizes of the model's dimensions; see `Layout.check`.
        begin: the layout to begin in; by default the layout that `sharding` names.

    Raises:
        ConfigError: the mesh of a change of layout does not have as many devices as the run.
        HostError, LayoutError: one of the layouts cannot be used; `make_mesh` lists the possible reasons.
    """
    changes = [parse_relayout(change) for change in training.relayout]
    layouts = [Layout.load(begin or sharding.layout).override(sharding.overrides)]
    layouts += [Layout.load(change.layout) for change in changes]
    layouts = [layout.lowered(sharding.lowering) if sharding.lowering else layout for layout in layouts]
    for layout in layouts:
        layout.check(sizes)
    meshes = [make_mesh(sharding, layouts[0], sizes)]
    devices = [*meshes[0].devices.flat]
    for change, layout in zip(changes, layouts[1:]):
        shape = layout.complete_mesh(parse_mesh(change.mesh)) if change.mesh else layout.mesh_for(len(devices), sizes)
        if (wanted := math.prod(shape.values())) != len(devices):
            fault = f"mesh {change.mesh} has {wanted} devices, but the run has {len(devices)}, and keeps all of them."
            raise ConfigError(f"cannot change the layout, {str(change)!r}:", [fault])
        layout.check(sizes, shape)
        meshes.append(_mesh(shape, devices, sharding))
    steps = [0, *(change.after for change in changes)]
    return [Arrangement(*each) for each in zip(steps, [x.resolved(sizes, y) for x, y in zip(layouts, meshes)], meshes)]


def make_mesh(sharding: ShardingConfig, layout: Layout, sizes: Mapping[str, int], *, host_devices: int = 8) -> Mesh:
    """Start the JAX backend, and make a mesh with all axes of the layout.

    Args:
        sharding: the requested mesh or number of devices; if neither is requested, all devices are used.
        layout: the layout; if no mesh is requested, it determines how the devices are factored into a mesh.
        sizes: sizes of the model's dimensions; see `Layout.check`.
        host_devices: number of fake CPU devices to use if neither a mesh nor a number of devices is requested.

    Raises:
        ConfigError: the requested mesh and number of devices contradict each other.
        HostError, LayoutError: the devices are not available, or the mesh does not fit the layout or the sizes.
    """
    given = layout.complete_mesh(parse_mesh(sharding.mesh)) if sharding.mesh else None
    wanted = _wanted(sharding)
    if given:
        layout.check(sizes, given)
    elif wanted:  # A fault is raised before the devices are started.
        given = layout.mesh_for(wanted, sizes)
    devices = start(sharding, host_devices=host_devices)
    return _mesh(given or layout.mesh_for(len(devices), sizes), devices, sharding)


def start(sharding: ShardingConfig, *, host_devices: int = 8) -> list[jax.Device]:
    """Start the JAX backend, and return as many devices as the settings ask for; see `make_mesh` for `host_devices`.

    Raises:
        ConfigError: the requested mesh and number of devices contradict each other.
        HostError: the devices are not available.
    """
    return host.start(_wanted(sharding), sharding.platform, host_devices=host_devices)


def _wanted(sharding: ShardingConfig) -> int | None:
    """Return the requested number of devices, or None for all devices."""
    wanted = math.prod(parse_mesh(sharding.mesh).values()) if sharding.mesh else sharding.devices
    if sharding.devices not in (None, wanted):
        fault = f"it has {wanted} devices, but --devices asks for {sharding.devices}. Leave one of the two out."
        raise ConfigError(f"cannot use mesh {sharding.mesh!r}:", [fault])
    return wanted


def _mesh(shape: Mapping[str, int], devices: Sequence[jax.Device], sharding: ShardingConfig) -> Mesh:
    if (slices := len({slice_of(device) for device in devices})) > 1:
        raise ConfigError(
            "cannot make a mesh:",
            [
                f"the devices belong to {slices} TPU slices, but a command runs on one slice.",
                f"Compile for several: {manual.page('slices.md')}.",
            ],
        )
    kind = AxisType.Explicit if sharding.axis_types == "explicit" else AxisType.Auto
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(kind,) * len(shape), devices=devices)


def move(state: TrainState, like: TrainState) -> TrainState:
    """Move a state to the shardings of `like`, on the same devices; the old state is freed array by array.

    Args:
        state: the training state, as arrays.
        like: a tree with the structure of `state`, on another mesh. Its leaves are arrays, or shapes with shardings.

    Source: the idea is from PipeTransformer (He et al. 2021, arXiv 2102.03161), which changes the parallelism of a run
        while it trains.
    Differs: any layout may follow any other one, and no process is restarted.
    """

    def put(leaf: jax.Array, to: jax.Array) -> jax.Array:
        moved = jax.block_until_ready(jax.device_put(leaf, to.sharding, may_alias=False))
        leaf.delete()
        return moved

    return jax.tree.map(put, state, like)


def check_same_form(states: Sequence[tuple[str, TrainState]]) -> None:
    """Raise an error if states differ in shapes or dtypes, for example because their layouts pad differently.

    Args:
        states: a pair for each arrangement: its name, and the state as shapes and dtypes.

    Raises:
        ConfigError: the arrays of a state differ from those of the first state; the message lists the differences.
    """
    (first, wanted), *others = [(name, _forms(state)) for name, state in states]
    for name, forms in others:
        paths = [path for path in {**wanted, **forms} if forms.get(path) != wanted.get(path)]
        faults = [
            f"{path} is {wanted.get(path)} in {first}, but {forms.get(path)} in {name}." for path in paths[:_SHOWN]
        ]
        faults += [f"... and {len(paths) - _SHOWN} more."] * (len(paths) > _SHOWN)
        if faults:
            raise ConfigError(
                "cannot change to a layout that pads differently:", [*faults, "Use layouts that pad alike."]
            )


def _forms(state: TrainState) -> dict[str, str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): f"{x.dtype} {tuple(x.shape)}" for path, x in leaves}
