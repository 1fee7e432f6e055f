"""Training a part of a model: low-rank adapters (LoRA), and parameters that stay as they are."""
