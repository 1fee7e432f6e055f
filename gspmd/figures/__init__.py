"""Pictures of plans, placements and layouts: SVG documents made of text, in a light and a dark theme."""

from gspmd.figures.blocks import blocks_figure, steps_figure
from gspmd.figures.figure import Figure
from gspmd.figures.layout import layout_figure
from gspmd.figures.plan import plan_figure

__all__ = ["Figure", "blocks_figure", "layout_figure", "plan_figure", "steps_figure"]
