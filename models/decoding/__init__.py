"""Text generation through a key/value cache.

Reading order: cache, serving, steps, loop, prefix, batch, generator; programs and ranking, for absent devices.
"""

from .cache import Cache, abstract_cache, cache_spec, empty_cache
from .generator import Burst, Generated, Generator
from .loop import Sampling, decode_loop
from .programs import Program, serving_program
from .ranking import Served, rank_serving, serving_layouts
from .serving import for_serving, phases, served
from .steps import decode_step, prefill_step

__all__ = [
    "Burst",
    "Cache",
    "Generated",
    "Generator",
    "Program",
    "Sampling",
    "Served",
    "abstract_cache",
    "cache_spec",
    "decode_loop",
    "decode_step",
    "empty_cache",
    "for_serving",
    "phases",
    "prefill_step",
    "rank_serving",
    "served",
    "serving_layouts",
    "serving_program",
]
