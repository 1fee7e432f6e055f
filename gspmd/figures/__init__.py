"""Pictures as SVG: the canvas, the devices of a mesh and their blocks, and bars, in a light and a dark theme."""

from gspmd.figures.blocks import blocks_figure
from gspmd.figures.figure import Figure

__all__ = ["Figure", "blocks_figure"]
