"""The protocol of a model of one's own: its settings, sizes, parameters and loss, and how it decodes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from gspmd.annotate.equation import Equation
from gspmd.annotate.spec import Spec
from gspmd.layouts import Layout
from gspmd.layouts.initial import Initialiser
from gspmd.ops._einsum import reshard


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model.

    Attributes:
        line: the line of the layout that says where it lies, `"mixer.w_in"`. The layers of a scan share one line, and
            so may several parameters.
        dims: the letters of its dimensions in their order, `"EF"`: those of the line. Their sizes are its shape.
        initialise: from a random key and the shape to float32 values: `Normal`, `Constant`, or one of
            `jax.nn.initializers`.
        layers: how many layers are stacked in a leading N, each drawn with a key of its own; 0 for a parameter that is
            no stack. N is never sharded.
        float32: whether it is stored in float32, and taken so, whatever `parameter_dtype` and `dtype` are, as the
            matrix of a router is. Parameters of one dimension always are.

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
        """Return its shape, with N first where layers are stacked."""
        return (*((self.layers,) if self.layers else ()), *(sizes[dim] for dim in self.dims))


@dataclass(frozen=True)
class Kept:
    """The state that a model keeps of the tokens that it has read, or its cache. It begins as zeros.

    Attributes:
        line: the line of the layout that says where it lies, `"mixer.state"`.
        dims: the letters of its dimensions: those of the line. T is how many tokens a text may have.
        layers: how many layers are stacked in a leading N, which is never sharded; 0 for what is no stack.
        float32: whether it is float32, whatever the dtype of the matrices.
    """

    line: str
    dims: str
    layers: int = 0
    float32: bool = False


class Model(Protocol):
    """A model that `gspmd train --model module:Name` trains: a frozen dataclass of settings that has these methods.

    Its fields, all with defaults, are the keys of `[model]` and the flags `--model.FIELD`. Two more attributes are
    read where a class has them: `batch_line`, the line of the layout where a batch of tokens lies, with its L whole
    (`"embedding.tokens"` without); and `flops_per_token(length)`, of forward and backward pass, for the figures of
    speed (six for every parameter without; Kaplan et al. 2020, arXiv 2001.08361, section 2.1).

    docs/your-model.md builds one, and examples/ has more.
    """

    def sizes(self, batch: int, length: int) -> Mapping[str, int]:
        """Return the size of every dimension by its letter, for so many sequences of so many tokens."""

    def parameters(self, layout: Layout) -> Mapping[str, Parameter]:
        """Return every parameter by its path, `"blocks.w_in"`, in a fixed order. Paths and shapes are those of any
        layout."""

    def loss(
        self, layout: Layout, params: Mapping[str, Any], tokens: jax.Array, key: jax.Array | None, train: bool
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """Compute the loss of a batch, and its figures.

        It is called under the mesh, with the layout's lowering in force, and has to be the same function in every
        layout.

        Args:
            layout: the layout, each of whose lines has one spec.
            params: the parameters, nested by their paths, `params["blocks"]["w_in"]`, each placed as its line says:
                matrices in the dtype of `--dtype`, all others in float32.
            tokens: int32 [B, L+1], placed as `batch_line`.
            key: a random key; None in evaluation.
            train: whether for an update; False for the held-out text.

        Returns:
            A float32 scalar, held whole by every device (`mean`), and figures for metrics.jsonl: `cross_entropy` among
            them, a scalar, the mean in nats that bits per byte are computed from.
        """


class Decoder(Model, Protocol):
    """A model that `gspmd generate` writes with: it reads tokens one after the other, and keeps what it has to.

    `logits_line` is read where a class has it, the line of the logits (`"output.logits"` without).
    """

    def kept(self) -> Mapping[str, Kept]:
        """Return all that it keeps of a text, by a name of one's own."""

    def step(
        self,
        layout: Layout,
        params: Mapping[str, Any],
        tokens: jax.Array,
        position: jax.Array,
        kept: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """Read the next tokens of every text.

        To read a text in parts, one token each say, has to give the logits of reading it at once.

        Args:
            layout: as of `Model.loss`, with L whole in every activation.
            params: as of `Model.loss`.
            tokens: int32 [B, L], placed as `batch_line` with L whole.
            position: int32, how many tokens of every text have been read: that of the first of these.
            kept: what was returned with the tokens before, zeros at first; each placed as its line says.

        Returns:
            The logits [B, L, V] of the token behind each of these, placed as `logits_line`, and what is kept now.
        """


def next_tokens(
    layout: Layout, tokens: jax.Array, batch: str = "embedding.tokens", logits: str = "output.logits"
) -> tuple[jax.Array, jax.Array]:
    """Split a batch of tokens [B, L+1] into inputs and labels of the prediction of each next one, [B, L] each.

    Args:
        layout: the layout.
        tokens: as a loss takes them, with L whole.
        batch: the line of the batch, where the inputs are brought to.
        logits: the line of the logits [B, L, V], where the labels are brought to.

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
    """Return the mean of a tensor, whole on every device.

    Args:
        x: any shape, such as the cross-entropy of every token [B, L].
        spec: where it lies.

    Example:
        >>> import gspmd, jax.numpy as jnp
        >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        ...     float(mean(gspmd.annotate(jnp.arange(4.0).reshape(2, 2), "B_xL"), "B_xL"))
        1.5
    """
    spec = Spec.parse(spec) if isinstance(spec, str) else spec
    return reshard(x, Equation.move(spec, Spec((), ()))) / x.size
