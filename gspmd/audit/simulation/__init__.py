"""Simulation: a compiled program in simulated time, and pictures of it."""
