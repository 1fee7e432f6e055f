"""The graph of placements, and the exact search in it for the cheapest collectives."""
