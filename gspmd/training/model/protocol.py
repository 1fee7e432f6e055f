"""The protocol of a user's own model: its settings, sizes, parameters and loss, and how it decodes."""

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
        line: the line of the layout with its spec, `"mixer.w_in"`. The layers of a scan share one line, and
            several parameters may share one too.
        dims: the letters of its dimensions in their order, `"EF"`, as in the line. Their sizes are its shape.
        initialise: maps a random key and the shape to float32 values: `Normal`, `Constant`, or one of
            `jax.nn.initializers`.
        layers: number of layers that are stacked in a leading N, each drawn with a key of its own; 0 for a parameter
            without layers. N is never sharded.
        float32: whether it is stored and used in float32, whatever `parameter_dtype` and `dtype` are, such as the
            matrix of a router. Parameters of one dimension always are.

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
        """Return its shape, with N first if layers are stacked."""
        return (*((self.layers,) if self.layers else ()), *(sizes[dim] for dim in self.dims))


@dataclass(frozen=True)
class Kept:
    """A state that a model keeps of the tokens that it has read, such as a cache. It begins as zeros.

    Attributes:
        line: the line of the layout with its spec, `"mixer.state"`.
        dims: the letters of its dimensions, as in the line. T is the most tokens that a text may have.
        layers: number of layers that are stacked in a leading N, which is never sharded; 0 for a state without layers.
        float32: whether it is float32, whatever the dtype of the matrices.
    """

    line: str
    dims: str
    layers: int = 0
    float32: bool = False


class Model(Protocol):
    """A model that `gspmd train --model module:Name` trains: a frozen dataclass of settings that has these methods.

    Its fields, all with defaults, are the keys of `[model]` and the flags `--model.FIELD`. Two more attributes are
    read if a class has them. `batch_line` is the line of the layout for a batch of tokens, with L unsharded
    (`"embedding.tokens"` by default). `flops_per_token(length)` returns the FLOPs of forward and backward pass, for the
    figures of speed (six for every parameter by default; Kaplan et al. 2020, arXiv 2001.08361, section 2.1).

    docs/your-model.md builds one, and examples/ has more.
    """

    def sizes(self, batch: int, length: int) -> Mapping[str, int]:
        """Return the size of every dimension by its letter, for `batch` sequences of `length` tokens."""

    def parameters(self, layout: Layout) -> Mapping[str, Parameter]:
        """Return every parameter by its path, `"blocks.w_in"`, in a fixed order. Paths and shapes do not depend on the
        layout."""

    def loss(
        self, layout: Layout, params: Mapping[str, Any], tokens: jax.Array, key: jax.Array | None, train: bool
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """Compute the loss of a batch, and its figures.

        It is called under the mesh, with the layout's lowering as the default, and has to be the same function in every
        layout.

        Args:
            layout: the layout, each of whose lines has one spec.
            params: the parameters, nested by their paths, `params["blocks"]["w_in"]`, each placed by its line:
                matrices in the dtype of `--dtype`, all others in float32.
            tokens: int32 [B, L+1], placed by `batch_line`.
            key: a random key; None in evaluation.
            train: True for an update; False for the held-out text.

        Returns:
            A float32 scalar, replicated on every device (`mean`), and figures for metrics.jsonl. One of them is
            `cross_entropy`, a scalar: the mean in nats, from which bits per byte are computed.
        """


class Decoder(Model, Protocol):
    """A model with which `gspmd generate` writes: it reads tokens one after the other, and keeps a state.

    `logits_line` is read if a class has it: the line of the logits (`"output.logits"` by default).
    """

    def kept(self) -> Mapping[str, Kept]:
        """Return every state that it keeps of a text, by a name of your choice."""

    def step(
        self,
        layout: Layout,
        params: Mapping[str, Any],
        tokens: jax.Array,
        position: jax.Array,
        kept: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """Read the next tokens of every text.

        Reading a text in parts, for example of one token each, has to give the same logits as reading it at once.

        Args:
            layout: as for `Model.loss`, with L unsharded in every activation.
            params: as for `Model.loss`.
            tokens: int32 [B, L], placed by `batch_line` with L unsharded.
            position: int32, the number of tokens of every text that were read before: the position of the first of
                these.
            kept: the state returned with the tokens before, zeros at first; each array placed by its line.

        Returns:
            The logits [B, L, V] of the token after each of these, placed by `logits_line`, and the new state.
        """


def next_tokens(
    layout: Layout, tokens: jax.Array, batch: str = "embedding.tokens", logits: str = "output.logits"
) -> tuple[jax.Array, jax.Array]:
    """Split a batch of tokens [B, L+1] into inputs and labels for the prediction of each next token, [B, L] each.

    Args:
        layout: the layout.
        tokens: the tokens that a loss takes, with L unsharded.
        batch: the line of the batch, to which the inputs are resharded.
        logits: the line of the logits [B, L, V], to which the labels are resharded.

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
        x: any shape, such as the cross-entropy of every token [B, L].
        spec: its spec.

    Example:
        >>> import gspmd, jax.numpy as jnp
        >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        ...     float(mean(gspmd.annotate(jnp.arange(4.0).reshape(2, 2), "B_xL"), "B_xL"))
        1.5
    """
    spec = Spec.parse(spec) if isinstance(spec, str) else spec
    return reshard(x, Equation.move(spec, Spec((), ()))) / x.size
