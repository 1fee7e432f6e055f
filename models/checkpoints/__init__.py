"""Public checkpoints: safetensors, config.json and tokenizer.json, read onto any mesh and layout, and written.

Reading order: files, families/, config, sources, loading, text, saving.
"""

from .config import model_config
from .files import CheckpointError
from .loading import LoadReport, load
from .saving import save
from .text import TextStream, Tokenizer, byte_tokenizer, keep_tokenizer, tokenizer

__all__ = [
    "CheckpointError",
    "LoadReport",
    "TextStream",
    "Tokenizer",
    "byte_tokenizer",
    "keep_tokenizer",
    "load",
    "model_config",
    "save",
    "tokenizer",
]
