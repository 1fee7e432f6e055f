"""The configuration of a model: sizes and choices, independent of its layout."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, inf
from typing import Literal, get_args

from gspmd.annotate.errors import suggestion
from gspmd.layouts.rules.keys import dims_of
from gspmd.moe.config import MoEConfig
from gspmd.moe.experts.activation import GATED, PLAIN

from .finetuning.config import LoraConfig
from .tensors import Tensor, tensor_sizes, tensors

BLOCKS = ("serial", "parallel")
POSITIONS = ("rotary", "relative", "sinusoidal", "none")
NORMS = ("rms", "layer")
PAIRS = ("halves", "neighbours")
Remat = Literal["none", "full", "dots-except-hidden", "dots", "selective"]
REMATS: tuple[Remat, ...] = get_args(Remat)


@dataclass(frozen=True)
class RopeScaling:
    """Stretch the long wavelengths of the rotary position embedding, for sequences longer than those first trained on.

    Wavelengths above original_length / low_frequency are multiplied by `factor`. Those below original_length /
    high_frequency are unchanged. Between the two the frequency is interpolated.

    Source: the reference code of Llama 3.1 (`apply_scaling`), and `rope_type = "llama3"` of transformers.
    """

    factor: float = 8.0
    """Factor by which long wavelengths are multiplied."""
    low_frequency: float = 1.0
    """Turns within the original length below which a wavelength is multiplied by the full factor."""
    high_frequency: float = 4.0
    """Turns within the original length above which a wavelength is unchanged."""
    original_length: int = 8192
    """Length of the sequences first trained on."""

    def __post_init__(self) -> None:
        if not (self.factor > 0 and 0 < self.low_frequency < self.high_frequency and self.original_length > 0):
            raise ValueError(
                f"cannot scale rotary wavelengths with {self}: factor and original_length must be positive, and "
                "low_frequency positive and below high_frequency"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Configure a transformer, a decoder alone or an encoder–decoder; by default a small decoder on bytes.

    Example:
        >>> ModelConfig(embed=4096, layers=32, heads=16, kv_heads=1, head_size=256, feed_forward=16384,
        ...             vocabulary=256128, block="parallel").num_parameters
        8632537088

    Raises:
        ValueError: listing every fault, if the sizes do not fit one another.
    """

    vocabulary: int = 256
    """Number of tokens; 256 reads bytes."""
    vocabulary_multiple: int = 1
    """The embedding tables are padded to a multiple of this, so that a mesh divides their rows."""
    embed: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of blocks; of the decoder, if there is an encoder."""
    encoder_layers: int = 0
    """Number of blocks of the encoder, whose output every block of the decoder attends to; 0 for a decoder alone."""
    start_token: int = 0
    """The token that a decoder begins with, if there is an encoder: T5's padding token, or M2M-100's end of text."""
    heads: int = 8
    """Query heads."""
    kv_heads: int = 8
    """Key/value heads: `heads` for multi-head, 1 for multiquery, in between for grouped-query attention."""
    head_size: int = 16
    """Width of one head."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases."""
    out_bias: bool = False
    """Whether attention's output has a bias."""
    qk_norm: bool = False
    """Whether every head's queries and keys are RMS-normalised before they are rotated (Qwen3)."""
    feed_forward: int = 256
    """Width of the feed-forward layer, or of one expert."""
    activation: str = "swiglu"
    """swiglu, swiglu_clamped (gpt-oss) or geglu (two weights in), gelu (its tanh form), gelu_exact, relu or silu."""
    ffn_bias: bool = False
    """Whether the matrices of feed-forward layers, and of experts, have biases."""
    block: str = "serial"
    """serial, or parallel: attention and feed-forward share one norm and one reduction (PaLM)."""
    tied: bool = True
    """Whether the logits reuse the embedding table."""
    scale_embedding: bool = True
    """Whether embedded tokens are multiplied by √embed."""
    output_bias: bool = False
    """Whether the logits have a bias."""
    positions: str = "rotary"
    """rotary; relative: a bias of the scores for the distance of query and key, in buckets, shared by all blocks of a
    stack (T5); sinusoidal: added to the embedded tokens (Transformer); or none."""
    relative_buckets: int = 32
    """Number of buckets of distances."""
    relative_distance: int = 128
    """Distance from which on all keys are in one bucket."""
    position_offset: int = 0
    """Position of the first token, for sinusoidal positions (2 in M2M-100)."""
    attention_scale: float | None = None
    """Factor of the scores of attention (1 in T5); None for 1/√head_size."""
    rope_base: float = 10000.0
    """Base of the rotary position embedding's wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Stretching of long wavelengths (Llama 3.1); None for none."""
    rotary_size: int = 0
    """Number of elements of a head, counted from its first, that are rotated by position; 0 for all."""
    rotary_pairs: str = "halves"
    """Pairs of elements that are rotated together: halves (one from each half), or neighbours (GPT-J)."""
    norm: str = "rms"
    """rms, or layer, which subtracts the mean too."""
    norm_bias: bool = False
    """Whether layer norms have a bias."""
    norm_epsilon: float = 1e-6
    """Added to the mean square, or the variance, in every norm."""
    remat: Literal[Remat, True, False] = "full"
    """Recomputation in the backward pass: none; full: each block from its input; dots: all except products with
    weights; dots-except-hidden: also the feed-forward layer's hidden activations; selective: only attention
    (`gspmd_models.remat`). True means full, and False none."""
    context_length: int | None = None
    """The longest text, in tokens, that the model was made for, as a public checkpoint says; longer texts are not
    generated. None for no limit."""
    sliding_window: int | None = None
    """The number of last tokens that attention of a public checkpoint looks back over. Attention here looks back over
    all tokens, so longer sequences are refused. None for a model whose attention looks back over all."""
    int8: bool = False
    """Whether matrices are int8, with a float32 scale for every channel of their products (`quantize`), for serving."""
    stacked: bool = True
    """Whether weights of blocks of a kind are one array, over which a loop runs; otherwise every block has arrays of
    its own, which TPUs load while they wait for collectives, and programs are compiled block by block: for serving."""
    moe: MoEConfig | None = None
    """Experts in place of the feed-forward layer of every nth block; None for none."""
    lora: LoraConfig | None = None
    """Low-rank adapters of some weights, which alone are trained; None for no adapters."""

    def __post_init__(self) -> None:
        if isinstance(self.remat, bool):  # old settings and checkpoints have True or False
            object.__setattr__(self, "remat", "full" if self.remat else "none")
        if self.lora and not self.lora.rank:
            object.__setattr__(self, "lora", None)
        faults = list(_faults(self))
        if faults:
            raise ValueError("this model cannot be built:\n" + "\n".join(f"  {fault}" for fault in faults))

    @property
    def remat_name(self) -> Remat:
        """`remat` as a name; True and False are replaced when the config is made."""
        assert not isinstance(self.remat, bool)
        return self.remat

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate, a second input weight."""
        return self.activation in GATED

    @property
    def is_dropless(self) -> bool:
        """Whether there are experts without a capacity."""
        return self.moe is not None and self.moe.dispatch == "dropless"

    @property
    def rotary(self) -> int:
        """Elements of a head that are rotated by position."""
        return self.rotary_size or self.head_size

    @property
    def pattern(self) -> int:
        """Blocks of the pattern of dense and expert blocks, which repeats; all blocks if the first ones are dense."""
        if self.moe is None:
            return 1
        return self.layers if self.moe.first_dense else self.moe.every

    @property
    def period(self) -> int:
        """Blocks per period; one step of the scan runs one period. That is the pattern, or all blocks if they are not
        stacked."""
        return self.pattern if self.stacked else self.layers

    @property
    def table_rows(self) -> int:
        """Rows of the embedding table: the vocabulary, padded to a multiple.

        >>> ModelConfig(vocabulary=250, vocabulary_multiple=64).table_rows
        256
        """
        return -(-self.vocabulary // self.vocabulary_multiple) * self.vocabulary_multiple

    @property
    def expert_place(self) -> int:
        """The place in each pattern of the block whose feed-forward layer is a mixture of experts; -1 for none."""
        return -1 if self.moe is None else self.moe.every - 1 if self.moe.offset is None else self.moe.offset

    def is_sparse(self, place: int) -> bool:
        """Return whether the feed-forward layer of the block at a place of a period is a mixture of experts."""
        if self.moe is None or place < self.moe.first_dense:
            return False
        return place % self.moe.every == self.expert_place

    @property
    def expert_layers(self) -> int:
        """Number of blocks whose feed-forward layer is a mixture of experts, in both stacks."""
        return sum(map(self.is_sparse, (*range(self.layers), *range(self.encoder_layers))))

    @property
    def num_parameters(self) -> int:
        """Number of parameters, with all experts, without padding of the tables."""
        return self._parameters(self.moe.experts if self.moe else 0)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters used by one token, which counts only the experts that it chooses."""
        return self._parameters(self.moe.used if self.moe else 0)

    def _parameters(self, experts: float) -> int:
        """Count parameters, with so many experts in a layer that has some; each router has an output for all."""
        sizes = tensor_sizes(self)
        return round(sum(experts * each.size(sizes | {"X": 1}) if _of_experts(each) else each.size(sizes)
                         for each in tensors(self)))  # fmt: skip

    def flops_per_token(self, length: int, source_length: int = 0, *, encoded: bool = False) -> int:
        """Floating-point operations per trained token, forward and backward, without rematerialization.

        Args:
            length: tokens per sequence.
            source_length: tokens per source of an encoder–decoder, all of whose operations are counted for its targets;
                0 for as many as `length`.
            encoded: whether sources are encoded already, so that none of their operations are counted.

        Returns:
            6 per active parameter of matrix products, plus 12 · layers · heads · head_size · length for attention
            scores; the embedding look-up is not counted, the logits are.

        Example:
            >>> ModelConfig(layers=1).flops_per_token(length=256)
            1572864

        Source: PaLM (arXiv 2204.02311), appendix B.
        Differs: norms, biases and an untied input table are not counted, since no matrix product uses them.
        """
        of_target = self._flops_of_matrices[1]
        scores = 12 * self.heads * self.head_size
        of_target += scores * self.layers * length
        if not self.encoder_layers:
            return of_target
        source_length = source_length or length
        of_target += scores * self.layers * source_length
        if encoded:
            return of_target
        return round(of_target + self.flops_per_source_token(source_length) * source_length / length)

    def flops_per_source_token(self, source_length: int) -> int:
        """Floating-point operations per token of a source, forward and backward: of the encoder, and of its output's
        keys and values in every block of the decoder.

        Args:
            source_length: tokens per source.
        """
        return self._flops_of_matrices[0] + 12 * self.heads * self.head_size * self.encoder_layers * source_length

    @property
    def _flops_of_matrices(self) -> tuple[int, int]:
        """6 per active parameter that a token of a source is multiplied by, and a token of a target."""
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

    def length_fault(self, tokens: int) -> str:
        """Return why attention here differs from the model's own for so many tokens; empty if it does not.

        >>> ModelConfig(sliding_window=4096).length_fault(4096)
        ''
        """
        if self.sliding_window is None or tokens <= self.sliding_window:
            return ""
        return (
            f"a sequence has {tokens} tokens, and attention of this model looks back over the last "
            f"{self.sliding_window} only (sliding_window); longer sequences are not supported"
        )

    def tokens_of_source(self, source_length: int, length: int) -> int:
        """Return the tokens of a source: `source_length`, or as many as `length` if that is 0; 0 without an encoder.

        >>> ModelConfig(encoder_layers=4).tokens_of_source(0, 128), ModelConfig().tokens_of_source(0, 128)
        (128, 0)
        """
        return (source_length or length) if self.encoder_layers else 0

    def common_sizes(self, batch: int, length: int, source_length: int = 0) -> dict[str, int]:
        """The sizes that mesh axes of a layout's lines have to divide if both stacks of blocks share these lines.

        L is the greatest common divisor of the lengths of both stacks, and C that of the slots of their experts.

        Args:
            batch, length, source_length: as of `sizes`.

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
        """The size of every dimension that a layout may shard, for `Layout.check`.

        Args:
            batch: sequences per step, over all devices.
            length: tokens per sequence.
            source_length: tokens per source, T, of an encoder–decoder; 0 for as many as `length`.

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
            "N": self.layers // self.period,
        }
        if self.positions == "relative":
            sizes["R"] = self.relative_buckets
        if self.moe:
            sizes |= {"X": self.moe.experts, "G": self.moe.groups or batch}
        return sizes


