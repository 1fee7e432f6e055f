"""Simulation: a compiled program in simulated time on one device, and drawings of the timeline."""
