"""The pictures of docs/pictures.md are those that the code draws."""

import pytest

from scripts.draw_pictures import IMAGES, pictures

PICTURES = pictures()


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_renewed(name):
    drawn = (IMAGES / name).read_text(encoding="utf-8")
    assert drawn == PICTURES[name].svg, "run: python scripts/draw_pictures.py"
    assert f"(images/{name})" in (IMAGES.parent / "pictures.md").read_text(encoding="utf-8")
