"""`--layout auto`: the layout of a run is searched for the devices at hand, kept, and written beside its checkpoints.

Reading order: found, kept, searched. The last, which imports the search, is imported where a layout is searched.
"""

from gspmd.commands.automatic.found import FILE, FoundLayout, asks_for_search, own

__all__ = ["FILE", "FoundLayout", "asks_for_search", "own"]
