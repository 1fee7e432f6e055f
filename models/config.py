"""The configuration of a model: sizes and choices, independent of its layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, inf, lcm
from typing import Any, Literal, get_args

from gspmd.annotate.errors import suggestion
from gspmd.layouts.rules.keys import dims_of
from gspmd.moe.config import MoEConfig
from gspmd.moe.experts.names import GATED, PLAIN

from .finetuning.config import TARGETS, LoraConfig
from .rope_scaling import RopeScaling
from .tensors import Tensor, tensor_sizes, tensors

BLOCKS = ("serial", "parallel")
POSITIONS = ("rotary", "relative", "alibi", "sinusoidal", "learned", "none")
NORMS = ("rms", "layer")
NORM_PLACES = ("before", "after", "both")
LAYER_KINDS = ("full", "sliding", "chunked", "unrotated")
HeadNorm = Literal["none", "head", "all", "rotated"]
HEAD_NORMS: tuple[HeadNorm, ...] = get_args(HeadNorm)
PAIRS = ("halves", "neighbours")
Remat = Literal["none", "full", "dots-except-hidden", "dots", "selective"]
REMATS: tuple[Remat, ...] = get_args(Remat)


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention: keys and values of all heads come from one latent vector of each token.

    A cache keeps that vector, and one rotated key that all heads share: rank + rotary elements for each token.

    Source: DeepSeek-AI 2024, *DeepSeek-V2* (arXiv 2405.04434), section 2.1.
    """

    rank: int = 512
    """Width of the latent of keys and values."""
    query_rank: int = 0
    """Width of the latent of queries; 0 if queries are made of the residual stream directly."""
    rotary: int = 64
    """Number of elements at the end of a query that are rotated by position, and width of the rotated key."""
    values: int = 128
    """Width of a head's values."""
    norm_epsilon: float = 1e-6
    """Number that is added to the mean square in the norms of the latents."""


