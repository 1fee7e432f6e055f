"""What an equation does: costs, plans, and the programs they become."""
