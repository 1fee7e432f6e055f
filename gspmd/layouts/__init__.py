"""Whole-model tables: where every tensor lies, presets from the papers, and which of them costs least."""

from gspmd.layouts.layout import Layout, Section, presets
from gspmd.layouts.ranking import Ranked, Ranking, rank

__all__ = ["Layout", "Ranked", "Ranking", "Section", "presets", "rank"]
