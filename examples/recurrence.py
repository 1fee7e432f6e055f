"""A custom model: a language model of gated linear recurrences, trained by `gspmd train` in any layout.

    gspmd train --model examples/recurrence:Recurrence --layout examples/recurrence.toml --steps 200
    gspmd train --model examples/recurrence:Recurrence --layout examples/recurrence.toml --explain
    gspmd generate --checkpoint runs/001 --prompt "To be"
    gspmd compile --model examples/recurrence:Recurrence --layout examples/recurrence.toml --topology tpu-v5e:8x8

Each channel of a layer has a state h_t = f_t·h_{t-1} + (1-f_t)·c_t, whose forget gate f and candidate c are computed
from the residual stream. An associative scan computes all steps in parallel.

Source: Feng et al. 2024, *Were RNNs All We Needed?* (arXiv 2410.01201), section 3.1, the minGRU.
Differs: the state is gated before it is added to the residual stream, as in Griffin (De et al. 2024, arXiv 2402.19427).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

import gspmd
from gspmd.ops import cross_entropy, embed
from gspmd.training.model import Constant, Kept, Normal, Parameter, mean, next_tokens


@dataclass(frozen=True)
class Recurrence:
    """A language model, with its sizes; its layers are scanned."""

    vocabulary: int = 256
    """Number of token ids."""
    embed: int = 128
    """Width of the residual stream."""
    channels: int = 256
    """Number of channels in a layer, each with its own recurrence."""
    layers: int = 4
    """Number of layers."""

    def sizes(self, batch, length):
        """Return the size of every dimension."""
        return {"B": batch, "L": length, "V": self.vocabulary, "E": self.embed, "F": self.channels}

    def parameters(self, layout):
        """Return every parameter by its path."""
        inward, outward = Normal(self.embed**-0.5), Normal((2 * self.layers * self.channels) ** -0.5)
        of_layer = {
            "norm": Parameter("recurrence.norm", "E", Constant(1.0), self.layers),
            "w_candidate": Parameter("recurrence.w_candidate", "EF", inward, self.layers),
            "w_forget": Parameter("recurrence.w_forget", "EF", inward, self.layers),
            "w_gate": Parameter("recurrence.w_gate", "EF", inward, self.layers),
            # A forget gate biased towards remembering: sigmoid(1) is 0.73.
            "b_forget": Parameter("recurrence.b_forget", "F", Constant(1.0), self.layers),
            "w_out": Parameter("recurrence.w_out", "FE", outward, self.layers),
        }
        return {
            "table": Parameter("embedding.table", "VE", Normal(self.embed**-0.5)),
            **{f"layers.{name}": parameter for name, parameter in of_layer.items()},
            "norm": Parameter("output.norm", "E", Constant(1.0)),
        }

    def loss(self, layout, params, tokens, key, train):
        """Return the mean cross-entropy of the next token."""
        inputs, labels = next_tokens(layout, tokens)
        logits, _ = self.logits(layout, params, inputs)
        spec = layout.spec("output.logits")
        entropy = mean(cross_entropy(logits, labels, spec), spec.without("V"))
        return entropy, {"cross_entropy": entropy}

    def kept(self):
        """Return the state to keep between steps: one number for every channel of every layer."""
        return {"state": Kept("recurrence.state", "BF", self.layers, float32=True)}

    def step(self, layout, params, tokens, position, kept):
        """Return the logits after these tokens, and the new state."""
        logits, state = self.logits(layout, params, tokens, kept["state"])
        return logits, {"state": state}

    def logits(self, layout, params, tokens, state=None):
        """Return the logits [B, L, V] of tokens [B, L], and the new state.

        If a state [N, B, F] is given, the tokens continue from this state.
        """
        at, output = layout.section("recurrence"), layout.section("output")
        last, kept = at.spec("hidden").without("L"), at.spec("state")  # specs in which states are computed and kept

        def layer(x, given):
            w, before = given
            before = None if before is None else gspmd.reshard(before, f"{kept} -> {last}")
            y = at.rms_norm("stream, norm", x, w["norm"])
            weights = w["w_candidate"], w["w_forget"], w["w_gate"]
            into = "stream, (w_candidate, w_forget, w_gate) -> (hidden, hidden, hidden)"
            candidate, forget, gate = at.einsum(into, y, weights)  # [B, L, E] -> 3 × [B, L, F]
            forget = jax.nn.sigmoid(at.add_bias("hidden, b_forget", forget, w["b_forget"]).astype(jnp.float32))
            h = recurrence(forget, (1 - forget) * candidate, before)
            x = x + at.einsum("hidden, w_out -> stream", h.astype(x.dtype) * jax.nn.silu(gate), w["w_out"])
            return x, None if before is None else gspmd.reshard(h[:, -1], f"{last} -> {kept}")

        equation = layout.section("embedding").equation("tokens, table -> recurrence.stream")
        x = embed(tokens, params["table"], equation) * self.embed**0.5  # [B, L] -> [B, L, E]
        x, state = jax.lax.scan(jax.checkpoint(layer), x, (params["layers"], state))
        x = output.rms_norm("recurrence.stream, norm", x, params["norm"])
        to_logits = "recurrence.stream, embedding.table -> logits"
        return output.einsum(to_logits, x, params["table"], preferred_element_type=jnp.float32), state


def recurrence(forget, added, before=None):
    """Return h_t = forget_t·h_{t-1} + added_t [B, L, F] for every t, starting from `before` [B, F], or from 0."""

    def two(first, second):
        (f1, a1), (f2, a2) = first, second
        return f1 * f2, f2 * a1 + a2

    kept, h = jax.lax.associative_scan(two, (forget, added), axis=1)
    return h if before is None else h + kept * before[:, None]
