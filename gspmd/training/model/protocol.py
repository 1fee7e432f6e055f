"""The protocol of a custom model: its settings, sizes, parameters, loss and decoding."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from gspmd.annotate.equation import Equation
from gspmd.annotate.spec import Spec
from gspmd.layouts import Layout
from gspmd.layouts.distributions import Initialiser
from gspmd.ops._einsum import reshard


@dataclass(frozen=True)
class Parameter:
    """The declaration of one parameter of a model.

    Attributes:
        line: the line of the layout that has the parameter's spec, such as `"mixer.w_in"`. Layers that are scanned
            share one line, and several parameters may share one too.
        dims: the letters of the parameter's dimensions in the order of the line, such as `"EF"`. The sizes of these
            dimensions are the parameter's shape.
        initialise: a function from a random key and the shape to float32 values: `Normal`, `Constant`, or one of
            `jax.nn.initializers`.
        layers: the number of layers stacked in a leading dimension N, each initialized with its own key; 0 for a
            parameter that is not stacked. N is never sharded.
        float32: whether the parameter is stored and passed to the loss in float32, whatever `parameter_dtype` and
            `dtype` are. The matrix of a router is an example. Parameters of one dimension are always float32.

    Example:
        >>> from gspmd.training.model import Normal
        >>> Parameter("ffn.w_in", "EF", Normal(0.02), layers=4).shape({"E": 16, "F": 64})
        (4, 16, 64)
    """

    line: str
    dims: str
    initialise: Initialiser
    layers: int = 0
    float32: bool = False

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the parameter's shape, given the sizes of dimensions, with N first if layers are stacked."""
        return (*((self.layers,) if self.layers else ()), *(sizes[dim] for dim in self.dims))


@dataclass(frozen=True)
class Kept:
    """A state or cache in which a model keeps what it has read of a text; all elements are zero at first.

    Attributes:
        line: the line of the layout that has the array's spec, such as `"mixer.state"`.
        dims: the letters of the array's dimensions, as in the line. The size of T is the largest number of tokens of a
            text.
        layers: the number of layers stacked in a leading dimension N, which is never sharded; 0 for an array that is
            not stacked.
        float32: whether the array is float32, whatever the dtype of matrices is.
    """

    line: str
    dims: str
    layers: int = 0
    float32: bool = False


class Model(Protocol):
    """A model that `gspmd train --model module:Name` can train: a frozen dataclass of settings with these methods.

    The fields of the dataclass, all with defaults, are the keys of `[model]` and the flags `--model.FIELD`.

    A class may have two more attributes. `batch_line` is the line with the spec of a batch of tokens (by default
    `"embedding.tokens"`); L is left unsharded whatever the line says. `flops_per_token(length)` returns the FLOPs per
    token of forward and backward pass, for the reported speed (by default 6 for every parameter; Kaplan et al. 2020,
    arXiv 2001.08361, section 2.1).

    docs/your-model.md builds such a model, and examples/ has more.
    """

    def sizes(self, batch: int, length: int) -> Mapping[str, int]:
        """Return the size of every dimension by its letter, for `batch` sequences of `length` tokens."""

    def parameters(self, layout: Layout) -> Mapping[str, Parameter]:
        """Return every parameter by its path, such as `"blocks.w_in"`, in a fixed order.

        Paths and shapes must not depend on the layout.
        """

    def loss(
        self, layout: Layout, params: Mapping[str, Any], tokens: jax.Array, key: jax.Array | None, train: bool
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """Compute the loss and the metrics of a batch.

        This method is called under the run's mesh and the layout's lowering. The values that it returns must not depend
        on the layout.

        Args:
            layout: the layout, with one spec for every line.
            params: the parameters, nested by their paths, such as `params["blocks"]["w_in"]`. Each parameter is sharded
                as its line says. Matrices have the dtype of `--dtype`, and all other parameters are float32.
            tokens: int32 [B, L+1], sharded as `batch_line`.
            key: a random key; None in evaluation.
            train: True for an update, False for an evaluation.

        Returns:
            The loss, a float32 scalar replicated on every device (as `mean` returns it), and metrics for metrics.jsonl.
            One metric must be `cross_entropy`, a scalar: the mean cross-entropy in nats, from which bits per byte are
            computed.
        """


class Decoder(Model, Protocol):
    """A model with which `gspmd generate` can generate text: it reads tokens in parts, and keeps state between parts.

    A class may have the attribute `logits_line`, the line with the spec of the logits (by default `"output.logits"`).
    """

    def kept(self) -> Mapping[str, Kept]:
        """Return every array that the model keeps for a text, under names that the model chooses."""

    def step(
        self,
        layout: Layout,
        params: Mapping[str, Any],
        tokens: jax.Array,
        position: jax.Array,
        kept: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """Read the next tokens of every text.

        Reading a text in parts, for example token by token, must give the same logits as reading the whole text at
        once.

        Args:
            layout: the layout, as for `Model.loss`, but with L unsharded in every activation.
            params: the parameters, as for `Model.loss`.
            tokens: int32 [B, L], sharded as `batch_line` with L unsharded.
            position: int32, the number of tokens read before; this is the position of the first of `tokens`.
            kept: the arrays that the previous call returned, or zeros in the first call. Each is sharded as its line
                says.

        Returns:
            The logits [B, L, V] for the token after each of `tokens`, sharded as `logits_line`, and the kept arrays
            after this call.
        """


def next_tokens(
    layout: Layout, tokens: jax.Array, batch: str = "embedding.tokens", logits: str = "output.logits"
) -> tuple[jax.Array, jax.Array]:
    """Split a batch of tokens [B, L+1] into inputs [B, L] and labels [B, L]; a label is the token after an input.

    Args:
        layout: the layout.
        tokens: the tokens that `Model.loss` gets, with L unsharded.
        batch: the line with the spec of the batch. The inputs get this spec.
        logits: the line with the spec of the logits [B, L, V]. The labels get this spec with V removed.

    Returns:
        The inputs and the labels.

    Example:
        >>> import gspmd, jax.numpy as jnp
        >>> layout = Layout.load("replicated")
        >>> with jax.set_mesh(jax.make_mesh((1, 1, 1), ("x", "y", "z"))):
        ...     [each.tolist() for each in next_tokens(layout, jnp.array([[5, 6, 7]]))]
        [[[5, 6]], [[6, 7]]]
    """
    inputs, labels = layout.spec(batch), layout.spec(logits).without("V")
    whole = inputs.with_axes("L", ())
    moved = [(tokens[:, :-1], Equation.move(whole, inputs)), (tokens[:, 1:], Equation.move(whole, labels))]
    return reshard(*moved[0]), reshard(*moved[1])


def mean(x: jax.Array, spec: str | Spec) -> jax.Array:
    """Return the mean of a tensor, replicated on every device.

    Args:
        x: a tensor of any shape, such as the cross-entropy of every token [B, L].
        spec: the spec of the tensor.

    Example:
        >>> import gspmd, jax.numpy as jnp
        >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        ...     float(mean(gspmd.annotate(jnp.arange(4.0).reshape(2, 2), "B_xL"), "B_xL"))
        1.5
    """
    spec = Spec.parse(spec) if isinstance(spec, str) else spec
    return reshard(x, Equation.move(spec, Spec((), ()))) / x.size
