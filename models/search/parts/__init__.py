"""The parts of a model as choices and costs: attention, feed-forward, experts, and the two ends."""
