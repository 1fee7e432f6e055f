"""Rematerialization: what a backward pass computes again, by name, and what each choice takes."""
