"""The exact search: placements are nodes, collectives are arcs, and the cheapest chains are shortest paths."""
