"""Attention by kernels that keep the logits on the chip."""
