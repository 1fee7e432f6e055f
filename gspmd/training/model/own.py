"""A custom model as a `Trainable`, with checks of everything that the methods of the user's class return."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from gspmd.annotate.errors import LayoutError, listed, suggestion
from gspmd.annotate.spec import Spec
from gspmd.layouts import Layout
from gspmd.layouts.initial import drawer, folded, nested
from gspmd.layouts.read import preset_names
from gspmd.training.model.protocol import Decoder, Kept, Model, Parameter
from gspmd.training.model.trainable import Batch, Figures, Row, trained_paths
from gspmd.training.toml import ConfigError

_BATCH, _LOGITS = "embedding.tokens", "output.logits"
# The most missing lines that a message names.
_SHOWN = 4
_OF_STEP = ("loss", "gradient_norm", "learning_rate", "non_finite", "bits_per_byte")
"""Names of the metrics that a step, or the run, adds to the metrics of the loss."""


@dataclass(frozen=True)
class Own:
    """A custom model together with the dtype of its loss.

    Attributes:
        model: an instance of the user's class, with the model's settings.
        dtype: the dtype of matrices while the loss is computed.
    """

    model: Model
    dtype: Any = jnp.float32

    @property
    def name(self) -> str:
        """The name of the class."""
        return type(self.model).__qualname__

    def sizes(self, batch: int, length: int) -> dict[str, int]:
        """Return the size of every dimension.

        Raises:
            ConfigError: the method of the user's class does not return sizes.
        """
        return self._sizes(batch, length, least=1)

    def _sizes(self, batch: int, length: int, least: int) -> dict[str, int]:
        found = self.model.sizes(batch, length)
        good = isinstance(found, Mapping) and all(
            isinstance(dim, str) and len(dim) == 1 and type(size) is int and size >= least
            for dim, size in found.items()
        )
        if not good:
            fault = "sizes must return letters with whole numbers above 0, such as {'B': 8, 'E': 64}"
            raise self._error([f"{fault}, but returned {found!r}."])
        return dict(found)

    def fixed_sizes(self) -> dict[str, int]:
        """Return the sizes that do not depend on batch and length.

        The sizes of all dimensions of parameters are among them.
        """
        one, two = (self._sizes(each, each, least=0) for each in (1, 2))
        return {dim: size for dim, size in one.items() if 0 < size == two.get(dim)}

    def parameters(self, layout: Layout) -> dict[str, Parameter]:
        """Return every parameter by its path, as the user's class declares it.

        Raises:
            ConfigError: the class returns something that is not a parameter, or a parameter has a dimension for which
                `sizes` returns no size, or a size that depends on batch or length. The message lists all faults.
        """
        found = self.model.parameters(layout)
        if not isinstance(found, Mapping) or not found:
            raise self._error([f"parameters must return a mapping of paths to Parameter, but returned {found!r:.200}."])
        sizes, given, faults = self.fixed_sizes(), self._sizes(1, 1, least=0), []
        for path, each in found.items():
            if not (isinstance(path, str) and all(part.isidentifier() for part in path.split("."))):
                faults.append(f"a parameter's path must be names joined by dots, such as 'blocks.w_in', not {path!r}.")
            elif not isinstance(each, Parameter):
                faults.append(f"parameter {path!r} must be a gspmd.training.model.Parameter, but it is {each!r:.200}.")
            elif not each.dims or "N" in each.dims:
                faults.append(
                    f"parameter {path!r} has dims {each.dims!r}: write letters, without N, which layers= adds."
                )
            elif missing := [dim for dim in each.dims if dim not in sizes]:
                fact = f"parameter {path!r} has dimension {listed(missing)}"
                if absent := [dim for dim in missing if dim not in given]:
                    faults.append(
                        f"{fact}: sizes returns no size for {absent[0]}; add one, such as {absent[0]!r}: 256."
                    )
                else:
                    faults.append(f"{fact}: sizes must give a size that does not depend on batch and length.")
        if faults:
            raise self._error(faults)
        return dict(found)

    def rows(self, layout: Layout) -> dict[str, Row]:
        """Return every parameter by its path, with its line, spec and shape in a layout.

        Raises:
            LayoutError: the layout lacks lines, or a line's dimensions are not those of its parameter; the message
                lists all faults.
        """
        sizes, rows, faults, missing = self.fixed_sizes(), {}, [], []
        found = self.parameters(layout)
        used = {each.line for each in found.values()}
        for path, each in found.items():
            try:
                spec = layout.spec(each.line)
            except LayoutError as error:
                absent = each.line not in layout.table
                what = f"parameter {path!r}"
                faults.append(_without_line(what, each, layout, used) if absent else f"{what}: {error}")
                missing.append(each.line)
                continue
            if "".join(spec.dims) != each.dims:
                fact = f"parameter {path!r} has dimensions {listed(each.dims)}"
                faults.append(f"{fact}, but its line {each.line} = '{spec}' has {listed(spec.dims)}.")
                continue
            rows[path] = Row(each.line, _stacked(each, spec), each.shape(sizes), each.float32 or len(each.dims) < 2)
        if missing and layout.name in preset_names():
            named = f"{', '.join(missing[:_SHOWN])}{', ...' if len(missing) > _SHOWN else ''}"
            raise LayoutError(
                f"{self.name} needs a layout file: the preset '{layout.name}' has no lines {named}.\n"
                "  Write its lines in a TOML file, and name it with --layout FILE."
            )
        if faults:
            doing = f"cannot place the parameters of {self.name} by layout '{layout.name}'"
            raise LayoutError("\n  ".join([f"{doing}:", *dict.fromkeys(faults)]))
        return rows

    def optimizer_specs(self, layout: Layout) -> dict[str, Spec]:
        """Return the spec of each parameter's optimizer state."""
        return self._specs(layout, layout.optimizer)

    def gradient_specs(self, layout: Layout) -> dict[str, Spec]:
        """Return the spec in which the optimizer gets each parameter's gradient."""
        return self._specs(layout, layout.gradient)

    def _specs(self, layout: Layout, text_of: Callable[[str], str]) -> dict[str, Spec]:
        found = self.parameters(layout)
        return {path: _stacked(each, Spec.parse(text_of(each.line))) for path, each in found.items()}

    def trained(self, layout: Layout, frozen: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the paths of the parameters that are trained."""
        return trained_paths({path: each.line for path, each in self.parameters(layout).items()}, frozen)

    @property
    def batch_line(self) -> str:
        """The line of the layout with the spec of a batch of tokens."""
        return getattr(self.model, "batch_line", _BATCH)

    def batch_spec(self, layout: Layout) -> Spec:
        """Return the spec of a batch of tokens [B, L+1], which is the spec of `batch_line` with L unsharded."""
        try:
            spec = layout.spec(self.batch_line)
        except LayoutError as error:
            source = f"its spec is the line {self.batch_line!r} of layout '{layout.name}'"
            raise LayoutError(f"cannot place the batch of {self.name}: {source}:\n  {error}") from None
        if spec.dims != ("B", "L"):
            raise LayoutError(f"a batch has dimensions B and L, but its line {self.batch_line} = '{spec}' has others.")
        return spec.with_axes("L", ())

    def cut(self, layout: Layout, microbatches: int) -> int:
        """Return the number of parts into which the step cuts a batch: one per microbatch, as there are no stages."""
        return microbatches

    def for_loss(self, layout: Layout, microbatches: int) -> Layout:
        """Return the layout for the loss, where a parameter is `EF reduced-x` if its gradient is a partial sum over x.

        This concerns only gradients that the layout's section [gradients] states as partial sums, even with several
        microbatches. Whether other gradients could stay partial sums depends on the equations of the model, which are
        not known here.
        """
        lines = {each.line for each in self.parameters(layout).values()}
        gradients = {line: Spec.parse(layout.gradient(line)) for line in sorted(lines)}
        return layout.override({line: spec.cotangent for line, spec in gradients.items() if spec.partial})

    def widths(self, length: int) -> dict[str, int]:
        """Return the width of each array of a batch; the only array is `tokens`."""
        return {"tokens": length + 1}

    def predicted(self, layout: Layout, tokens: Batch) -> jax.Array | None:
        """Return None, because the loss of a custom model itself decides over how many tokens it averages."""
        return None

    def loss(
        self,
        layout: Layout,
        params: Mapping[str, Any],
        tokens: Batch,
        key: jax.Array,
        microbatches: int,
        predicted: jax.Array | None = None,
    ) -> tuple[jax.Array, Figures]:
        """Return the loss and the metrics of a training step."""
        return self._loss(layout, params, tokens, key, train=True)

    def adjusted(
        self,
        layout: Layout,
        still: Mapping[str, jax.Array],
        figures: Figures,
        parts: int,
        frozen: Sequence[str] = (),
    ) -> tuple[Mapping[str, jax.Array], Figures]:
        """Return parameters and metrics unchanged, because a custom model does not update untrained parameters."""
        return still, figures

    def cross_entropy(self, layout: Layout, params: Mapping[str, Any], tokens: Batch, microbatches: int) -> jax.Array:
        """Return the mean cross-entropy of a batch in an evaluation."""
        return self._loss(layout, params, tokens, None, train=False)[1]["cross_entropy"]

    def _loss(self, layout, params, tokens, key, *, train: bool) -> tuple[jax.Array, Figures]:
        assert not isinstance(tokens, Mapping), "a batch of such a model is one array"  # see `widths`
        found = self.model.loss(layout, self._taken(layout, params), tokens, key, train)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
            raise self._error([f"loss must return a scalar and a mapping of figures, but returned {_shown(found)}."])
        value, figures = found
        good = _is_scalar(value) and value.dtype == jnp.float32
        faults = [] if good else [f"loss must return a float32 scalar, but returned {_shown(value)}."]
        if "cross_entropy" not in figures:
            names = listed(map(repr, figures)) or "none"
            faults.append(f"the figures of loss must have 'cross_entropy', but have {names}.")
        faults += [f"figure {name!r} of loss must be a scalar, but it is {_shown(figure)}."
                   for name, figure in figures.items() if not _is_scalar(figure)]  # fmt: skip
        faults += [f"every step has a figure {name!r} already; use another name." for name in _OF_STEP
                   if name in figures]  # fmt: skip
        if faults:
            raise self._error(faults)
        return value, dict(figures)

    def _taken(self, layout: Layout, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters in the form that the user's class expects: nested, with matrices in `dtype`."""
        rows = self.rows(layout)
        return nested(
            {
                path: value if not rows[path].is_matrix or rows[path].float32 else value.astype(self.dtype)
                for path, value in params.items()
            }
        )

    # -- decoding -----------------------------------------------------------------------------------------------------

    @property
    def decodes(self) -> bool:
        """Whether the class has all methods of `gspmd.training.model.Decoder`."""
        return all(callable(getattr(self.model, each, None)) for each in ("kept", "step"))

    @property
    def logits_line(self) -> str:
        """The line of the layout with the spec of the logits."""
        return getattr(self.model, "logits_line", _LOGITS)

    def kept(self, layout: Layout, batch: int, room: int) -> dict[str, tuple[Spec, tuple[int, ...], Any]]:
        """Return spec, shape and dtype of every array that the model keeps, for `batch` texts of up to `room` tokens.

        Raises:
            ConfigError: the class returns something that is not a `Kept`, or an array has a dimension without a size.
            LayoutError: the layout lacks a line, or a line's dimensions are not those of its array.
        """
        given: Any = cast(Decoder, self.model).kept()  # checked below, since the class is a user's
        if not isinstance(given, Mapping) or not all(isinstance(each, Kept) for each in given.values()):
            raise self._error(
                [f"kept must return a mapping of names to gspmd.training.model.Kept, but returned {given!r:.200}."]
            )
        sizes, found = {**self.sizes(batch, 1), "T": room}, {}
        used = {each.line for each in self.parameters(layout).values()}
        for name, each in given.items():
            if each.line not in layout.table:
                what = f"cannot place what {self.name} keeps by layout '{layout.name}':\n  {name!r}"
                raise LayoutError(_without_line(what, each, layout, used))
            spec = layout.spec(each.line)
            if "".join(spec.dims) != each.dims:
                fact = f"{name!r}, which {self.name} keeps, has dimensions {listed(each.dims)}"
                raise LayoutError(f"{fact}, but its line {each.line} = '{spec}' has {listed(spec.dims)}.")
            if missing := [dim for dim in each.dims if dim not in sizes]:
                raise self._error(
                    [f"{name!r}, which it keeps, has dimension {listed(missing)}, for which sizes gives no size."]
                )
            shape = (*((each.layers,) if each.layers else ()), *(sizes[dim] for dim in each.dims))
            found[name] = _stacked(each, spec), shape, jnp.dtype(jnp.float32 if each.float32 else self.dtype)
        return found

    def step(
        self,
        layout: Layout,
        params: Mapping[str, Any],
        tokens: jax.Array,
        position: jax.Array,
        kept: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the logits after each of the given tokens, and the new contents of the arrays that the model keeps.

        Raises:
            ConfigError: the class returns something else; the message names every fault.
        """
        decoder = cast(Decoder, self.model)
        found = decoder.step(layout, self._taken(layout, params), tokens, position, kept)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
            raise self._error([f"step must return logits and a mapping of what is kept, but returned {_shown(found)}."])
        logits, after = found
        wanted = (*tokens.shape, self.fixed_sizes().get("V"))
        faults = []
        if getattr(logits, "shape", None) != wanted or not jnp.issubdtype(logits.dtype, jnp.floating):
            faults.append(f"step must return logits {list(wanted)}, but returned {_shown(logits)}.")
        for name in dict.fromkeys((*kept, *after)):
            if name not in after or name not in kept:
                did = "lost" if name in kept else "added"
                faults.append(f"step must return the arrays of kept, but {did} {name!r}.")
                continue
            before, now = kept[name], after[name]
            if (getattr(now, "shape", None), getattr(now, "dtype", None)) != (before.shape, before.dtype):
                faults.append(f"step must return {name!r} as it was, {_shown(before)}, but returned {_shown(now)}.")
        if faults:
            raise self._error(faults)
        return logits, dict(after)

    def check(
        self, layout: Layout, mesh: Any, batch: int, length: int, microbatches: int = 1, frozen: Sequence[str] = ()
    ) -> None:
        """Raise an error if a training step of these sizes cannot run under a resolved layout.

        Raises:
            LayoutError: the layout has faults, and the message lists all of them; or the layout has stages or padding,
                which only the models that come with gspmd support.
        """
        doing = f"cannot use layout '{layout.name}' for a custom model"
        if layout.get("pipeline.layers") is not None:
            raise LayoutError(f"{doing}: it splits layers into stages.\n  Leave [pipeline] out.")
        if layout.padding:
            raise LayoutError(f"{doing}: it pads {listed(layout.padding)}.\n  Leave [padding] out.")
        layout.check({**self.sizes(batch // microbatches, length), "B": batch, "M": microbatches}, mesh)
        self.rows(layout)
        self.batch_spec(layout)
        self.trained(layout, frozen)

    def num_parameters(self, layout: Layout) -> int:
        """Return the number of parameters of the model."""
        return sum(math.prod(row.shape) for row in self.rows(layout).values())

    def flops_per_token(self, layout: Layout, length: int) -> float:
        """Return the FLOPs per token of forward and backward pass.

        If the class has no method `flops_per_token`, they are estimated as 6 per parameter.
        """
        told = getattr(self.model, "flops_per_token", None)
        return told(length) if told else 6.0 * self.num_parameters(layout)

    def initial(self, layout: Layout, mesh: jax.sharding.Mesh, key: jax.Array) -> dict[str, jax.Array]:
        """Initialize every parameter, sharded, in float32; the values do not depend on the layout or the mesh.

        Raises:
            ConfigError: an initializer is not a function, or does not return an array of the parameter's shape.
        """
        rows, found = self.rows(layout), self.parameters(layout)
        for path, each in found.items():
            shape = rows[path].shape[1:] if each.layers else rows[path].shape
            if not callable(each.initialise):
                fact = f"the initialiser of {path!r} is {each.initialise!r:.100}, not a function of a key and a shape"
                raise self._error([f"{fact}; write Normal(deviation) or Constant(value)."])
            drawn = jax.eval_shape(lambda key, each=each, shape=shape: each.initialise(key, shape), key)
            if getattr(drawn, "shape", None) != shape:
                raise self._error([f"the initialiser of {path!r} returned {_shown(drawn)}, not shape {shape}."])
        with jax.set_mesh(mesh):
            return {
                path: drawer(each.initialise, rows[path].shape, rows[path].spec.partition_spec(), bool(each.layers))(
                    folded(key, path)
                ).astype(jnp.float32)
                for path, each in found.items()
            }

    def _error(self, faults: Sequence[str]) -> ConfigError:
        return ConfigError(f"cannot use the model {self.name}:", faults)


def _without_line(what: str, given: Parameter | Kept, layout: Layout, used: Collection[str]) -> str:
    """Return the fault that the layout lacks the line of a tensor; `used` has the lines that other tensors use."""
    section, _, name = given.line.partition(".")
    alike = (line for line, dims in layout.own.items() if dims == given.dims and line not in used)
    near = suggestion(given.line, alike)
    add = f'add {name} = "{given.dims}" to [{section}], with the mesh axes that shard it.'
    remedy = f"{near}Otherwise {add}" if near else f"{add[0].upper()}{add[1:]}"
    return f"{what} has no line {given.line!r} in the layout.\n  {remedy}"


def _stacked(given: Parameter | Kept, spec: Spec) -> Spec:
    if not given.layers:
        return spec
    return Spec(("N", *spec.dims), ((), *spec.axes), spec.partial, spec.reduced)


def _is_scalar(value: Any) -> bool:
    return getattr(value, "shape", None) == () and jnp.issubdtype(value.dtype, jnp.floating)


def _shown(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return f"{value!r:.200}" if shape is None else f"an array {dtype}{list(shape)}"
