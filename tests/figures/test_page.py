"""The pictures of docs/pictures.md are those that the code draws."""

import subprocess
import sys

import pytest

from scripts.draw_pictures import IMAGES, address_of, pictures

PICTURES = pictures()


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_renewed(name):
    drawn = (IMAGES / name).read_text(encoding="utf-8")
    assert drawn == PICTURES[name].svg, "run: python scripts/draw_pictures.py"
    assert f"(images/{name})" in (IMAGES.parent / "pictures.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("printed", ["gspmd page: http://127.0.0.1:1/   (Ctrl-C ends it)", "no port is free"])
def test_the_page_is_drawn_where_its_server_says(printed):
    argv = [sys.executable, "-c", f"print('a warning'); print({printed!r})"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        if "http" in printed:
            assert address_of(server) == "http://127.0.0.1:1/"
        else:
            with pytest.raises(SystemExit, match="a warning\nno port is free"):
                address_of(server)
