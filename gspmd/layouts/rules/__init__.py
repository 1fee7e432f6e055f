"""The keys of a layout's table, and the rules that its specs are checked by."""
