"""Hardware: figures of chips, and the seconds of collectives and matrix products on them."""
