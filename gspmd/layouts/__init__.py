"""Layouts: tables of specs for a whole model, presets from the papers, and their ranking by cost."""

from gspmd.layouts.layout import Layout, presets
from gspmd.layouts.ranking import Ranked, Ranking, rank
from gspmd.layouts.section import Section

__all__ = ["Layout", "Ranked", "Ranking", "Section", "presets", "rank"]
