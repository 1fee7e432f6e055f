"""Rematerialization: the choices by name, and the predicted bytes and FLOPs of each."""
