"""The table of a model's parameters, with the spec, the shape and the initializer of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from gspmd.annotate import LayoutError, Spec
from gspmd.annotate.errors import SpecError, listed, report
from gspmd.layouts import Layout
from gspmd.layouts.distributions import Initialiser
from gspmd.layouts.initial import drawer, folded
from gspmd.layouts.rules.faults import one_for_each_cause
from gspmd.layouts.rules.keys import DENSE, ENCODER, dims_of
from gspmd.layouts.rules.sizes import Padded

from .config import ModelConfig
from .finetuning.adapters import adapter_specs
from .finetuning.config import TARGETS
from .tensors import Tensor, line_sizes, ones, scaled, tensor_sizes, tensors, zeros
from .vectors import SCALES, pad, padded_dimensions, wide_sizes


@dataclass(frozen=True)
class ParameterRow:
    """The row of one parameter in the table.

    Attributes:
        key: the key of the parameter's line in the layout, such as `ffn.w_in`. It is the same in every layer.
        spec: the spec of the parameter. The layers of a scan are stacked in a leading dimension N, which only a
            pipeline shards.
        shape: the shape of the parameter, including the layout's padding. N comes first if layers are stacked.
        initialise: a function from a random key and the shape to float32 values, which are the same on every mesh.
        padding: the padding of each dimension, or None for a dimension that is not padded.
    """

    key: str
    spec: Spec
    shape: tuple[int, ...]
    initialise: Initialiser
    padding: tuple[Padded | None, ...]

    @property
    def real_shape(self) -> tuple[int, ...]:
        """Shape of the parameter without padding."""
        return tuple(each.real if each else size for each, size in zip(self.padding, self.shape))


def parameters(config: ModelConfig, layout: Layout) -> dict[str, ParameterRow]:
    """Return the row of every parameter, by path in the module, in the order in which the model uses the parameters.

    Args:
        config: the model configuration.
        layout: a `gspmd.Layout`. For a model without experts it may also be any mapping from keys of a layout to specs.

    Returns:
        A mapping from paths, such as `blocks.0.ffn.w_in`, to rows.

    Raises:
        LayoutError: some layers have no experts, but the layout has no lines for dense layers.
        ValueError: the dimensions of a spec in the layout differ from the dimensions of the model's tensor.
    """
    _check_dense(config, layout)
    return dict(_rows(config, layout, lambda of, key: of[key]))


def _check_dense(config: ModelConfig, layout: Layout) -> None:
    # `Layout.check` does not know the model: it lets a layout with experts leave out the lines of dense layers.
    missing = [key for key in DENSE if key not in layout.table] if config.moe else []
    layers = config.layers + config.encoder_layers
    if missing and config.expert_layers < layers:
        lines = (f'{key.partition(".")[2]} = "{dims_of(key)}"' for key in missing)
        raise LayoutError(
            f"cannot use layout '{layout.name}': {layers - config.expert_layers} of the model's {layers} "
            f"layers have no experts, but {listed(missing)} are not written.\n"
            f"  Write {listed(lines)} in [ffn], with their mesh axes."
        )


def parameter_specs(config: ModelConfig, layout: Layout) -> dict[str, tuple[Spec, tuple[int, ...]]]:
    """Return the spec and the shape of every parameter, by its path."""
    return {path: (row.spec, row.shape) for path, row in parameters(config, layout).items()}


def optimizer_specs(config: ModelConfig, layout: Layout) -> dict[str, Spec]:
    """Return the spec of every parameter's optimizer state, by path; by default it is the parameter's spec."""
    return {path: row.spec for path, row in _rows(config, layout, Layout.optimizer)}


def gradient_specs(config: ModelConfig, layout: Layout) -> dict[str, Spec]:
    """Return the spec of every parameter's gradient, by path; by default it is the parameter's spec."""
    return {path: row.spec for path, row in _rows(config, layout, Layout.gradient)}


def stages_axes(layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes over which a pipeline splits the stacked layers into stages; empty without a pipeline."""
    layers = layout.get("pipeline.layers")
    return () if layers is None else Spec.parse(layers).axes_of("N")


def check_placed(
    doing: str, rows: Mapping[str, ParameterRow], mesh: Any, kind: type[SpecError] | type[LayoutError] = SpecError
) -> None:
    """Raise one error that lists all parameters whose specs do not fit the mesh.

    JAX would name only the first of these parameters.

    Args:
        doing: the first words of the error message.
        rows: the table of parameters.
        mesh: a mesh. It may lack some mesh axes of the layout, as `Layout.check` allows.
        kind: the class of the error.
    """
    faults = [
        replace(fault, text=f"{row.key} = {fault.text}", start=fault.start + at, end=fault.end + at)
        for row in rows.values()
        for at, fault in ((len(f"{row.key} = "), fault) for fault in row.spec.faults(row.shape, mesh))
    ]
    if faults:
        raise report(kind, doing, one_for_each_cause(dict.fromkeys(faults)))


