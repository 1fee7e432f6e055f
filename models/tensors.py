"""The parameters of a model before any layout: the path, layout key, initializer and number of layers of each one.

`gspmd_models.parameters` adds the specs of the parameters, and `ModelConfig` counts their elements. The files of public
checkpoints are read into these parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gspmd.layouts.distributions import Constant, Initialiser, Normal
from gspmd.layouts.rules.keys import dims_of

LatentConfig = Any
ModelConfig = Any
"""A `gspmd_models.ModelConfig`. It is not imported here, because its module imports this module to count parameters."""

SHARED = ("moe.shared_in", "moe.shared_gate", "moe.shared_hidden", "moe.shared_bias", "moe.shared_out")
"""The layout keys of shared experts. In their specs, F is the total width of all shared experts."""


OF_DENSE = ("ffn.w_in", "ffn.w_gate", "ffn.hidden", "ffn.b_in", "ffn.b_gate", "ffn.w_out")
"""The layout keys of feed-forward layers without experts. Their F may differ from the F of an expert."""

#: Layout keys under which a dimension has another size than usual: its letter, and the name of that size.
_OTHER_SIZES = {
    **{key: {"F": "shared"} for key in SHARED},
    **{key: {"F": "dense"} for key in OF_DENSE},
    "attention.latent_norm": {"Z": "rank"},
    "attention.w_k_up": {"Z": "rank", "D": "keys"},
    "attention.b_k_up": {"D": "keys"},
    "attention.w_v_up": {"Z": "rank", "D": "values"},
    "attention.b_v_up": {"D": "values"},
    "attention.w_o": {"D": "values"},
}


def line_sizes(sizes: Mapping[str, int], key: str) -> Mapping[str, int]:
    """Return the sizes of the dimensions of a layout key's tensors.

    Under some keys, a letter has another size than usual. F is the width of one expert; under the keys of shared
    experts it is the width of all `shared` experts together, and under the keys of dense layers the width of `dense`
    layers. In latent attention, Z is the width of the latent and the rotated key together. In the norm and the weights
    that read only the latent, Z is the `rank` of the latent. D is the width of a query. In the weights that make `keys`
    and `values`, D is the width of a key or of a value.

    Args:
        sizes: the result of `tensor_sizes`, or padded sizes.
        key: the layout key, such as `moe.shared_in`.
    """
    other = {dim: sizes[name] for dim, name in _OTHER_SIZES.get(key, {}).items() if name in sizes}
    return {**sizes, **other} if other else sizes


def width_of_shared(config: ModelConfig) -> int:
    """Return the total width of the shared experts, or 0 if there are none."""
    moe = config.moe
    return (moe.shared_width or moe.shared * config.feed_forward) if moe else 0


def latent_widths(config: ModelConfig) -> dict[str, int]:
    """Return the sizes that `line_sizes` needs by name for a model with latent attention; empty for other models."""
    latent = config.latent
    if latent is None:
        return {}
    return {"rank": latent.rank, "keys": config.head_size - latent.rotary, "values": latent.values}


@dataclass(frozen=True)
class Tensor:
    """One parameter of the model.

    Attributes:
        path: the parameter's path in the module, such as `blocks.0.ffn.w_in`.
        key: the parameter's key in a layout, such as `ffn.w_in`.
        initialise: a function from a random key and a shape to float32 values.
        layers: number of layers stacked in a leading dimension N; 0 for a parameter that is not stacked.
        in_lead: whether the parameter belongs to a block before the repeating blocks (`ModelConfig.lead`). A pipeline
            splits only the repeating blocks into stages.
    """

    path: str
    key: str
    initialise: Initialiser
    layers: int = 0
    in_lead: bool = False

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter is an operand of a matrix product, unlike norms and biases."""
        name = self.key.rpartition(".")[2]
        matrices = ("table", "router", "router_noise", "shared_in", "shared_gate", "shared_out")
        return name.startswith("w_") or name in matrices

    @property
    def in_encoder(self) -> bool:
        """Whether the parameter belongs to the encoder. The embedding table, which the decoder also reads, does not."""
        return self.path.startswith("encoder.")

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the parameter's shape, given the sizes from `tensor_sizes`; N comes first if layers are stacked."""
        of = line_sizes(sizes, self.key)
        return (*((self.layers,) if self.layers else ()), *(of[dim] for dim in dims_of(self.key)))

    def size(self, sizes: Mapping[str, int]) -> int:
        """Return the number of elements of the parameter, given the sizes from `tensor_sizes`."""
        return math.prod(self.shape(sizes))


