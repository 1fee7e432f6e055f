"""A compiled program in simulated time."""
