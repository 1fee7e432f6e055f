"""Layouts: tables of specs for whole models, presets from papers, and rankings of layouts by cost."""

from typing import TYPE_CHECKING

from gspmd.deferred import deferred

if TYPE_CHECKING:
    from gspmd.layouts.layout import Layout, presets
    from gspmd.layouts.ranking import Ranked, Ranking, rank
    from gspmd.layouts.section import Section

__all__ = ["Layout", "Ranked", "Ranking", "Section", "presets", "rank"]

_HOMES = {
    ".layout": "Layout presets",
    ".ranking": "Ranked Ranking rank",
    ".section": "Section",
}
__getattr__, __dir__ = deferred(__name__, _HOMES)
