"""Rematerialization: choices by name, and predictions of the bytes and FLOPs of each choice."""
