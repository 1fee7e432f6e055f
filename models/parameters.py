"""The table of a model's parameters: spec, shape and initializer of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from gspmd.annotate import LayoutError, Spec
from gspmd.annotate.errors import SpecError, listed, report
from gspmd.layouts import Layout
from gspmd.layouts.initial import Constant, Initialiser, Normal, drawer, folded
from gspmd.layouts.rules.faults import one_for_each_cause
from gspmd.layouts.rules.keys import DENSE, dims_of
from gspmd.layouts.rules.sizes import Padded

from .config import ModelConfig
from .finetuning.adapters import adapter_specs
from .finetuning.config import TARGETS
from .vectors import SCALES, SHARED, pad, padded_dimensions, shared_sizes, wide_sizes


@dataclass(frozen=True)
class ParameterRow:
    """One row of the table.

    Attributes:
        key: the layout's key, such as `ffn.w_in`, the same for every layer.
        spec: the parameter's spec; layers of a scan are stacked in a leading N, which only a pipeline shards.
        shape: the parameter's shape, N first if layers are stacked, with the padding that the layout asks for.
        initialise: function from a random key and the shape to float32 values, the same on every mesh.
        padding: for each dimension its padding; None if it has none.
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
    """Return every parameter by its path in the module, in the order in which the model uses them.

    Args:
        config: the model.
        layout: a `gspmd.Layout`; for a model without experts, any mapping from its keys to specs.

    Returns:
        A mapping from paths, such as `blocks.0.ffn.w_in`, to rows.

    Raises:
        LayoutError: some layers have no experts, and the layout has no lines for dense layers.
        ValueError: a spec of the layout has other dimensions than the model's tensor.
    """
    _check_dense(config, layout)
    return dict(_rows(config, layout, lambda key: layout[key]))


def _check_dense(config: ModelConfig, layout: Layout) -> None:
    # `Layout.check` does not know the model, and allows a layout with experts to leave out the dense lines.
    missing = [key for key in DENSE if key not in layout.table] if config.moe else []
    if missing and config.expert_layers < config.layers:
        lines = (f'{key.partition(".")[2]} = "{dims_of(key)}"' for key in missing)
        raise LayoutError(
            f"cannot use layout '{layout.name}': {config.layers - config.expert_layers} of the model's {config.layers} "
            f"layers have no experts, and {listed(missing)} are not written.\n"
            f"  Write {listed(lines)} in [ffn], with their mesh axes."
        )


def parameter_specs(config: ModelConfig, layout: Layout) -> dict[str, tuple[Spec, tuple[int, ...]]]:
    """Return a mapping from the path of every parameter to its spec and shape."""
    return {path: (row.spec, row.shape) for path, row in parameters(config, layout).items()}


def optimizer_specs(config: ModelConfig, layout: Layout) -> dict[str, Spec]:
    """Return the spec of every parameter's optimizer state by path: the parameter's unless the layout overrides it."""
    return {path: row.spec for path, row in _rows(config, layout, layout.optimizer)}


def gradient_specs(config: ModelConfig, layout: Layout) -> dict[str, Spec]:
    """Return the spec of every parameter's gradient by path: the parameter's unless the layout overrides it."""
    return {path: row.spec for path, row in _rows(config, layout, layout.gradient)}