def _of_experts(tensor: Tensor) -> bool:
    """Return whether each expert has such a parameter; a router has only an output for each."""
    return "X" in dims_of(tensor.key) and not tensor.key.startswith(("moe.router", "moe.choice_bias"))


_WIDTHS = ("kv_heads", "head_size", "feed_forward")


def _faults(config: ModelConfig):
    for name in ("vocabulary", "vocabulary_multiple", "embed", "layers", "heads", *_WIDTHS):
        if getattr(config, name) < 1:
            yield f"{name} is {getattr(config, name)}; it must be at least 1"
        elif getattr(config, name) >= 2**31:  # XLA's sizes of dimensions are int32
            yield f"{name} is {getattr(config, name)}; it must be less than 2**31"
    choices = {"activation": tuple(PLAIN), "block": BLOCKS, "norm": NORMS, "rotary_pairs": PAIRS, "remat": REMATS,
               "positions": POSITIONS}  # fmt: skip
    for name, known in choices.items():
        if getattr(config, name) not in known:
            near = suggestion(str(getattr(config, name)), known).strip()
            remedy = f"one of {', '.join(known)}" + (f". {near}" if near else "")
            yield f"{name} is {getattr(config, name)!r}; it must be {remedy}"
    for name in ("context_length", "sliding_window"):
        if getattr(config, name) is not None and getattr(config, name) < 1:
            yield f"{name} is {getattr(config, name)}; it must be at least 1, or be left out"
    for name in ("rope_base", "norm_epsilon"):
        if not 0 < getattr(config, name) < inf:
            yield f"{name} is {getattr(config, name)}; it must be positive"
    if not 0 <= config.rotary_size <= config.head_size:
        yield f"rotary_size is {config.rotary_size}; it must be at most head_size ({config.head_size}), or 0 for all"
    elif config.rotary % 2 and config.positions == "rotary":
        name = "rotary_size" if config.rotary_size else "head_size"
        yield f"{name} is {config.rotary}; rotary position embedding turns pairs, so it must be even"
    if config.norm_bias and config.norm == "rms":
        yield 'norm_bias is set, and an RMS norm has none; set norm = "layer"'
    if config.kv_heads > 0 and config.heads % config.kv_heads:
        yield f"heads is {config.heads}, which kv_heads ({config.kv_heads}) does not divide"
    if config.lora:
        lacks = [key for key in config.lora.targets if not _has(config, key)]
        if lacks:
            yield f"lora.targets has {', '.join(lacks)}, and this model has no such weight"
        if config.int8:
            yield "lora has adapters, and int8 weights are not trained; merge them first"
    if config.encoder_layers and not config.stacked:
        yield "stacked is off, and encoder_layers is set; blocks of an encoder–decoder are stacked"
    for name in ("layers", "encoder_layers"):
        if config.moe and config.moe.every > 0 and getattr(config, name) % config.moe.every:
            yield f"{name} is {getattr(config, name)}, which moe.every ({config.moe.every}) does not divide"
    if config.moe and config.moe.first_dense:
        if config.layers > 0 and not config.expert_layers:
            first = config.moe.first_dense
            yield f"moe.first_dense is {first}, and of {config.layers} layers none has experts; lower it"
        if config.encoder_layers:
            yield "moe.first_dense is set, and encoder_layers too; both stacks of an encoder–decoder have one pattern"
    if config.moe and config.moe.dense_feed_forward and config.expert_layers == config.layers + config.encoder_layers:
        yield f"moe.dense_feed_forward is {config.moe.dense_feed_forward}, and every layer has experts; leave it out"
    yield from _position_faults(config)
    yield from _encoder_faults(config)


