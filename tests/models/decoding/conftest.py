"""The library transformers, for tests that compare generated texts with its own."""

from tests.models.checkpoints.conftest import transformers

__all__ = ["transformers"]
