"""Attention by kernels that keep logits on the chip."""