@dataclass(frozen=True)
class ModelConfig:
    """Configure a transformer, decoder-only or encoder–decoder; the defaults make a small decoder on bytes.

    Example:
        >>> ModelConfig(embed=4096, layers=32, heads=16, kv_heads=1, head_size=256, feed_forward=16384,
        ...             vocabulary=256128, block="parallel").num_parameters
        8632537088

    Raises:
        ValueError: the settings have faults, such as sizes that do not fit one another. The message lists all faults.
    """

    vocabulary: int = 256
    """Number of tokens; 256 for a model on bytes."""
    vocabulary_multiple: int = 1
    """The embedding tables are padded to a multiple of this, so that a mesh divides their rows."""
    embed: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of blocks; in an encoder–decoder, the blocks of the decoder."""
    encoder_layers: int = 0
    """Number of blocks of the encoder, whose output every block of the decoder attends to; 0 if decoder-only."""
    start_token: int = 0
    """The token with which the decoder of an encoder–decoder begins: T5's padding token, or M2M-100's end of text."""
    heads: int = 8
    """Query heads."""
    kv_heads: int = 8
    """Key/value heads: `heads` for multi-head, 1 for multiquery, in between for grouped-query attention."""
    head_size: int = 16
    """Width of one head."""
    latent: LatentConfig | None = None
    """Multi-head latent attention of `heads` heads, with queries of `head_size`; None for keys and values made of
    the residual stream directly."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases."""
    out_bias: bool = False
    """Whether attention's output has a bias."""
    qk_norm: Literal[HeadNorm, True, False] = "none"
    """RMS norm of queries and keys: none; head: each head by itself before rotation, with one scale for all heads
    (Qwen3); all: all heads together before rotation (OLMo 2); rotated: each head by itself after rotation, without a
    scale, in rotated layers only (Llama 4). True means head, and False none."""
    qkv_clip: float | None = None
    """Bound c to which queries, keys and values are clipped after their products, -c to c (MPT); None for no bound."""
    sinks: bool = False
    """Whether each query head has a learned logit without a value in the denominator of its softmax (gpt-oss)."""
    score_softcap: float | None = None
    """Bound c of the scores of attention, which become c · tanh(score / c) (Gemma 2); None for no bound."""
    sliding_window: int | None = None
    """Number of tokens to which a token attends in sliding layers: the token itself and those just before it."""
    attention_chunk: int | None = None
    """Number of tokens in each chunk of a text in chunked layers, where a token attends to the tokens of its own chunk
    up to itself (Llama 4)."""
    layer_kinds: tuple[str, ...] = ()
    """Kinds of attention of successive blocks, a pattern that repeats: full; sliding, to the last `sliding_window`
    tokens; chunked, within chunks of `attention_chunk` tokens; unrotated: full, without rotary embedding. Empty for all
    sliding if there is a window, all chunked if there is a chunk, else all full."""
    query_growth: float = 0.0
    """Factor a by which queries in unrotated layers grow: at position p they are multiplied by 1 + a · ln(1 + ⌊(p + 1)
    / growth_interval⌋) (Llama 4); 0 for no growth."""
    growth_interval: int = 8192
    """Number of positions after which the factor of `query_growth` increases again."""
    feed_forward: int = 256
    """Width of the feed-forward layer, or of one expert."""
    activation: str = "swiglu"
    """swiglu, swiglu_clamped (gpt-oss) or geglu (two weights in), gelu (its tanh form), gelu_exact, relu or silu."""
    ffn_bias: bool = False
    """Whether the matrices of feed-forward layers, and of experts, have biases."""
    norms: str = "before"
    """Position of the norms of serial blocks: before (on the inputs of attention and feed-forward), after (on their
    outputs, OLMo 2) or both (Gemma 2)."""
    block: str = "serial"
    """serial, or parallel: attention and feed-forward share one norm and one reduction (PaLM)."""
    parallel_norms: int = 1
    """Number of norms of a parallel block: one that attention and feed-forward share, or one for each (GPT-NeoX)."""
    tied: bool = True
    """Whether the logits reuse the embedding table."""
    scale_embedding: bool = True
    """Whether embedded tokens are multiplied by √embed."""
    embedding_norm: bool = False
    """Whether embedded tokens are normalised before the first block (BLOOM)."""
    output_bias: bool = False
    """Whether the logits have a bias."""
    logit_softcap: float | None = None
    """Bound c of the logits, which become c · tanh(logit / c) (Gemma 2); None for no bound."""
    positions: str = "rotary"
    """rotary; relative: a bias of the scores for each bucket of distances, shared by all blocks of a stack (T5); alibi:
    a bias that falls with the distance of query and key, more steeply in some heads than in others (BLOOM); sinusoidal:
    constant vectors added to the embedded tokens (Transformer); learned: learned vectors, one for each of
    `context_length` positions (GPT-2); or none."""
    relative_buckets: int = 32
    """Number of buckets of distances."""
    relative_distance: int = 128
    """Distance of the last bucket, which has all keys that are this far away or further."""
    alibi_max: float = 8.0
    """For alibi, the exponent of the flattest head: the slopes of n heads are 2^(-alibi_max · i / n) for i = 1 .. n, if
    n is a power of two (`gspmd_models.alibi.slopes`)."""
    alibi_scaled: bool = False
    """Whether alibi's biases are multiplied by `attention_scale`, like the products of queries and keys (Falcon)."""
    position_offset: int = 0
    """Position of the first token, for sinusoidal positions (2 in M2M-100)."""
    attention_scale: float | None = None
    """Factor by which the scores of attention are multiplied (1 in T5); None for 1/√head_size."""
    rope_base: float = 10000.0
    """Base of the rotary position embedding's wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Stretching of wavelengths, for texts longer than those first trained on; None for no stretching."""
    local_rope_base: float | None = None
    """Base of the rotary position embedding in sliding layers, whose wavelengths are not stretched (Gemma 3); None if
    they are rotated like all other layers."""
    rotary_size: int = 0
    """Number of elements of a head, counted from its first, that are rotated by position; 0 for all."""
    rotary_pairs: str = "halves"
    """Pairs of elements that are rotated together: halves (one from each half), or neighbours (GPT-J)."""
    norm: str = "rms"
    """rms, or layer, which subtracts the mean too."""
    norm_bias: bool = False
    """Whether layer norms have a bias."""
    norm_epsilon: float = 1e-6
    """Number that is added to the mean square, or to the variance, in every norm."""
    remat: Literal[Remat, True, False] = "full"
    """Recomputation in the backward pass: none; full: each block from its input; dots: all except products with
    weights; dots-except-hidden: the same as dots, and also the feed-forward layer's hidden activations, and keys and
    values made of latents; selective: only attention (`gspmd_models.remat`). True means full, and False none."""
    offload: bool = False
    """Whether to keep activations for the backward pass in host memory instead of on the device."""
    context_length: int | None = None
    """Number of tokens of the longest text for which a public checkpoint says that it was made; longer texts are not
    generated. None for no limit."""
    int8: bool = False
    """Whether matrices are int8, with a float32 scale for every channel of their products (`quantize`), for serving."""
    stacked: bool = True
    """Whether the weights of all blocks of a kind are one array, over which a loop runs. Otherwise, for serving, every
    block has separate arrays, which TPUs load while they wait for collectives, and programs contain the blocks one
    after the other."""
    moe: MoEConfig | None = None
    """Experts in place of the feed-forward layer of every nth block; None for a model without experts."""
    lora: LoraConfig | None = None
    """Low-rank adapters of some weights; only the adapters are trained. None for no adapters."""

    def __post_init__(self) -> None:
        # Old settings and checkpoints have True or False as values of remat and qk_norm.
        if isinstance(self.remat, bool):
            object.__setattr__(self, "remat", "full" if self.remat else "none")
        if isinstance(self.qk_norm, bool):
            object.__setattr__(self, "qk_norm", "head" if self.qk_norm else "none")
        if self.lora and not self.lora.rank:
            object.__setattr__(self, "lora", None)
        faults = list(_faults(self))
        if faults:
            raise ValueError("this model cannot be built:\n" + "\n".join(f"  {fault}" for fault in faults))

    @property
    def remat_name(self) -> Remat:
        """The field `remat` as a name. Its values True and False are replaced by names when the config is made."""
        assert not isinstance(self.remat, bool)
        return self.remat

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer is gated, that is has two input weights."""
        return self.activation in GATED

    @property
    def is_dropless(self) -> bool:
        """Whether the model has experts without a capacity."""
        return self.moe is not None and self.moe.dispatch == "dropless"

    @property
    def rotary(self) -> int:
        """Number of elements of a head that are rotated by position."""
        if self.latent is not None:
            return self.latent.rotary
        return self.rotary_size or self.head_size

    def layer_kind(self, place: int) -> str:
        """Return the kind of attention of block number `place`, counted from 0: full, sliding, chunked or unrotated.

        >>> config = ModelConfig(sliding_window=32, layer_kinds=("sliding", "sliding", "full"), layers=6)
        >>> [config.layer_kind(number) for number in range(4)]
        ['sliding', 'sliding', 'full', 'sliding']
        """
        kinds = self._kinds
        return kinds[place % len(kinds)]

    @property
    def _kinds(self) -> tuple[str, ...]:
        if self.layer_kinds:
            return self.layer_kinds
        if self.sliding_window is not None:
            return ("sliding",)
        return ("full" if self.attention_chunk is None else "chunked",)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The distinct kinds of attention of the blocks, in the order in which blocks first have them."""
        return tuple(dict.fromkeys(self._kinds))

    def window_of(self, kind: str) -> int | None:
        """Return the number of most recent tokens to which a token attends in layers of this kind, None for all."""
        return self.sliding_window if kind == "sliding" else None

    def chunk_of(self, kind: str) -> int | None:
        """Return the number of tokens in a chunk, or None if layers of this kind do not attend in chunks."""
        return self.attention_chunk if kind == "chunked" else None

    def reach_of(self, kind: str) -> int | None:
        """Return the most tokens to which a token may attend in layers of this kind, or None if there is no limit."""
        return self.window_of(kind) or self.chunk_of(kind)

    def grows(self, kind: str) -> bool:
        """Return whether queries grow with their position in layers of this kind."""
        return kind == "unrotated" and self.query_growth > 0

    def rotary_of(self, kind: str) -> ModelConfig | None:
        """Return a config with the rotary embedding of layers of this kind, or None if the layers have no rotation."""
        if self.positions != "rotary" or kind == "unrotated":
            return None
        if self.latent is not None:  # the rotated part of a head is a tensor of its own
            return replace(self, latent=None, lora=None, head_size=self.latent.rotary, rotary_size=0)
        if kind != "sliding" or self.local_rope_base is None:
            return self
        return replace(self, rope_base=self.local_rope_base, rope_scaling=None, local_rope_base=None)

    @property
    def rotaries(self) -> tuple[ModelConfig, ...]:
        """The distinct configs that `rotary_of` returns, over all kinds of layers."""
        found = dict.fromkeys(map(self.rotary_of, self.kinds))
        return tuple(each for each in found if each is not None)

    @property
    def by_length(self) -> bool:
        """Whether the rotary embedding of a text depends on the text's length."""
        return any(each.rope_scaling is not None and each.rope_scaling.by_length for each in self.rotaries)

    @property
    def has_dense_layers(self) -> bool:
        """Whether some blocks have a feed-forward layer without experts."""
        return self.expert_layers < self.layers + self.encoder_layers

    @property
    def pattern(self) -> int:
        """Number of blocks in the repeating pattern of expert layers and attention kinds, after the `lead` blocks."""
        return self._repetition[1]

    @property
    def lead(self) -> int:
        """Number of blocks before the repeating pattern, such as the dense blocks of DeepSeek (`moe.dense_layers`)."""
        return self._repetition[0]

    @property
    def repeats(self) -> int:
        """Number of times that the pattern repeats."""
        return (self.layers - self.lead) // self.pattern

    @cached_property
    def _repetition(self) -> tuple[int, int]:
        """The numbers `lead` and `pattern`."""
        regular = lcm(self.moe.every if self.moe else 1, len(self.layer_kinds) or 1)
        further = len(self.layer_kinds) > 1 or (self.moe is not None and bool(self.moe.dense_layers))
        if not further or self.encoder_layers:  # both stacks of an encoder–decoder have the same pattern
            return 0, regular
        return shortest_repetition(tuple((self.layer_kind(each), self.is_sparse(each)) for each in range(self.layers)))

    @property
    def period(self) -> int:
        """Number of blocks in one step of the scan over blocks: those of the pattern, or all if `stacked` is off."""
        return self.pattern if self.stacked else self.layers

    @property
    def is_one_pattern(self) -> bool:
        """Whether the pattern occurs only once, because kinds of attention or layers with experts do not repeat."""
        every = self.moe.every if self.moe else 1
        return self.pattern == self.layers and self.pattern > every

    def stacks(self, layers: int | None = None) -> tuple[range, ...]:
        """Return the layers of each stack: one stack for each layer of `lead`, and one for each block of the pattern.

        Args:
            layers: number of layers of the encoder or the decoder; by default the number of layers of the decoder.

        >>> ModelConfig(layers=7, moe=MoEConfig(every=1, dense_layers=(0,))).stacks()
        (range(0, 1), range(1, 7))
        """
        layers, repeating = self.layers if layers is None else layers, range(self.lead, self.lead + self.pattern)
        alone = tuple(range(number, number + 1) for number in range(self.lead))
        return alone + tuple(range(number, layers, self.pattern) for number in repeating)

    def weight_stacks(self, layers: int | None = None) -> tuple[range, ...]:
        """Return the groups of layers that share weight arrays: the `stacks`, or single layers if `stacked` is off."""
        if self.stacked:
            return self.stacks(layers)
        return tuple(range(number, number + 1) for number in range(self.layers if layers is None else layers))

    @property
    def table_rows(self) -> int:
        """Number of rows of the embedding table: the vocabulary, padded to a multiple.

        >>> ModelConfig(vocabulary=250, vocabulary_multiple=64).table_rows
        256
        """
        return -(-self.vocabulary // self.vocabulary_multiple) * self.vocabulary_multiple

    @property
    def expert_place(self) -> int:
        """Position of the block with experts in each run of `moe.every` blocks; -1 if the model has no experts."""
        return -1 if self.moe is None else self.moe.every - 1 if self.moe.offset is None else self.moe.offset

    def is_sparse(self, place: int) -> bool:
        """Return whether the feed-forward layer of block number `place`, counted from 0, is a mixture of experts."""
        if self.moe is None or place in self.moe.dense_layers:
            return False
        return place % self.moe.every == self.expert_place

    @property
    def expert_layers(self) -> int:
        """Number of blocks with a mixture of experts, in encoder and decoder together."""
        return sum(map(self.is_sparse, (*range(self.layers), *range(self.encoder_layers))))

    @property
    def num_parameters(self) -> int:
        """Number of parameters, including the parameters of all experts, without the padding of tables."""
        return self._parameters(self.moe.experts if self.moe else 0)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that one token uses; of the experts, only those that the token chooses are counted."""
        return self._parameters(self.moe.used if self.moe else 0)

    def _parameters(self, experts: float) -> int:
        """Count the parameters as if expert layers had `experts` experts; routers are counted with all outputs."""
        sizes = tensor_sizes(self)
        return round(sum(experts * each.size(sizes | {"X": 1}) if _of_experts(each) else each.size(sizes)
                         for each in tensors(self)))  # fmt: skip

    def flops_per_token(self, length: int, source_length: int = 0, *, encoded: bool = False) -> int:
        """Return the FLOPs per trained token, forward and backward, without rematerialization.

        Args:
            length: number of tokens per sequence.
            source_length: number of tokens per source of an encoder–decoder. Pass 0 to use `length`. The FLOPs of a
                source are divided among the tokens of its target.
            encoded: whether sources have already been encoded, so that their FLOPs are not counted.

        Returns:
            6 FLOPs for each active parameter that is used in a matrix product, plus 12 · layers · heads · head_size ·
            length for attention scores. The length is replaced by the window in sliding layers, and by the chunk in
            chunked layers. The embedding lookup is not counted, but the logits are.

        Example:
            >>> ModelConfig(layers=1).flops_per_token(length=256)
            1572864

        Source: PaLM (arXiv 2204.02311), appendix B.
        Differs: norms, biases and an untied input table are not counted, because no matrix product uses them.
        """
        of_target = self._flops_of_matrices[1]
        scores = 6 * self.heads * (self.head_size + (self.latent.values if self.latent else self.head_size))
        reach = (self.reach_of(self.layer_kind(number)) or length for number in range(self.layers))
        of_target += scores * sum(min(each, length) for each in reach)
        if not self.encoder_layers:
            return of_target
        source_length = source_length or length
        of_target += scores * self.layers * source_length
        if encoded:
            return of_target
        return round(of_target + self.flops_per_source_token(source_length) * source_length / length)

    def flops_per_source_token(self, source_length: int) -> int:
        """Return the FLOPs per token of a source, forward and backward.

        This counts the encoder, and the keys and values that every block of the decoder computes from the encoder's
        output.

        Args:
            source_length: number of tokens per source.
        """
        return self._flops_of_matrices[0] + 12 * self.heads * self.head_size * self.encoder_layers * source_length

    @property
    def _flops_of_matrices(self) -> tuple[int, int]:
        """FLOPs of matrix products, for a source token and for a target token, at 6 FLOPs per active parameter."""
        sizes, of_source, of_target = tensor_sizes(self), 0.0, 0.0
        for each in tensors(self):
            if not each.is_matrix or (each.key == "embedding.table" and not self.tied):
                continue
            count: float = each.size(sizes)
            if self.moe and _of_experts(each):
                count *= self.moe.used / self.moe.experts
            if each.in_encoder or each.key in ("cross.w_k", "cross.w_v"):
                of_source += count
            else:
                of_target += count
        return 6 * round(of_source), 6 * round(of_target)

    def tokens_of_source(self, source_length: int, length: int) -> int:
        """Return the number of tokens of a source, or 0 if the model has no encoder.

        It is `source_length`, or `length` if `source_length` is 0.

        >>> ModelConfig(encoder_layers=4).tokens_of_source(0, 128), ModelConfig().tokens_of_source(0, 128)
        (128, 0)
        """
        return (source_length or length) if self.encoder_layers else 0

    def common_sizes(self, batch: int, length: int, source_length: int = 0) -> dict[str, int]:
        """Return the sizes that the mesh axes must divide if encoder and decoder share the lines of a layout.

        L is the greatest common divisor of the lengths of source and target. C is the greatest common divisor of the
        capacities of an expert in encoder and decoder.

        Args:
            batch, length, source_length: see `sizes`.

        Example:
            >>> sizes = ModelConfig(encoder_layers=4).common_sizes(batch=8, length=96, source_length=512)
            >>> sizes["L"], sizes["T"]
            (32, 512)
        """
        source = self.tokens_of_source(source_length, length)
        sizes = self.sizes(batch, gcd(length, source), source)
        if self.moe and not self.is_dropless:
            slots = [self.moe.capacity(batch * each // sizes["G"]) for each in (length, source)]
            sizes["C"] = gcd(*slots) if source else slots[0]
        return sizes

    def sizes(self, batch: int, length: int, source_length: int = 0) -> dict[str, int]:
        """Return the size of every dimension that a layout may shard, for `Layout.check`.

        Args:
            batch: number of sequences per step, over all devices.
            length: number of tokens per sequence.
            source_length: T, the number of tokens per source sequence of an encoder–decoder. Pass 0 to use `length`.

        Example:
            >>> ModelConfig().sizes(batch=32, length=256)["F"]
            256
        """
        sizes = {
            "B": batch,
            "L": length,
            "T": source_length or length,
            "E": self.embed,
            "F": self.feed_forward,
            "V": self.table_rows,
            "H": self.heads,
            "K": self.kv_heads,
            "D": self.head_size,
            "N": self.repeats if self.stacked else 1,
        }
        if self.positions == "relative":
            sizes["R"] = self.relative_buckets
        if self.latent:
            sizes |= {"Z": self.latent.rank + self.latent.rotary, "U": self.latent.query_rank}
        if self.positions == "learned":
            sizes["P"] = self.context_length or 0
        if self.moe:
            sizes |= {"X": self.moe.experts, "G": self.moe.groups or batch}
        return sizes


def shortest_repetition(layers: tuple[Any, ...]) -> tuple[int, int]:
    """Return the number of layers before a repeating pattern, and the number of layers in the pattern.

    The pattern is the one for which the sum of these numbers is least. If no pattern repeats, all layers are one
    pattern.

    >>> shortest_repetition(("dense", "sparse", "sparse", "sparse")), shortest_repetition(("full", "sliding", "full"))
    ((1, 1), (0, 3))
    """
    count = len(layers)
    found = [
        (lead + pattern, lead, pattern)
        for lead in range(count)
        for pattern in range(1, (count - lead) // 2 + 1)
        if (count - lead) % pattern == 0 and layers[lead + pattern :] == layers[lead:-pattern]
    ]
    return min(found, default=(count, 0, count))[1:]


def _of_experts(tensor: Tensor) -> bool:
    """Return whether every expert has its own copy of a parameter. A router only has one output per expert."""
    return "X" in dims_of(tensor.key) and not tensor.key.startswith(("moe.router", "moe.choice_bias"))


_WIDTHS = ("kv_heads", "head_size", "feed_forward")


def _faults(config: ModelConfig):
    for name in ("vocabulary", "vocabulary_multiple", "embed", "layers", "heads", *_WIDTHS):
        if getattr(config, name) < 1:
            yield f"{name} is {getattr(config, name)}; it must be at least 1"
        elif getattr(config, name) >= 2**31:  # XLA's sizes of dimensions are int32
            yield f"{name} is {getattr(config, name)}; it must be less than 2**31"
    choices = {"activation": PLAIN, "block": BLOCKS, "norm": NORMS, "rotary_pairs": PAIRS, "remat": REMATS,
               "positions": POSITIONS, "norms": NORM_PLACES, "qk_norm": HEAD_NORMS}  # fmt: skip
    for name, known in choices.items():
        if getattr(config, name) not in known:
            near = suggestion(str(getattr(config, name)), known).strip()
            remedy = f"one of {', '.join(known)}" + (f". {near}" if near else "")
            yield f"{name} is {getattr(config, name)!r}; it must be {remedy}"
    if config.offload and config.remat == "none":
        yield (
            "offload moves activations by their names, and under remat none they have no names; set remat, for example "
            "to full, or leave offload out"
        )
    for name in ("context_length", "sliding_window", "attention_chunk"):
        if getattr(config, name) is not None and getattr(config, name) < 1:
            yield f"{name} is {getattr(config, name)}; it must be at least 1, or be left out"
    for name in ("score_softcap", "logit_softcap", "local_rope_base", "qkv_clip"):
        if getattr(config, name) is not None and not 0 < getattr(config, name) < inf:
            yield f"{name} is {getattr(config, name)}; it must be positive, or be left out"
    for name in ("rope_base", "norm_epsilon"):
        if not 0 < getattr(config, name) < inf:
            yield f"{name} is {getattr(config, name)}; it must be positive"
    if not 0 <= config.rotary_size <= config.head_size:
        yield f"rotary_size is {config.rotary_size}; it must be at most head_size ({config.head_size}), or 0 for all"
    elif config.rotary % 2 and config.positions == "rotary":
        name = "rotary_size" if config.rotary_size else "head_size"
        yield f"{name} is {config.rotary}; rotary position embedding turns pairs, so it must be even"
    if config.parallel_norms not in (1, 2):
        yield f"parallel_norms is {config.parallel_norms}; it must be 1 or 2"
    elif config.parallel_norms == 2 and config.block != "parallel":
        yield 'parallel_norms is 2, but block is serial, which has two norms anyway; set block = "parallel"'
    if config.norm_bias and config.norm == "rms":
        yield 'norm_bias is set, but an RMS norm has no bias; set norm = "layer"'
    if config.kv_heads > 0 and config.heads % config.kv_heads:
        divisors = ", ".join(str(each) for each in range(1, config.heads + 1) if config.heads % each == 0)
        yield f"heads is {config.heads}, which kv_heads ({config.kv_heads}) does not divide; it may be {divisors}"
    if config.lora:
        lacks = [key for key in config.lora.targets if not _has(config, key)]
        if lacks:
            there = ", ".join(key for key in TARGETS if _has(config, key))
            yield f"lora.targets has {', '.join(lacks)}, but this model has no such weight; it has {there}"
        if config.int8:
            yield "lora is set, but a model with int8 weights cannot be trained; merge the adapters first"
    if config.encoder_layers and not config.stacked:
        yield "stacked is off, but encoder_layers is set; blocks of an encoder–decoder are stacked"
    yield from _kind_faults(config)
    yield from _latent_faults(config)
    for name in ("layers", "encoder_layers"):
        if config.moe and config.moe.every > 0 and getattr(config, name) % config.moe.every:
            yield f"{name} is {getattr(config, name)}, which moe.every ({config.moe.every}) does not divide"
    if config.moe and config.moe.dense_layers:
        dense = ", ".join(map(str, config.moe.dense_layers))
        if config.moe.dense_layers[-1] >= config.layers > 0:
            yield f"moe.dense_layers has {config.moe.dense_layers[-1]}, but the last layer is {config.layers - 1}"
        elif config.layers > 0 and not config.expert_layers:
            yield f"moe.dense_layers are {dense}, so none of the {config.layers} layers has experts; leave some out"
        elif already := [each for each in config.moe.dense_layers if each % config.moe.every != config.expert_place]:
            named = ", ".join(map(str, already))
            yield f"moe.dense_layers has {named}, dense already with moe.every = {config.moe.every}; leave them out"
        if config.encoder_layers:
            yield "moe.dense_layers is set, but both stacks of an encoder–decoder have one pattern; leave it out"
    if config.moe and config.moe.dense_feed_forward and not config.has_dense_layers:
        yield f"moe.dense_feed_forward is {config.moe.dense_feed_forward}, but every layer has experts; leave it out"
    yield from _position_faults(config)
    yield from _scaling_faults(config)
    yield from _encoder_faults(config)


def _kind_faults(config: ModelConfig):
    for kind in dict.fromkeys(config.layer_kinds):
        if kind not in LAYER_KINDS:
            near = suggestion(str(kind), LAYER_KINDS).strip()
            yield f"layer_kinds has {kind!r}; its kinds are {', '.join(LAYER_KINDS)}" + (f". {near}" if near else "")
    if config.layer_kinds and config.layers % len(config.layer_kinds):
        yield f"layers is {config.layers}, which the {len(config.layer_kinds)} layer_kinds do not divide"
    elif config.layer_kinds and config.moe and config.layers % (both := lcm(config.moe.every, len(config.layer_kinds))):
        yield (
            f"layers is {config.layers}, and the pattern of layer_kinds ({len(config.layer_kinds)}) and of experts "
            f"(moe.every = {config.moe.every}) repeats after {both}; it must divide layers"
        )
    for kind, name in (("sliding", "sliding_window"), ("chunked", "attention_chunk")):
        size = getattr(config, name)
        if kind in config.layer_kinds and size is None:
            yield f"layer_kinds has {kind!r}, but there is no {name}; set it"
        if config.layer_kinds and kind not in config.layer_kinds and size is not None:
            yield f"{name} is {size}, but layer_kinds has no {kind!r}; leave it out"
    if not config.layer_kinds and config.sliding_window is not None and config.attention_chunk is not None:
        yield "sliding_window and attention_chunk are set, but layer_kinds does not assign them to layers; set it"
    if not 0 <= config.query_growth < inf:
        yield f"query_growth is {config.query_growth}; it must not be negative"
    elif config.query_growth and "unrotated" not in config.layer_kinds:
        yield f"query_growth is {config.query_growth}, but layer_kinds has no 'unrotated'; leave it out"
    if config.growth_interval < 1:
        yield f"growth_interval is {config.growth_interval}; it must be at least 1"
    elif config.growth_interval != ModelConfig.growth_interval and not config.query_growth:
        yield f"growth_interval is {config.growth_interval}, but query_growth is 0; leave it out"
    if config.qk_norm == "rotated" and (config.positions != "rotary" or {*config.kinds} == {"unrotated"}):
        yield "qk_norm is 'rotated', but no layers are rotated; leave it out"
    if config.local_rope_base is not None and (config.sliding_window is None or config.positions != "rotary"):
        yield "local_rope_base is set, but there are no sliding layers that are rotated; leave it out"
    if config.local_rope_base is not None and config.rope_scaling is not None and {*config.kinds} == {"sliding"}:
        yield "rope_scaling is set, but all layers are sliding and rotated by local_rope_base; leave one out"
    if "unrotated" in config.layer_kinds and config.positions != "rotary":
        yield f"layer_kinds has 'unrotated', but positions are {config.positions}; write 'full'"
    if config.norms != "before" and config.block != "serial":
        yield f'norms are {config.norms!r}, but a parallel block has norms only before it; set norms = "before"'


def _latent_faults(config: ModelConfig):
    latent = config.latent
    if latent is None:
        return
    for name in ("rank", "rotary", "values"):
        if getattr(latent, name) < 1:
            yield f"latent.{name} is {getattr(latent, name)}; it must be at least 1"
    if not 0 < latent.norm_epsilon < inf:
        yield f"latent.norm_epsilon is {latent.norm_epsilon}; it must be positive"
    if latent.query_rank < 0:
        yield f"latent.query_rank is {latent.query_rank}; it must not be negative"
    if latent.rotary % 2 or not latent.rotary < config.head_size:
        yield f"latent.rotary is {latent.rotary}; it must be even, and less than head_size ({config.head_size})"
    if config.kv_heads != config.heads:
        yield f"kv_heads is {config.kv_heads}, but latent attention has keys for each of {config.heads} heads; set both"
    unread = {"qkv_bias": False, "out_bias": False, "qk_norm": "none", "rotary_size": 0, "sinks": False,
              "sliding_window": None, "attention_chunk": None, "layer_kinds": (), "positions": "rotary",
              "block": "serial", "encoder_layers": 0, "qkv_clip": None}  # fmt: skip
    for name, only in unread.items():
        if getattr(config, name) != only:
            yield f"latent attention has no {name} (given: {getattr(config, name)!r}); leave it out"


def _position_faults(config: ModelConfig):
    if config.attention_scale is not None and not 0 < config.attention_scale < inf:
        yield f"attention_scale is {config.attention_scale}; it must be positive, or be left out"
    if config.relative_buckets < 4 or config.relative_buckets % 2:
        yield f"relative_buckets is {config.relative_buckets}; it must be even, and at least 4"
    if config.relative_distance <= config.relative_buckets // 2:
        least = f"for {config.relative_buckets} buckets, at least {config.relative_buckets // 2 + 1}"
        yield f"relative_distance is {config.relative_distance}; {least}"
    if not 0 < config.alibi_max < inf:
        yield f"alibi_max is {config.alibi_max}; it must be positive"
    of = {
        "relative": ("relative_buckets", "relative_distance"),
        "alibi": ("alibi_max", "alibi_scaled"),
        "sinusoidal": ("position_offset",),
    }
    for kind, names in of.items():
        for name in names if config.positions != kind else ():
            if getattr(config, name) != getattr(ModelConfig, name):
                fact = f"{name} is {getattr(config, name)}, but positions are {config.positions}"
                yield f'{fact}; set positions = "{kind}"'
    if config.positions == "learned" and config.context_length is None:
        yield "positions are learned, with one vector for each position; set context_length, their number"
    if config.positions == "sinusoidal" and config.embed % 2:
        yield f"embed is {config.embed}; sinusoidal positions have pairs of a sine and a cosine, so it must be even"


def _scaling_faults(config: ModelConfig):
    scaling = config.rope_scaling
    if scaling is None:
        return
    pairs = len(scaling.short_factors)
    if scaling.kind == "longrope" and pairs != config.rotary // 2:
        fact = f"rope_scaling has {pairs} short_factors and long_factors"
        yield f"{fact}, but a head has {config.rotary // 2} rotated pairs; give one of each for every pair"
    if scaling.kind == "dynamic" and config.rotary <= 2:
        yield "rope_scaling is dynamic, but a head has only one rotated pair, whose wavelength is never changed"


def _encoder_faults(config: ModelConfig):
    if config.encoder_layers < 0:
        yield f"encoder_layers is {config.encoder_layers}; it must not be negative"
    if not config.encoder_layers:
        if config.start_token:
            yield f"start_token is {config.start_token}, but a decoder-only model begins with text; set encoder_layers"
        return
    if not 0 <= config.start_token < config.vocabulary:
        yield f"start_token is {config.start_token}, which is not a token of {config.vocabulary}"
    if config.block != "serial":
        yield 'block is parallel, but cross-attention has a norm of its own; set block = "serial"'
    if config.qk_norm != "none":
        yield "qk_norm is set, but cross-attention has no norms of heads; leave it out"
    for name in ("sliding_window", "attention_chunk", "score_softcap"):
        if getattr(config, name) is not None:
            yield f"an encoder–decoder has no {name} (given: {getattr(config, name)}); leave it out"
    if config.positions in ("learned", "alibi"):
        fact = f"positions are {config.positions}, which an encoder–decoder does not have"
        yield f"{fact}; relative, sinusoidal and rotary are"
    if config.embedding_norm or config.qkv_clip is not None:
        yield "embedding_norm and qkv_clip are only for decoder-only models; leave them out of an encoder–decoder"
    if config.layer_kinds or config.sinks or config.norms != "before":
        yield "layer_kinds, sinks and norms are only for decoder-only models; leave them out of an encoder–decoder"


def _has(config: ModelConfig, key: str) -> bool:
    """Return whether the model has the weight `key`, which is one of the weights that can have an adapter."""
    section, name = key.split(".")
    if name.endswith("gate") and not config.gated:
        return False
    if section == "attention":
        latent, query = ("w_k_down", "w_k_up", "w_v_up"), ("w_q_down", "w_q_up")
        if config.latent is None:
            return name not in latent + query
        return name in (*latent, "w_o", *(query if config.latent.query_rank else ("w_q",)))
    shared = config.moe is not None and config.moe.shared > 0
    return {
        "cross": config.encoder_layers > 0,
        "ffn": config.has_dense_layers,
        "moe": shared,
        "output": not config.tied,
    }[section]
