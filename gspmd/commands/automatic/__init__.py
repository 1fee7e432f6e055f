"""`--layout auto`: the search for a run's layout, a cache of found layouts, and the file next to the checkpoints.

Reading order: found, kept, searched. The last file imports the search, so it is imported only when a search for a
layout begins.
"""

from gspmd.commands.automatic.found import FILE, FoundLayout, asks_for_search, own

__all__ = ["FILE", "FoundLayout", "asks_for_search", "own"]
