"""Hardware: the performance figures of chips, and the time that collectives and matrix products take on them."""
