"""Colors and style of figures and tables: a light and a dark theme whose colors the color-blind can tell apart.

Colors are written out in every rule, because programs that typeset papers do not support CSS variables.

Source: Okabe and Ito 2008, Color Universal Design (jfly.uni-koeln.de/color). The colors are changed as little as
    possible, so that text in each color has a contrast of 4.5 with its background, and any two colors are at least 20
    apart in CIE L*a*b* for protanopes and deuteranopes.
"""

from collections.abc import Mapping, Sequence

LIGHT = {
    "ground": "#ffffff", "panel": "#f5f7f9", "ink": "#1d2630", "soft": "#55616e", "rule": "#8a96a3", "faint": "#d5dbe1",
    "all-gather": "#2975b5", "reduce-scatter": "#a4457c", "all-reduce": "#b75600", "all-to-all": "#5f3b01",
    "collective-permute": "#424fb9", "slice": "#006b47", "einsum": "#1d2630",
}  # fmt: skip
DARK = {
    "ground": "#14191f", "panel": "#1d242c", "ink": "#e8edf2", "soft": "#a3b0bd", "rule": "#6d7a88", "faint": "#333d48",
    "all-gather": "#7ecdfa", "reduce-scatter": "#cb89b6", "all-reduce": "#ff945a", "all-to-all": "#e3a820",
    "collective-permute": "#92a1fd", "slice": "#3cc89a", "einsum": "#e8edf2",
}  # fmt: skip
THEMES = {"light": LIGHT, "dark": DARK}

TEXT = 12
"""Font size of texts, in CSS pixels."""
SIZES = {"title": 13.5, "small": 10.5, "tiny": 8.5}
"""Font sizes of texts by CSS class, for classes whose size is not `TEXT`."""

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "slice", "einsum")
TERMINAL = {
    "all-gather": "cyan", "reduce-scatter": "magenta", "all-reduce": "red", "all-to-all": "yellow",
    "collective-permute": "blue", "slice": "green", "einsum": "white",
}  # fmt: skip
"""The color of each kind of step on a terminal."""
WORK = {"other": "rule", "copy": "slice"}
"""The name of the theme's color for each kind of work that is not a kind of step."""
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"

BLOCKS = ("#0072b2", "#f0e442", "#d55e00", "#229c6f", "#41b7ee", "#cd79a9", "#f2b154", "#5a1547")
"""Fill colors of up to eight blocks; `fill` has the colors of more blocks. Every block has an outline, so the light and
the dark theme use the same colors."""
_SCALE = ("#0072b2", "#56b4e9", "#f0e442", "#e69f00", "#b34700")


def fill(block: int, count: int) -> str:
    """Return the color of one of `count` blocks, from `BLOCKS` for few blocks, or between blue and orange for many.

    >>> fill(0, 2), fill(1, 2), fill(0, 64), fill(63, 64)
    ('#0072b2', '#f0e442', '#0072b2', '#b34700')
    """
    if count <= len(BLOCKS):
        return BLOCKS[block]
    at = block / (count - 1) * (len(_SCALE) - 1)
    low = min(int(at), len(_SCALE) - 2)
    ends = ([int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in _SCALE[low : low + 2])
    return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in zip(*ends))


# The colors of CSS classes: (selector, property, name of the theme's color).
_COLORED: tuple[tuple[str, str, str], ...] = (
    (".ground", "fill", "ground"),
    (".panel", "fill", "panel"),
    (".panel", "stroke", "faint"),
    (".box", "fill", "ground"),
    (".box", "stroke", "rule"),
    (".node", "fill", "panel"),
    (".node", "stroke", "rule"),
    (".line", "stroke", "rule"),
    (".head", "fill", "rule"),
    (".cell", "fill", "ground"),
    (".cell", "stroke", "faint"),
    (".outline", "stroke", "rule"),
    (".block", "stroke", "ink"),
    (".hatch", "stroke", "ink"),
    (".ink", "fill", "ink"),
    (".soft", "fill", "soft"),
    (".inverse", "fill", "ground"),
    *((f".{name}", "fill", color) for name, color in WORK.items()),
    *((f".{kind}", "fill", kind) for kind in KINDS),
)
_SHAPES = """\
{root} text{{font-family:{font};font-size:{text}px}}
{sizes}{root} .title,{root} .strong{{font-weight:600}}
{root} .box,{root} .node,{root} .panel,{root} .cell,{root} .outline,{root} .block{{stroke-width:1}}
{root} .line,{root} .outline,{root} .hatch{{fill:none}}
{root} .line{{stroke-width:1.25}}
{root} .dashed{{stroke-dasharray:3 3}}
{root} .block{{stroke-width:.75}}
{root} .hatch{{stroke-width:.75;stroke-opacity:.7}}
{root} .tint{{fill-opacity:.22}}
{root} .pale{{fill-opacity:.4}}
"""


# Selectors for the theme that a reader chose on the page around a picture: JupyterLab, VS Code, Colab, MkDocs, our own.
_MARKS = {
    "light": (
        '[data-jp-theme-light="true"]', '[data-vscode-theme-kind="vscode-light"]', 'html[theme="light"]',
        '[data-md-color-scheme="default"]', '[data-theme="light"]',
    ),
    "dark": (
        '[data-jp-theme-light="false"]', '[data-vscode-theme-kind="vscode-dark"]', 'html[theme="dark"]',
        '[data-md-color-scheme="slate"]', '[data-theme="dark"]',
    ),
}  # fmt: skip


def _rules(root: str, theme: Mapping[str, str], colored: Sequence[tuple[str, str, str]]) -> str:
    lines = []
    for selector, name, color in colored:
        below = ",".join(f"{root} {each}".strip() for each in selector.split(","))
        lines.append(f"{below}{{{name}:{theme[color]}}}\n")
    return "".join(lines)


def themed(root: str, colored: Sequence[tuple[str, str, str]], theme: str = "") -> str:
    """Return CSS rules that color elements inside `root`, in a fixed theme or in the theme that the reader prefers.

    Args:
        root: the selector of the element around the colored elements.
        colored: triples of a selector, a CSS property, and the name of a color of the theme.
        theme: `"light"`, `"dark"`, or empty to follow the choice of the reader or of the surrounding page.
    """
    if theme:
        return _rules(root, THEMES[theme], colored)
    media = f"@media (prefers-color-scheme:dark){{\n{_rules(root, DARK, colored)}}}\n"
    chosen = (_rules(f":is({','.join(_MARKS[name])}) {root}", THEMES[name], colored) for name in THEMES)
    return _rules(root, LIGHT, colored) + media + "".join(chosen)


def style(theme: str = "", *, standalone: bool = True) -> str:
    """Return the CSS style sheet of a figure.

    Args:
        theme: the theme, as in `themed`.
        standalone: whether the figure is a document of its own, so that there is no page whose theme could be followed.
    """
    root = ".gspmd-figure"
    sizes = "".join(f"{root} .{name}{{font-size:{size}px}}\n" for name, size in SIZES.items())
    shapes = _SHAPES.format(root=root, font=FONT, text=TEXT, sizes=sizes)
    if standalone and not theme:
        dark = _rules(root, DARK, _COLORED)
        return f"{shapes}{_rules(root, LIGHT, _COLORED)}@media (prefers-color-scheme:dark){{\n{dark}}}\n"
    return shapes + themed(root, _COLORED, theme)