def tensor_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the unpadded sizes of the parameters' dimensions, by letter and by name.

    A size has a name (such as `shared`, `dense` or `rank`) if a letter has this size only under some layout keys.
    `line_sizes` reads these names.
    """
    sizes = config.sizes(batch=1, length=1) | {"V": config.vocabulary, "R": config.relative_buckets}
    dense = config.moe.dense_feed_forward if config.moe else 0
    return sizes | latent_widths(config) | {"shared": width_of_shared(config), "dense": dense or config.feed_forward}


def tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Yield every parameter of a model except adapters and int8 scales, in the order in which the model uses them."""
    sizes = tensor_sizes(config)
    # Rows of unit length; the look-up multiplies by √E (Vaswani et al. 2017, section 3.4).
    yield Tensor("embedding.table", "embedding.table", scaled("E", sizes))
    if config.positions == "learned":
        yield Tensor("embedding.positions", "embedding.positions", scaled("E", sizes))
    if config.embedding_norm:
        yield Tensor("embedding.norm", "embedding.norm", ones)
        if config.norm_bias:
            yield Tensor("embedding.norm_bias", "embedding.norm_bias", zeros)
    if config.encoder_layers:
        yield from _stack(config, "encoder.", config.encoder_layers, sizes)
        yield Tensor("encoder.output.norm", "output.norm", ones)
        if config.norm_bias:
            yield Tensor("encoder.output.norm_bias", "output.norm_bias", zeros)
    yield from _stack(config, "", config.layers, sizes, cross=config.encoder_layers > 0)
    # With a tied table, the token's own row in the residual stream would give a logit of √E. Chowdhery et al. 2022,
    # section 5, scale tied logits by 1/√E, as T5 does; here the last norm starts at 1/√E and may grow, which learns
    # faster, and the initial loss is that of a uniform guess.
    yield Tensor("output.norm", "output.norm", Constant(sizes["E"] ** -0.5) if config.tied else ones)
    if config.norm_bias:
        yield Tensor("output.norm_bias", "output.norm_bias", zeros)
    if not config.tied:
        yield Tensor("output.table", "output.table", scaled("E", sizes))
    if config.output_bias:
        yield Tensor("output.bias", "output.bias", zeros)


def _stack(
    config: ModelConfig, prefix: str, layers: int, sizes: Mapping[str, int], *, cross: bool = False
) -> Iterator[Tensor]:
    """Yield the parameters of the blocks of the encoder or the decoder; their paths begin with `prefix`."""
    if config.positions == "relative":
        yield Tensor(f"{prefix}relative", "attention.relative", scaled("E", sizes))
    for place, numbers in enumerate(config.weight_stacks(layers)):
        for path, key, begin in _block(config, numbers[0], layers, sizes, cross=cross):
            yield Tensor(f"{prefix}blocks.{place}.{path}", key, begin, len(numbers), place < config.lead)


