"""The rules of a layout's table: its keys, and every fault of what is written for them."""
