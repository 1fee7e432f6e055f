"""Rematerialization: the choices by name, with predictions of the bytes and FLOPs of each."""
