"""The protocol of a custom model: its settings, sizes, parameters and loss, and its decoding."""

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
        line: the line of the layout that has its spec, such as `"mixer.w_in"`. Layers that are scanned share one line,
            and so may several parameters.
        dims: the letters of its dimensions in the order of the line, such as `"EF"`. Their sizes form its shape.
        initialise: a function from a random key and the shape to float32 values: `Normal`, `Constant`, or one of
            `jax.nn.initializers`.
        layers: the number of layers stacked in a leading dimension N, each initialized with its own key; 0 for a
            parameter that is not stacked. N is never sharded.
        float32: whether it is stored and passed to the loss in float32, whatever `parameter_dtype` and `dtype` are, as
            for the matrix of a router. Parameters of one dimension are always float32.

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
        """Return the parameter's shape for the sizes of dimensions, with N first if layers are stacked."""
        return (*((self.layers,) if self.layers else ()), *(sizes[dim] for dim in self.dims))


@dataclass(frozen=True)
class Kept:
    """A state or cache in which a model keeps what it has read of a text; its elements are zero at first.

    Attributes:
        line: the line of the layout that has its spec, such as `"mixer.state"`.
        dims: the letters of its dimensions, as in the line. The size of T is the largest number of tokens of a text.
        layers: the number of layers stacked in a leading dimension N, which is never sharded; 0 if it is not stacked.
        float32: whether the array is float32, whatever the dtype of matrices.
    """

    line: str
    dims: str
    layers: int = 0
    float32: bool = False


class Model(Protocol):
    """A model that `gspmd train --model module:Name` trains: a frozen dataclass of settings that has these methods.

    Its fields, all with defaults, are the keys of `[model]` and the flags `--model.FIELD`. A class may have two more
    attributes: `batch_line`, the line with the spec of a batch of tokens, in which L is then left unsharded (by default
    `"embedding.tokens"`); and `flops_per_token(length)`, the FLOPs of forward and backward pass, for the reported speed
    (by default six for every parameter; Kaplan et al. 2020, arXiv 2001.08361, section 2.1).

    docs/your-model.md builds one, and examples/ has more.
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
        """Compute the loss of a batch, and metrics of it.

        It is called under the run's mesh and the layout's lowering. Its values must not depend on the layout.

        Args:
            layout: the layout, with one spec for every line.
            params: the parameters, nested by their paths, `params["blocks"]["w_in"]`, each sharded as its line says:
                matrices in the dtype of `--dtype`, all others in float32.
            tokens: int32 [B, L+1], sharded as `batch_line`.
            key: a random key; None in evaluation.
            train: True for an update, False for an evaluation.

        Returns:
            The loss, a float32 scalar replicated on every device (as `mean` makes it), and metrics for metrics.jsonl.
            One of them is `cross_entropy`, a scalar: the mean in nats, from which bits per byte are computed.
        """


class Decoder(Model, Protocol):
    """A model with which `gspmd generate` generates text: it reads tokens in parts, and keeps state in between.

    A class may have the attribute `logits_line`, the line with the spec of the logits (by default `"output.logits"`).
    """

    def kept(self) -> Mapping[str, Kept]:
        """Return every array that the model keeps for a text, under a name of its choice."""

    def step(
        self,
        layout: Layout,
        params: Mapping[str, Any],
        tokens: jax.Array,
        position: jax.Array,
        kept: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """Read the next tokens of every text.

        Reading a text in parts, for example token by token, must give the same logits as reading all of it at once.

        Args:
            layout: the layout of `Model.loss`, with L unsharded in every activation.
            params: the parameters of `Model.loss`.
            tokens: int32 [B, L], sharded as `batch_line` with L unsharded.
            position: int32, the number of tokens read before, which is the position of the first of `tokens`.
            kept: the arrays that the previous call returned, or zeros in the first call; each is sharded as its line
                says.

        Returns:
            The logits [B, L, V] for the token after each of `tokens`, sharded as `logits_line`; and the new kept
            arrays.
        """


def next_tokens(
    layout: Layout, tokens: jax.Array, batch: str = "embedding.tokens", logits: str = "output.logits"
) -> tuple[jax.Array, jax.Array]:
    """Split a batch of tokens [B, L+1] into inputs [B, L] and labels [B, L], which are the next token at each position.

    Args:
        layout: the layout.
        tokens: the tokens of `Model.loss`, with L unsharded.
        batch: the line with the spec of the batch, which the inputs get.
        logits: the line with the spec of the logits [B, L, V], whose B and L the labels get.

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
