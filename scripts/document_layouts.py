"""Renew the tables of docs/layouts.md from the keys and the presets: `python scripts/document_layouts.py`.

The page is written by hand, except for the text between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""

import re
from pathlib import Path

from gspmd.annotate.errors import listed
from gspmd.layouts.read import preset_names, text_of
from gspmd.layouts.rules.keys import ALIKE, DIMENSIONS, KEYS, OVERRIDES, PARTS, PIPELINE, Key, of_part
from gspmd.layouts.rules.sizes import PADDED
from gspmd.lowerings.names import LOWERINGS

PAGE = Path(__file__).parents[1] / "docs" / "layouts.md"


def renewed(page: str) -> str:
    """Return the page with its tables renewed from the code.

    Raises:
      ValueError: for some table, the page lacks the two comments around it, or has these comments more than once.
    """
    for name, text in _tables().items():
        pieces = re.split(f"(<!-- (?:begin|end) {name} -->)", page)
        if len(pieces) != 5:
            raise ValueError(f"{PAGE.name} needs one <!-- begin {name} --> ... <!-- end {name} -->.")
        before, begin, _, end, after = pieces
        page = f"{before}{begin}{text}{end}{after}"
    return page


def _tables() -> dict[str, str]:
    """Return the generated texts by name: tables with blank lines around each, and lists of names for a sentence."""
    dimensions = "\n".join(f"| {letter} | {meaning} |" for letter, meaning in DIMENSIONS.items())
    overrides = "\n".join(f"- `[{section}]`: {meaning}" for section, meaning in OVERRIDES.items())
    padded = "\n".join(f"- {dim}: {how}." for dim, how in PADDED.items())
    alike = "\n".join(f"- {listed(dims)} of `{first}` and `{second}`" for first, second, dims in ALIKE)
    presets = "\n\n".join(f"### {name}\n\n```toml\n{text_of(name).rstrip()}\n```" for name in preset_names())
    return {
        "dimensions": f"\n\n| letter | meaning |\n| --- | --- |\n{dimensions}\n\n",
        "keys": "\n\n" + "\n\n".join(map(_section, (*PARTS, PIPELINE))) + "\n\n",
        "alike": f"\n\n{alike}\n\n",
        "overrides": f"\n\n{overrides}\n\n",
        "lowerings": ", ".join(LOWERINGS),
        "padding": f"\n\n{padded}\n\n",
        "presets": f"\n\n{presets}\n\n",
    }


def _section(part: str) -> str:
    rows = "\n".join(map(_row, of_part(part)))
    return f"### [{part}]\n\n| key | dimensions | kind | whole | default | meaning |\n{'| --- ' * 6}|\n{rows}"


def _row(key: Key) -> str:
    dims = key.dims if isinstance(key.dims, str) else ", ".join(str(KEYS[name].dims) for name in key.dims)
    free = "the planner's choice" if key.kind == "via" else "whole"
    default = f"`{key.default}`" if key.default else free if key.optional else "required"
    if key.default and key.kind != "via" and KEYS[key.default].dims != key.dims:
        default = f"{key.dims} of {default}"
    return f"| `{key.name}` | {dims} | {key.kind} | {', '.join(key.local)} | {default} | {key.meaning} |"


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
