"""Pictures of plans: the steps as a chain, on a mesh and in time, and the resource that limits a plan."""