def stages_axes(layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes over which a pipeline splits the stacked layers into stages; empty if none does."""
    layers = layout.get("pipeline.layers")
    return () if layers is None else Spec.parse(layers).axes_of("N")


def check_placed(
    doing: str, rows: Mapping[str, ParameterRow], mesh: Any, kind: type[SpecError] | type[LayoutError] = SpecError
) -> None:
    """Raise one error for all parameters that cannot be placed on a mesh; JAX would name the first only.

    Args:
        doing: the beginning of the message.
        rows: the table of parameters.
        mesh: devices with named axes; `Layout.check` lets it lack axes of the layout.
        kind: class of the error.
    """
    faults = [
        replace(fault, text=f"{row.key} = {fault.text}", start=fault.start + at, end=fault.end + at)
        for row in rows.values()
        for at, fault in ((len(f"{row.key} = "), fault) for fault in row.spec.faults(row.shape, mesh))
    ]
    if faults:
        raise report(kind, doing, one_for_each_cause(dict.fromkeys(faults)))


def initialise(rows: Mapping[str, ParameterRow], mesh: jax.sharding.Mesh, key: jax.Array) -> dict[str, jax.Array]:
    """Draw every parameter with its sharding: no device ever holds more than its own shards.

    Args:
        rows: the table of parameters.
        mesh: devices with named axes.
        key: one random key; the key of each parameter is folded from it with the parameter's path.

    Returns:
        A mapping from paths to arrays. Values do not depend on the layout, and padding is 0.
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


def _rows(config: ModelConfig, layout: Layout, spec_of: Callable[[str], str]) -> Iterator[tuple[str, ParameterRow]]:
    sizes, wide = config.sizes(batch=1, length=1), wide_sizes(config, layout)

    def row(path: str, key: str, begin: Initialiser, stack: int = 0) -> tuple[str, ParameterRow]:
        dims, shared = dims_of(key), key in SHARED
        of, padded = shared_sizes(config, wide) if shared else wide, padded_dimensions(config, layout, shared=shared)
        spec, shape, padding = _spec(spec_of, key), tuple(of[d] for d in dims), tuple(map(padded.get, dims))
        if stack:
            spec, shape, padding = _stacked(spec, stages_axes(layout)), (stack, *shape), (None, *padding)
        return path, ParameterRow(key, spec, shape, begin, padding)

    def adapters(path: str, key: str, stack: int) -> Iterator[tuple[str, ParameterRow]]:
        """Yield A and B of a weight; their product is 0 at first."""
        _, weight = row(path, key, zeros)
        assert config.lora is not None
        along = {**dict(zip(dims_of(key), zip(weight.shape, weight.padding))), "R": (config.lora.rank, None)}
        begin: dict[str, Initialiser] = {"a": scaled(TARGETS[key][0], sizes), "b": zeros}
        for side, spec in zip("ab", adapter_specs(key, weight.spec)):
            shape, padding = zip(*(along[dim] for dim in spec.dims))
            if stack:
                spec, shape, padding = _stacked(spec, stages_axes(layout)), (stack, *shape), (None, *padding)
            yield f"{path}_{side}", ParameterRow(key, spec, shape, begin[side], padding)

    def matrix(path: str, key: str, begin: Initialiser, stack: int = 0) -> Iterator[tuple[str, ParameterRow]]:
        yield row(path, key, begin, stack)
        if config.lora and key in config.lora.targets:
            yield from adapters(path, key, stack)
        if config.int8 and key in SCALES and not shares_scale(config, path):
            name, at = SCALES[key]
            yield row(f"{path.rpartition('.')[0]}.{name}", at, ones, stack)

    # Rows of unit length; the look-up multiplies by √E (Vaswani et al. 2017, section 3.4).
    yield from matrix("embedding.table", "embedding.table", scaled("E", sizes))
    for place in range(config.period):
        for path, key, begin in _block(config, place, sizes):
            yield from matrix(f"blocks.{place}.{path}", key, begin, config.layers // config.period)
    # With a tied table, the token's own row in the residual stream would give a logit of √E. Chowdhery et al. 2022,
    # section 5, scale tied logits by 1/√E; here the last norm starts at 1/√E and may grow, which learns faster, and the
    # initial loss is that of a uniform guess.
    yield row("output.norm", "output.norm", Constant(sizes["E"] ** -0.5) if config.tied else ones)
    if config.norm_bias:
        yield row("output.norm_bias", "output.norm_bias", zeros)
    if not config.tied:
        yield from matrix("output.table", "output.table", scaled("E", sizes))
    if config.output_bias:
        yield row("output.bias", "output.bias", zeros)


def _block(config: ModelConfig, place: int, sizes: Mapping[str, int]) -> Iterator[tuple[str, str, Initialiser]]:
    serial = config.block == "serial"
    yield from _norm(config, *("attention.", "attention") if serial else ("", "ffn"))
    for name in "qkv":
        yield f"attention.w_{name}", f"attention.w_{name}", scaled("E", sizes)
        if config.qkv_bias:
            yield f"attention.b_{name}", f"attention.b_{name}", zeros
    for name in ("q_norm", "k_norm") if config.qk_norm else ():
        yield f"attention.{name}", f"attention.{name}", ones
    yield "attention.w_o", "attention.w_o", scaled("HD", sizes, depth=config.layers)
    if config.out_bias:
        yield "attention.b_o", "attention.b_o", zeros
    experts = config.moe if place == config.period - 1 else None
    section = "moe" if experts else "ffn"
    if serial:
        yield from _norm(config, f"{section}.", "ffn")
    if experts:
        # A small variance keeps early routing nearly even. Fedus et al. 2021, section 2.4, reduce the variance of all
        # matrices to 0.1; here only the router's, and matrices at the end of a branch are scaled by depth.
        # Noisy gating starts with logits 0 and equal noise (Shazeer et al. 2017, appendix A).
        begin = zeros if experts.noisy else scaled("E", sizes, variance=experts.router_scale)
        yield "moe.router", "moe.router", begin
        if experts.noisy:
            yield "moe.router_noise", "moe.router_noise", zeros
    for name in ("w_in", "w_gate") if config.gated else ("w_in",):
        yield f"{section}.{name}", f"{section}.{name}", scaled("E", sizes)
    for name in ("b_in", "b_gate") if config.gated else ("b_in",):
        if config.ffn_bias:
            yield f"ffn.{name}", f"ffn.{name}", zeros
    yield f"{section}.w_out", f"{section}.w_out", scaled("F", sizes, depth=config.layers)
    if config.ffn_bias:
        yield "ffn.b_out", "ffn.b_out", zeros
    if experts and experts.shared:
        yield from _shared(config, shared_sizes(config, sizes))


def _norm(config: ModelConfig, path: str, section: str) -> Iterator[tuple[str, str, Initialiser]]:
    yield f"{path}norm", f"{section}.norm", ones
    if config.norm_bias:
        yield f"{path}norm_bias", f"{section}.norm_bias", zeros


def shares_scale(config: ModelConfig, path: str) -> bool:
    """Return whether a matrix shares the scales of its block's `ffn.w_out`, as products summed before scaling must."""
    if config.block != "parallel" or not path.endswith("attention.w_o"):
        return False
    return config.moe is None or int(path.split(".")[1]) != config.period - 1  # experts reduce their sum separately


def _shared(config: ModelConfig, sizes: Mapping[str, int]) -> Iterator[tuple[str, str, Initialiser]]:
    for name in ("in", "gate") if config.gated else ("in",):
        yield f"moe.shared.w_{name}", f"moe.shared_{name}", scaled("E", sizes)
    yield "moe.shared.w_out", "moe.shared_out", scaled("F", sizes, depth=config.layers)


def scaled(summed: str, sizes: Mapping[str, int], variance: float = 1.0, depth: int = 0) -> Normal:
    """Normal of variance / (fan-in · 2 depth), or variance / fan-in at depth 0; fan-in: size of summed dimensions."""
    return Normal(math.sqrt(variance / math.prod(sizes[d] for d in summed) / max(1, 2 * depth)))


#: The initializer of norm scales.
ones = Constant(1.0)

#: The initializer of biases.
zeros = Constant(0.0)


def _stacked(spec: Spec, stages: tuple[str, ...]) -> Spec:
    return Spec(("N", *spec.dims), (stages, *spec.axes), spec.partial, spec.reduced)


def _spec(spec_of: Callable[[str], str], key: str) -> Spec:
    spec = Spec.parse(spec_of(key))
    if "".join(spec.dims) != dims_of(key):
        raise ValueError(f"layout key {key} is '{spec}', but its dimensions are {dims_of(key)}; write these")
    return spec
