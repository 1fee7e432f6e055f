"""Texts to batches: files found and read, tokenized once to disk, a part held out, and batched.

Reading order: sources, split, tokens, shards, corpus, preparation.
"""

from gspmd.training.data.corpus import Corpus, check_size, check_stream, stream
from gspmd.training.data.preparation import load
from gspmd.training.data.tokens import number_of_ids, usual_ends

__all__ = ["Corpus", "check_size", "check_stream", "load", "number_of_ids", "stream", "usual_ends"]
