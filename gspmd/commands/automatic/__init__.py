"""`--layout auto`: find a layout for a run on the available devices, keep it, and write it beside the checkpoints.

Reading order: found, kept, searched. The last imports the search, so it is imported only when a layout is searched.
"""

from gspmd.commands.automatic.found import FILE, FoundLayout, asks_for_search, own

__all__ = ["FILE", "FoundLayout", "asks_for_search", "own"]
