"""The planner, which finds the collectives and local einsums of an equation."""
