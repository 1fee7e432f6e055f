"""Text generation through a key/value cache.

Reading order: cache, memory, serving, steps, loop, prefix, batch, generator, text; programs and ranking, for chips that
are not here.
"""

from .batch import Batch, Sizes, make_batch
from .cache import Cache, abstract_cache, cache_spec, empty_cache
from .generator import Burst, Generated, Generator
from .loop import Sampling, decode_loop
from .programs import Program, serving_program
from .ranking import Served, rank_serving, serving_layouts
from .serving import GenerationError, for_serving, phases, served
from .steps import decode_step, prefill_step
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
    "Text",
    "abstract_cache",
    "cache_spec",
    "decode_loop",
    "decode_step",
    "empty_cache",
    "for_serving",
    "make_batch",
    "phases",
    "prefill_step",
    "rank_serving",
    "served",
    "serving_layouts",
    "serving_program",
]
