"""From texts to batches: files are found, read and tokenized once to disk; a part is held out; rows are batched.

Reading order: sources, split, tokens, shards, spans, packing, objectives, corpus, preparation.
"""

from gspmd.training.data.corpus import Batch, Corpus, check_size, check_stream, stream
from gspmd.training.data.objectives import Objective, objective
from gspmd.training.data.preparation import load
from gspmd.training.data.sources import matching
from gspmd.training.data.tokens import number_of_ids, usual_ends

__all__ = [
    "Batch", "Corpus", "Objective", "check_size", "check_stream", "load", "matching", "number_of_ids", "objective",
    "stream", "usual_ends",
]  # fmt: skip
