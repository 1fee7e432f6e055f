"""Text generation through a key/value cache.

Reading order: cache, memory, serving, steps, loop, prefix, beams, batch, generator, text. The module stepwise is for
custom models. The modules programs and ranking plan and compile for chips that are not attached.
"""

from .batch import Batch, Sizes, coarse, make_batch, read_prompts
from .beams import beam_loop, check_beams
from .cache import Cache, abstract_cache, cache_spec, empty_cache
from .generator import Burst, Generated, Generator
from .loop import Sampling, decode_loop
from .programs import Program, serving_program
from .ranking import Served, rank_serving, serving_layouts
from .serving import GenerationError, check_length, check_seeds, for_serving, phases, served
from .steps import decode_step, encode_step, prefill_step
from .stepwise import Stepwise, fewest_rows
from .text import Text

__all__ = [
    "Batch",
    "Burst",
    "Cache",
    "Generated",
    "GenerationError",
    "Generator",
    "Program",
    "Sampling",
    "Served",
    "Sizes",
    "Stepwise",
    "Text",
    "abstract_cache",
    "beam_loop",
    "cache_spec",
    "check_beams",
    "check_length",
    "check_seeds",
    "coarse",
    "decode_loop",
    "decode_step",
    "empty_cache",
    "encode_step",
    "fewest_rows",
    "for_serving",
    "make_batch",
    "phases",
    "prefill_step",
    "rank_serving",
    "read_prompts",
    "served",
    "serving_layouts",
    "serving_program",
]