def _position_faults(config: ModelConfig):
    if config.attention_scale is not None and not 0 < config.attention_scale < inf:
        yield f"attention_scale is {config.attention_scale}; it must be positive, or be left out"
    if config.relative_buckets < 4 or config.relative_buckets % 2:
        yield f"relative_buckets is {config.relative_buckets}; it must be even, and at least 4"
    if config.relative_distance <= config.relative_buckets // 2:
        least = f"for {config.relative_buckets} buckets, at least {config.relative_buckets // 2 + 1}"
        yield f"relative_distance is {config.relative_distance}; {least}"
    of = {"relative": ("relative_buckets", "relative_distance"), "sinusoidal": ("position_offset",)}
    for kind, names in of.items():
        for name in names if config.positions != kind else ():
            if getattr(config, name) != getattr(ModelConfig, name):
                fact = f"{name} is {getattr(config, name)}, and positions are {config.positions}"
                yield f'{fact}; set positions = "{kind}"'
    if config.positions == "sinusoidal" and config.embed % 2:
        yield f"embed is {config.embed}; sinusoidal positions have pairs of a sine and a cosine, so it must be even"


def _encoder_faults(config: ModelConfig):
    if config.encoder_layers < 0:
        yield f"encoder_layers is {config.encoder_layers}; it must not be negative"
    if not config.encoder_layers:
        if config.start_token:
            yield f"start_token is {config.start_token}, and a decoder alone begins with its text; set encoder_layers"
        return
    if not 0 <= config.start_token < config.vocabulary:
        yield f"start_token is {config.start_token}, which is not a token of {config.vocabulary}"
    if config.block != "serial":
        yield 'block is parallel, and cross-attention has a norm of its own; set block = "serial"'
    if config.qk_norm:
        yield "qk_norm is set, and cross-attention has no norms of heads"


def _has(config: ModelConfig, key: str) -> bool:
    """Return whether the model has a weight that may have an adapter."""
    section, name = key.split(".")
    if name.endswith("gate") and not config.gated:
        return False
    dense = config.expert_layers < config.layers + config.encoder_layers
    shared = config.moe is not None and config.moe.shared > 0
    return {
        "attention": True,
        "cross": config.encoder_layers > 0,
        "ffn": dense,
        "moe": shared,
        "output": not config.tied,
    }[section]
