"""Colors: legible on their grounds in both themes, and told apart by the color-blind."""

import re
from itertools import combinations

import pytest

from gspmd.display.theme import BLOCKS, KINDS, THEMES, fill, style

# What protanopes, deuteranopes see of linear red, green, blue: Viénot, Brettel and Mollon 1999, Digital video
# colourmaps for checking the legibility of displays by dichromats.
DICHROMATS = {
    "protanopia": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
    "deuteranopia": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
}


def _linear(color: str) -> list[float]:
    parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _luminance(color: str) -> float:
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), _linear(color)))


def _contrast(one: str, other: str) -> float:
    """The contrast of WCAG 2, from 1 to 21."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _lightness(rgb: list[float]) -> tuple[float, ...]:
    """CIE L*a*b* of linear RGB."""
    xyz = [
        sum(share * part for share, part in zip(row, rgb)) / white
        for row, white in (
            ((0.4124, 0.3576, 0.1805), 0.9505),
            ((0.2126, 0.7152, 0.0722), 1.0),
            ((0.0193, 0.1192, 0.9505), 1.089),
        )
    ]
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _seen(color: str, sight: str) -> tuple[float, ...]:
    rgb = _linear(color)
    return _lightness([max(0.0, sum(share * part for share, part in zip(row, rgb))) for row in DICHROMATS[sight]])


def _distance(one: str, other: str, sight: str) -> float:
    return sum((a - b) ** 2 for a, b in zip(_seen(one, sight), _seen(other, sight))) ** 0.5


@pytest.mark.parametrize("theme", THEMES)
def test_texts_have_contrast(theme):
    colors = THEMES[theme]
    for name in ("ink", "soft", *KINDS):
        for ground in ("ground", "panel"):
            assert _contrast(colors[name], colors[ground]) >= 4.5, (name, ground)
    for ground in ("ground", "panel"):
        assert _contrast(colors["rule"], colors[ground]) >= 2.7, ground


@pytest.mark.parametrize("sight", DICHROMATS)
def test_blocks_of_few_devices_are_told_apart(sight):
    for count in range(2, len(BLOCKS) + 1):
        colors = [fill(block, count) for block in range(count)]
        assert min(_distance(*pair, sight) for pair in combinations(colors, 2)) > 20


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("sight", DICHROMATS)
def test_kinds_are_told_apart(theme, sight):
    colors = [THEMES[theme][kind] for kind in KINDS]
    assert min(_distance(*pair, sight) for pair in combinations(colors, 2)) > 20


def test_many_blocks_have_colors_of_their_own():
    assert len({fill(block, 64) for block in range(64)}) == 64


def test_a_document_is_light_and_dark_and_a_part_of_a_page_follows_it():
    assert "prefers-color-scheme:dark" in style()
    assert "data-jp-theme-light" not in style()
    for mark in ('[data-jp-theme-light="false"]', '[data-theme="dark"]', '[data-vscode-theme-kind="vscode-light"]'):
        assert re.search(rf":is\([^)]*{re.escape(mark)}[^)]*\) \.gspmd-figure \.ink", style(standalone=False))
    assert "@media" not in style("dark")
    assert THEMES["dark"]["ground"] in style("dark")
