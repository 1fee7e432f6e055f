"""The planner: from an equation to the collectives and local einsums that it takes."""
