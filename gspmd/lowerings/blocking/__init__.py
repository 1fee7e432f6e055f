"""Lowering `blocking`: a shard_map with the plan's own collectives, one after the other."""
