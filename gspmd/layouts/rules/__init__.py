"""The keys of a layout's table, and the rules that check its specs."""
