"""The library transformers, for tests that hold generated texts against its own."""

from tests.models.checkpoints.conftest import transformers

__all__ = ["transformers"]
