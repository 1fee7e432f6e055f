"""Pictures of plans: their steps, on a mesh, in time, and by the resource that limits them."""
