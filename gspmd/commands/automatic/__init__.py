"""`--layout auto`: the layout of a run is searched for the devices at hand, kept, and written beside its checkpoints.

Reading order: found, kept, searched.
"""

from gspmd.commands.automatic.found import FILE, NAME, Found, own
from gspmd.commands.automatic.searched import for_serving, for_training

__all__ = ["FILE", "NAME", "Found", "for_serving", "for_training", "own"]
