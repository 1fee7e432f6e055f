"""Chips as text: a table of a chip's figures with their sources, and a single line."""

from collections.abc import Mapping
from typing import Any

from rich.markup import escape

from gspmd.display.plain import printable
from gspmd.display.tables import Column, Sheet
from gspmd.display.units import amount_of_bytes, amount_of_flops, amount_of_seconds


def table(name: str, figures: Mapping[str, Any], source: Mapping[str, str]) -> Sheet:
    """Return a table of a chip's figures in readable units with their sources; zeros without a source are left out."""
    sheet = Sheet(name, (Column("figure"), Column("", "right"), Column("source", folds=True)))
    for figure, value in figures.items():
        if value or figure in source:
            sheet.add(figure, escape(_with_unit(figure, value)), escape(source.get(figure, "")))
    return sheet


def line(name: str, figures: Mapping[str, Any]) -> str:
    """Return a chip's main figures on one line, for its `repr`."""
    said = {figure: _with_unit(figure, value) for figure, value in figures.items()}
    memory = f"{said['hbm_bytes']} at {said['hbm_bandwidth']}"
    links = f"{said['links']} links of {said['link_bandwidth']}"
    main = f"{said['bf16_flops']} in bfloat16, {memory}, {links}"
    return printable(f"<Chip {name!r}: {main}; print it for its sources>")


def _with_unit(figure: str, value: Any) -> str:
    """Return a value as text with its unit, which follows from the last word of the figure's name."""
    match figure.rpartition("_")[2]:
        case "flops":
            return f"{amount_of_flops(value)}/s"
        case "bytes":
            return amount_of_bytes(value)
        case "bandwidth":
            return f"{amount_of_bytes(value)}/s"
        case "seconds":
            return amount_of_seconds(value)
        case "clock":
            return f"{value / 1e9:.3g} GHz"
        case "kinds":
            return ", ".join(value)
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)
