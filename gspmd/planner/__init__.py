"""From an equation to its plan: the collectives and local einsums that it takes."""
