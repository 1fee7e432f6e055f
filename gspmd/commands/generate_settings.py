"""Continue prompts with a public checkpoint or a trained run, in one layout for reading them and one for decoding.

A model with an encoder reads each prompt as its source, and writes a text for it.

    gspmd generate --checkpoint DIR --prompt "def main():" --tokens 100
    gspmd generate --checkpoint DIR --prompt "Once" --samples 4 --temperature 0.8 --top-p 0.95
    gspmd generate --checkpoint DIR --prompt "Das Haus ist klein." --beams 4  # the likeliest text that 4 beams find
    gspmd generate --checkpoint DIR --chat --prompt "Who are you?"  # the answer to a turn, by the chat template
    gspmd generate --checkpoint DIR --prompt "Once" --devices 8 --layout megatron-1d --set cache.attention.key=BT_yzKD
    gspmd generate --checkpoint DIR --prompt "Once" --explain  # the plans of both programs, without loading

DIR holds config.json, safetensors and tokenizer.json, or a run of `gspmd train`. Text is printed to standard output
as it is generated, everything else to standard error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from gspmd.commands import configs, flags
from gspmd.commands.described import AnyText
from gspmd.training import ShardingConfig
from gspmd.training.toml import ConfigError

DOING = "cannot generate text:"

COMMON = (
    "checkpoint", "prompt", "prompt_file", "chat", "samples", "tokens", "beams", "temperature", "top_k", "top_p",
    "seed", "layout", "mesh", "devices", "explain",
)  # fmt: skip
"""The settings whose flags --help shows."""

DRAWN = ("temperature", "top_k", "top_p", "min_p")
"""The sampling settings."""


@dataclass(frozen=True)
class SamplingFlags:
    """Sampling settings; the filters apply in this order. A setting that is not given comes from
    generation_config.json of the checkpoint, or of the checkpoint with which the run began; without this file, no
    filter applies."""

    temperature: float | None = None
    """Divides the logits; 0 chooses the likeliest token. 1 if neither this flag nor the file gives it."""
    top_k: int | None = None
    """Draw among the k likeliest tokens; 0 for all."""
    top_p: float | None = None
    """Draw among the fewest likeliest tokens whose probabilities sum to at least p; 1 for all."""
    min_p: float | None = None
    """Draw among tokens at least min_p times as likely as the likeliest; 0 for all."""
    generation_config: Literal["whole", "supported", "ignored"] = "whole"
    """Use of generation_config.json: `whole` refuses a file that asks for more than these settings, such as a penalty
    of repetitions; `supported` uses these settings of the file and leaves out the rest; `ignored` uses none."""

    @property
    def given(self) -> dict[str, Any]:
        """The sampling settings that are given as flags."""
        return {name: value for name in DRAWN if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class ServingSharding(ShardingConfig):
    """The devices, the mesh over them, and the layout on it."""

    devices: int | None = None
    """Number of devices; if not given, all of an accelerator, or one of a CPU."""
    schedule: tyro.conf.Suppress[str] = "1f1b"
    rounds: tyro.conf.Suppress[int] = 1
    distributed: tyro.conf.Suppress[str] = ""
    compiler_options: tyro.conf.Suppress[tuple[str, ...]] = ()


@dataclass(frozen=True)
class GenerateSettings:
    """The prompts to continue, the model, and the devices to run on."""

    checkpoint: str = ""
    """Folder of a public checkpoint, or of a run of `gspmd train`; or the name of a checkpoint that huggingface_hub has
    downloaded, ORG/NAME."""
    prompt: Annotated[tuple[AnyText, ...], tyro.conf.UseAppendAction] = ()
    """Text to continue, or the source of a model with an encoder; repeatable."""
    prompt_file: str = ""
    """File with one more prompt; - for standard input."""
    chat: bool = False
    """Whether a prompt is a user's turn of a chat, which the checkpoint's chat template renders; only the answer is
    written, and it ends with the end of its turn."""
    system: str = ""
    """With --chat: the system's message, before all others."""
    messages: str = ""
    """With --chat: JSON file with the turns before each prompt, [{"role": "user", "content": "..."}, ...]. Without
    --prompt the model answers these turns."""
    chat_template: str = ""
    """With --chat: the name of the template, if the checkpoint has several."""
    chat_variable: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """With --chat: a variable that the template reads, NAME=VALUE, such as enable_thinking=false; repeatable. A value
    that is not JSON is a string."""
    target_prompt: str = ""
    """Beginning of every text of a model with an encoder, such as the token of a language."""
    samples: int = 1
    """Number of texts for each prompt. A prompt is read once for all of them."""
    tokens: int = 128
    """The largest number of tokens added to a prompt."""
    beams: int = 0
    """Number of beams of a beam search for the likeliest text, in place of sampling; 0 for sampling."""
    length_penalty: float = 1.0
    """Power of a text's length by which the search divides its log-probability; a larger power favors longer texts."""
    n_best: int = 1
    """Number of texts that the search prints for each prompt, the best first, each with its score; at most --beams."""
    seed: int = 0
    """Seed of the first text; each further text has the next seed, so it can be generated again by itself."""
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A string that ends a text, and is not printed; repeatable. The model's own end-of-text token also ends a text."""
    prefill_layout: str = ""
    """Layout for reading prompts, in place of --layout; weights stay as the decode layout shards them."""
    decode_layout: str = ""
    """Layout for decoding tokens, in place of --layout."""
    chunk: int = 128
    """The largest number of prompt tokens that are read in one step."""
    burst: int = 8
    """Number of tokens of a text that are sent to the host together."""
    cache_length: int | None = None
    """Number of tokens of a text that the cache can hold; if not given, as many as are needed, or a few more."""
    source_length: int | None = None
    """Number of tokens of a source that the cache can hold; if not given, as many as are needed, or a few more."""
    weights: Literal["int8"] | None = None
    """Dtype of stored matrices; int8 has a scale for every channel. The compute dtype if not given."""
    cache: Literal["int8"] | None = None
    """Dtype of stored keys and values; int8 has a scale for every token and head. The compute dtype if not given."""
    unstacked: bool = False
    """Whether every block has separate weights, which TPUs load before the block begins: steps of few rows are faster,
    and compilation takes longer."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of computation and weights; if not given, float32 on a CPU and bfloat16 elsewhere."""
    compile_cache: bool = True
    """Whether to keep compiled programs on disk for the next start."""
    explain: bool = False
    """Print the bytes that a prefill chunk and a decode step send, and the memory of weights and cache; load
    nothing."""
    sampling: tyro.conf.OmitArgPrefixes[SamplingFlags] = field(default_factory=SamplingFlags)
    sharding: tyro.conf.OmitArgPrefixes[ServingSharding] = field(default_factory=lambda: ServingSharding(layout=""))


def parse(argv: Sequence[str], script: str = "") -> GenerateSettings:
    """Parse the flags.

    Args:
        argv: the flags.
        script: the name of the file in scripts/ that runs the command, for the help.

    Raises:
        ConfigError: no checkpoint is given.
    """
    prog, description = configs.called(__doc__, "gspmd generate", script)
    settings = flags.parse_flags(GenerateSettings, argv, GenerateSettings(), description, prog, COMMON)
    if not settings.checkpoint:
        raise ConfigError(DOING, ["--checkpoint is missing; it names the folder of the model."])
    counts = {name: getattr(settings, name) for name in ("tokens", "samples", "burst", "chunk")}
    if faults := [f"--{name} must be at least 1, but is {count}." for name, count in counts.items() if count < 1]:
        raise ConfigError(DOING, faults)
    return settings
