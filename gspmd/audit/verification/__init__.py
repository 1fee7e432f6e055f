"""Compare a function on a mesh with the same function on one device."""