def _block(
    config: ModelConfig, number: int, layers: int, sizes: Mapping[str, int], *, cross: bool
) -> Iterator[tuple[str, str, Initialiser]]:
    serial = config.block == "serial"
    # Both norms of a parallel block are placed as the residual stream of feed-forward, from which both layers read.
    yield from _norms(config, *("attention.", "attention") if serial else ("", "ffn"))
    yield from _attention(config, "attention", layers, sizes)
    if cross:
        yield from _norms(config, "cross.", "cross")
        yield from _attention(config, "cross", layers, sizes)
    experts = config.moe if config.is_sparse(number) else None
    section = "moe" if experts else "ffn"
    if serial or config.parallel_norms == 2:
        yield from _norms(config, f"{section}.", "ffn")
    if experts:
        # A small variance keeps early routing nearly even. Fedus et al. 2021, section 2.4, reduce the variance of all
        # matrices to 0.1. Here it is reduced only for the router, and by depth for matrices at the end of a branch.
        # Noisy gating starts with logits 0 and equal noise (Shazeer et al. 2017, appendix A).
        begin = zeros if experts.noisy else scaled("E", sizes, variance=experts.router_scale)
        yield "moe.router", "moe.router", begin
        if experts.noisy:
            yield "moe.router_noise", "moe.router_noise", zeros
        for name in ("router_bias", "choice_bias"):
            if getattr(experts, name):
                yield f"moe.{name}", f"moe.{name}", zeros
    for name in ("w_in", "w_gate") if config.gated else ("w_in",):
        yield f"{section}.{name}", f"{section}.{name}", scaled("E", sizes)
    biases = [name for name in ("b_in", "b_gate") if config.ffn_bias and (config.gated or name == "b_in")]
    for name in biases:
        yield f"{section}.{name}", "moe.b_in" if experts else f"ffn.{name}", zeros
    out = f"{section}.w_out"
    yield out, out, scaled("F", line_sizes(sizes, out), depth=layers)
    if config.ffn_bias:
        yield f"{section}.b_out", f"{section}.b_out", zeros
    if experts and experts.shared:
        for name in ("in", "gate") if config.gated else ("in",):
            yield f"moe.shared.w_{name}", f"moe.shared_{name}", scaled("E", sizes)
        for name in biases:
            yield f"moe.shared.{name}", "moe.shared_bias", zeros
        wide = line_sizes(sizes, "moe.shared_out")
        yield "moe.shared.w_out", "moe.shared_out", scaled("F", wide, depth=layers)
        if config.ffn_bias:
            yield "moe.shared.b_out", "ffn.b_out", zeros
        if experts.shared_mix:
            yield "moe.shared_mix", "moe.shared_mix", scaled("E", sizes)


def _attention(
    config: ModelConfig, section: str, layers: int, sizes: Mapping[str, int]
) -> Iterator[tuple[str, str, Initialiser]]:
    if config.latent is not None:
        yield from _latent_attention(config, config.latent, layers, sizes)
        return
    for name in "qkv":
        yield f"{section}.w_{name}", f"{section}.w_{name}", scaled("E", sizes)
        if config.qkv_bias:
            yield f"{section}.b_{name}", f"{section}.b_{name}", zeros
    for name in ("q_norm", "k_norm") if config.qk_norm in ("head", "all") else ():
        yield f"{section}.{name}", f"{section}.{name}" + "_all" * (config.qk_norm == "all"), ones
    if config.sinks:
        yield f"{section}.sinks", f"{section}.sinks", zeros
    yield f"{section}.w_o", f"{section}.w_o", scaled("HD", sizes, depth=layers)
    if config.out_bias:
        yield f"{section}.b_o", f"{section}.b_o", zeros


def _latent_attention(
    config: ModelConfig, latent: LatentConfig, layers: int, sizes: Mapping[str, int]
) -> Iterator[tuple[str, str, Initialiser]]:
    if latent.query_rank:
        yield "attention.w_q_down", "attention.w_q_down", scaled("E", sizes)
        yield "attention.q_latent_norm", "attention.q_latent_norm", ones
        yield "attention.w_q_up", "attention.w_q_up", scaled("U", sizes)
    else:
        yield "attention.w_q", "attention.w_q", scaled("E", sizes)
    yield "attention.w_k_down", "attention.w_k_down", scaled("E", sizes)
    yield "attention.latent_norm", "attention.latent_norm", ones
    of_rank = line_sizes(sizes, "attention.w_v_up")
    for name in ("w_k_up", "w_v_up"):
        yield f"attention.{name}", f"attention.{name}", scaled("Z", of_rank)
    yield "attention.w_o", "attention.w_o", scaled("HD", of_rank, depth=layers)


def _norms(config: ModelConfig, path: str, section: str) -> Iterator[tuple[str, str, Initialiser]]:
    """Yield the parameters of the norms before and after a part of a block; all of them have the same layout key."""
    for name in {"before": ("norm",), "after": ("norm_after",), "both": ("norm", "norm_after")}[config.norms]:
        yield f"{path}{name}", f"{section}.norm", ones
        if config.norm_bias:
            yield f"{path}{name}_bias", f"{section}.norm_bias", zeros


def scaled(summed: str, sizes: Mapping[str, int], variance: float = 1.0, depth: int = 0) -> Normal:
    """Return a normal initializer with variance `variance` / fan-in, divided by 2 · `depth` unless `depth` is 0.

    The fan-in is the product of the sizes of the summed dimensions.
    """
    return Normal(math.sqrt(variance / math.prod(sizes[d] for d in summed) / max(1, 2 * depth)))


#: The initializer of norm scales.
ones = Constant(1.0)

#: The initializer of biases.
zeros = Constant(0.0)