def initialise(rows: Mapping[str, ParameterRow], mesh: jax.sharding.Mesh, key: jax.Array) -> dict[str, jax.Array]:
    """Initialize every parameter with its sharding; a device never holds more than its own shards.

    Args:
        rows: the table of parameters.
        mesh: a mesh of devices with named axes.
        key: one random key. The key of each parameter is derived from this key and the parameter's path.

    Returns:
        A mapping from path to array. Values do not depend on the layout, and padding is 0.
    """
    with jax.set_mesh(mesh):
        return {path: _drawer(row)(folded(key, path)) for path, row in rows.items()}


def _drawer(row: ParameterRow) -> Callable[[jax.Array], jax.Array]:
    return _compiled(row.initialise, row.real_shape, row.spec.partition_spec(), row.spec.dims[0] == "N", row.padding)


def _compiled(
    begin: Initialiser,
    shape: tuple[int, ...],
    placed: jax.P,
    stacked: bool,
    padding: tuple[Padded | None, ...] = (),
) -> Callable[[jax.Array], jax.Array]:
    if any(padding):
        begin = _WithPadding(begin, padding[1:] if stacked else padding)
    return drawer(begin, shape, placed, stacked)


@dataclass(frozen=True)
class _WithPadding:
    begin: Initialiser
    padding: tuple[Padded | None, ...]

    def __call__(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return pad(self.begin(key, shape), self.padding)


def _rows(
    config: ModelConfig, layout: Layout, spec_of: Callable[[Layout, str], str]
) -> Iterator[tuple[str, ParameterRow]]:
    """Yield the path and the row of every parameter.

    `spec_of` takes the layout and a key, and returns the spec of the parameter, of its optimizer state or of its
    gradient.
    """
    sizes, wide = tensor_sizes(config), wide_sizes(config, layout)
    # An encoder's lines may differ from a decoder's. A mapping in place of a layout has no lines of an encoder.
    encoder = layout.stack(ENCODER) if config.encoder_layers else layout

    def stages(tensor: Tensor) -> tuple[str, ...]:
        return () if tensor.in_lead else stages_axes(layout)

    def row(tensor: Tensor, path: str, key: str, begin: Initialiser) -> tuple[str, ParameterRow]:
        dims, of, padded = dims_of(key), line_sizes(wide, key), padded_dimensions(config, layout, key)
        spec = _spec(lambda key: spec_of(encoder if tensor.in_encoder else layout, key), key)
        shape, padding = tuple(of[d] for d in dims), tuple(map(padded.get, dims))
        if tensor.layers:
            spec, shape, padding = _stacked(spec, stages(tensor)), (tensor.layers, *shape), (None, *padding)
        return path, ParameterRow(key, spec, shape, begin, padding)

    def adapters(tensor: Tensor) -> Iterator[tuple[str, ParameterRow]]:
        """Yield the rows of a weight's adapter matrices A and B; the product of A and B is 0 after initialization."""
        key = tensor.key
        _, weight = row(replace(tensor, layers=0), tensor.path, key, zeros)
        assert config.lora is not None
        along = {**dict(zip(dims_of(key), zip(weight.shape, weight.padding))), "R": (config.lora.rank, None)}
        begin: dict[str, Initialiser] = {"a": scaled(TARGETS[key][0], line_sizes(sizes, key)), "b": zeros}
        for side, spec in zip("ab", adapter_specs(key, weight.spec)):
            shape, padding = zip(*(along[dim] for dim in spec.dims))
            if tensor.layers:
                spec, shape, padding = _stacked(spec, stages(tensor)), (tensor.layers, *shape), (None, *padding)
            yield f"{tensor.path}_{side}", ParameterRow(key, spec, shape, begin[side], padding)

    for tensor in tensors(config):
        yield row(tensor, tensor.path, tensor.key, tensor.initialise)
        if config.lora and tensor.key in config.lora.targets:
            yield from adapters(tensor)
        if config.int8 and tensor.key in SCALES and not shares_scale(config, tensor.path):
            name, at = SCALES[tensor.key]
            yield row(tensor, f"{tensor.path.rpartition('.')[0]}.{name}", at, ones)


def shares_scale(config: ModelConfig, path: str) -> bool:
    """Return whether a matrix shares the int8 scales of `ffn.w_out`.

    This is so if the product with the matrix is added to the product with `ffn.w_out` before scaling.
    """
    if config.block != "parallel" or not path.endswith("attention.w_o"):
        return False
    number = config.weight_stacks()[int(path.split(".")[1])][0]
    return not config.is_sparse(number)  # experts reduce their sum separately


def _stacked(spec: Spec, stages: tuple[str, ...]) -> Spec:
    return Spec(("N", *spec.dims), (stages, *spec.axes), spec.partial, spec.reduced)


def _spec(spec_of: Callable[[str], str], key: str) -> Spec:
    spec = Spec.parse(spec_of(key))
    if "".join(spec.dims) != dims_of(key):
        raise ValueError(f"layout key {key} is '{spec}', but its dimensions are {dims_of(key)}; write these")
    return spec
