"""Renew the pictures of docs/pictures.md, which are in docs/images: `python scripts/draw_pictures.py`."""

from pathlib import Path

import gspmd
from gspmd.figures import Figure

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SIZES, MESH = {"B": 512, "L": 1, "E": 18432, "F": 73728}, {"x": 4, "y": 4, "z": 4}


def pictures() -> dict[str, Figure]:
    """Return every picture of the page, by the name of its file."""
    plan = gspmd.plan("BLE_xyz, E_xF_yz -> BLF_yzx", SIZES, MESH)
    return {
        "plan.svg": plan.figure(),
        "steps.svg": gspmd.plan("BLE_xyz, E_xF_yz -> BLF_yzx", SIZES, {"x": 2, "y": 2, "z": 2}).steps_figure(),
        "blocks.svg": gspmd.show("B_xLE_y partialsum-z", (8, 4, 16), {"x": 2, "y": 2, "z": 2}),
        "layout.svg": gspmd.Layout.load("weight-stationary-2d").figure(),
    }


if __name__ == "__main__":
    for name, figure in pictures().items():
        figure.save(IMAGES / name)
