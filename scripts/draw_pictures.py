"""Renew the pictures of docs/pictures.md and docs/page.md, which are in docs/images.

python scripts/draw_pictures.py           # docs/pictures.md
python scripts/draw_pictures.py --page    # docs/page.md: a browser draws it, and fonts differ between machines
"""

import argparse
import io
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from shutil import which
from urllib.parse import urlencode

import gspmd
from gspmd.figures import Figure
from gspmd.page.equation import said

IMAGES = Path(__file__).parents[1] / "docs" / "images"
EQUATION = "BLE_xyz, E_xF_yz -> BLF_yzx"
SIZES, MESH = {"B": 512, "L": 1, "E": 18432, "F": 73728}, {"x": 4, "y": 4, "z": 4}


def pictures() -> dict[str, Figure]:
    """Return every picture of docs/pictures.md, each under the name of its file."""
    return {
        "plan.svg": gspmd.plan(EQUATION, SIZES, MESH).figure(),
        "steps.svg": gspmd.plan(EQUATION, SIZES, {"x": 2, "y": 2, "z": 2}).steps_figure(),
        "blocks.svg": gspmd.show("B_xLE_y partialsum-z", (8, 4, 16), {"x": 2, "y": 2, "z": 2}),
        "layout.svg": gspmd.Layout.load("weight-stationary-2d").figure(),
    }


def address_of(server: subprocess.Popen[str]) -> str:
    """Return the address that a page's server prints; if it prints none, exit with the server's own message."""
    told = []
    for line in server.stdout or ():
        if found := re.search(r"http://\S+", line):
            return found[0]
        told.append(line)
    sys.exit(f"the page did not start:\n{''.join(told)}")


def draw_page(path: Path) -> None:
    """Draw the page of an equation in a browser, with the pointer on a device; the PNG says how it was made."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo
    from playwright.sync_api import sync_playwright

    argv = [sys.executable, "-m", "gspmd", "page", "--no-browser"]
    with (
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server,
        sync_playwright() as started,
    ):
        try:
            address = address_of(server)
            browser = started.chromium.launch(executable_path=which("chromium"), args=["--no-sandbox"])
            sheet = browser.new_page(viewport={"width": 1280, "height": 1100}, device_scale_factor=1.5)
            asked = {"equation": EQUATION}
            asked |= {name: ",".join(f"{key}={size}" for key, size in of.items())
                      for name, of in (("sizes", SIZES), ("mesh", MESH))}  # fmt: skip
            sheet.goto(f"{address}?{urlencode(asked)}")
            sheet.wait_for_selector("#answer[data-compared]")
            sheet.locator("[data-tensor=before] [data-device='21']").first.hover()
            drawn = sheet.screenshot()
        finally:
            server.terminate()
    figures = said(gspmd.plan(EQUATION, SIZES, MESH))
    carried = {
        "Software": f"gspmd {version('gspmd')}",
        "Title": "gspmd page",
        "Description": ", ".join(figures[f"said_{name}"] for name in ("seconds", "bytes", "flops")),
        "Source": "gspmd page",
    }
    texts = PngInfo()
    for name, text in carried.items():
        texts.add_itxt(name, text)
    Image.open(io.BytesIO(drawn)).convert("RGB").save(path, pnginfo=texts, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="draw docs/images/page.png")
    if parser.parse_args().page:
        draw_page(IMAGES / "page.png")
    else:
        for name, figure in pictures().items():
            figure.save(IMAGES / name)
