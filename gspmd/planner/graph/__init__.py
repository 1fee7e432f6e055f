"""The exact search, in which placements are nodes, collectives are arcs, and the cheapest chains are shortest paths."""
