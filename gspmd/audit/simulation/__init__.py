"""Simulation: the time that a compiled program takes on one device, simulated, and drawings of this timeline."""
