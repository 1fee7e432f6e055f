"""Training a part of a model: low-rank adapters (LoRA) and frozen parameters."""
