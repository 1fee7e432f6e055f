"""`--layout auto`: find a layout for a run on the available devices, keep it, and write it next to the checkpoints.

Reading order: found, kept, searched. The last file imports the search, so it is imported only when a search for a
layout begins.
"""

from gspmd.commands.automatic.found import FILE, FoundLayout, asks_for_search, own

__all__ = ["FILE", "FoundLayout", "asks_for_search", "own"]
