"""Whole-model tables: where every tensor lies, presets from the papers, and which of them costs least."""

from gspmd.layouts.layout import Layout, presets
from gspmd.layouts.ranking import Ranked, Ranking, rank
from gspmd.layouts.section import Section

__all__ = ["Layout", "Ranked", "Ranking", "Section", "presets", "rank"]
