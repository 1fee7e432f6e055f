"""A figure as a document, as a file, and in a notebook."""

import io
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

import gspmd
from gspmd.figures import Figure
from gspmd.figures.bars import Bar, bars_figure
from gspmd.figures.canvas import Canvas
from gspmd.pipeline import Schedule
from tests.figures.svg import check_places, root

SIZES, MESH = {"B": 512, "L": 1, "E": 18432, "F": 73728}, {"x": 4, "y": 4, "z": 4}
ODD = Figure('<a> & "b"', "c < d", "plain → text", (0, 0, 10, 10), "")


def _plan() -> gspmd.Plan:
    return gspmd.plan("BE_x -> BE", {"B": 4, "E": 8}, {"x": 4})


def test_a_document_stands_alone_and_says_what_it_shows():
    svg = _plan().figure().svg
    document = ElementTree.fromstring(svg)
    assert document.get("role") == "img"
    assert document.get("aria-label") == document[0].text == "Plan of BE_x -> BE"
    assert document[1].text.startswith("The plan of BE_x -> BE: all-gather x, ")
    for reference in ("href", "url(", "@import", "<script", "http://", "id="):
        assert reference not in svg.replace('xmlns="http://www.w3.org/2000/svg"', ""), reference


def test_texts_of_others_are_escaped():
    document = root(ODD)
    assert document.get("aria-label") == '<a> & "b"'
    assert document[1].text == "c < d"


@pytest.mark.parametrize("odd", ["\x1b[1m", "\udcff", "\x00", "\uffff"])
def test_characters_that_xml_forbids_are_replaced(odd):
    canvas = Canvas()
    canvas.text(0, 0, f"a{odd}", data_name=odd)
    canvas.rect(0, 0, 1, 1, "box", title=odd)
    with canvas.group(data_key=odd, title=odd):
        pass
    figure = canvas.figure(odd, odd, "")
    document = root(figure)
    assert "".join(document.itertext()).count("\ufffd") == 5
    figure.svg.encode()


def test_the_text_is_made_when_it_is_needed():
    asked = []
    figure = Figure("a", "b", lambda: asked.append(1) or "text", (0, 0, 1, 1), "")
    figure.document()
    assert (asked, repr(figure)) == ([], "<Figure 'a', 1 × 1; print it for its text>")
    assert (str(figure), figure.plain, asked) == ("text", "text", [1])


@pytest.mark.parametrize("call", [Figure.document, Figure.png])
def test_a_color_that_is_no_theme_is_refused(call):
    with pytest.raises(ValueError, match=r"cannot draw a figure in color 'blue'.\n  Write 'light' or 'dark'"):
        call(ODD, "blue")


def test_it_is_saved_as_svg(tmp_path):
    figure = _plan().figure()
    assert figure.save(tmp_path / "plan.svg").read_text(encoding="utf-8") == figure.svg
    assert "@media" not in figure.save(tmp_path / "dark.SVG", color="dark").read_text(encoding="utf-8")


def test_it_is_saved_as_png(tmp_path):
    pytest.importorskip("resvg_py")
    figure = _plan().figure()
    data = figure.save(tmp_path / "plan.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20], "big") == round(3 * figure.width)
    body = re.sub("<text .*</text>", "", figure.body)
    assert body != figure.body
    assert _pixels(replace(figure, body=body).png()) != _pixels(data)


def _pixels(data: bytes) -> bytes:
    from PIL import Image

    return Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def test_a_png_without_fonts_is_refused(monkeypatch):
    resvg = pytest.importorskip("resvg_py")
    draw = partial(resvg.svg_to_bytes, skip_system_fonts=True)
    monkeypatch.setitem(sys.modules, "resvg_py", SimpleNamespace(svg_to_bytes=draw))
    with pytest.raises(RuntimeError, match=r"on a machine without fonts.\n  Install some"):
        _plan().figure().png()


def test_a_png_is_drawn_with_the_font_that_is_there(monkeypatch):
    """Without Arial, which resvg takes for sans-serif, text would be left out."""
    from matplotlib import get_data_path

    resvg = pytest.importorskip("resvg_py")
    fonts = {"skip_system_fonts": True, "font_dirs": [str(Path(get_data_path(), "fonts", "ttf"))]}  # DejaVu
    monkeypatch.setitem(sys.modules, "resvg_py", SimpleNamespace(svg_to_bytes=partial(resvg.svg_to_bytes, **fonts)))
    figure = _plan().figure()
    body = re.sub("<text .*</text>", "", figure.body)
    assert _pixels(replace(figure, body=body).png()) != _pixels(figure.png())


def test_what_cannot_be_saved_is_refused(tmp_path, monkeypatch):
    figure = _plan().figure()
    with pytest.raises(
        ValueError, match=r"cannot save a figure as 'plan.pdf'.\n  Give a name that ends in .svg or .png."
    ):
        figure.save("plan.pdf")
    with pytest.raises(ValueError, match="cannot draw a figure in color 'blue'"):
        figure.save(tmp_path / "plan.svg", color="blue")
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(ImportError, match=r"pip install 'gspmd\[png\]'"):
        figure.save(tmp_path / "plan.png")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["{}/none/plan.svg", "{}/file/plan.svg", "{}/folder.svg", "{}/" + 300 * "a" + ".svg"])
@pytest.mark.parametrize(
    "draw", [lambda: _plan().figure(), lambda: Schedule.of("1f1b", 2, 2)], ids=["SVG", "matplotlib"]
)
def test_a_file_that_cannot_be_written_is_named(tmp_path, name, draw):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.svg").mkdir()
    path = Path(name.format(tmp_path))
    with pytest.raises(OSError) as caught:
        draw().save(path)
    with pytest.raises(OSError) as raw:
        path.write_bytes(b"")
    assert (type(caught.value), str(caught.value)) == (type(raw.value), str(raw.value))


@pytest.mark.parametrize("name", ["a\0b.svg", "\ud800.svg"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"cannot write '.*\.svg': .*\n  Give another name\.") as caught:
        _plan().figure().save(tmp_path / name)
    assert type(caught.value) is ValueError
    str(caught.value).encode()


def test_a_notebook_follows_the_theme_around_it():
    html = _plan().figure()._repr_html_()
    assert '[data-jp-theme-light="false"]' in html
    assert "max-width:100%" in html


def _in_dejavu(text: str, size: float, bold: bool) -> float:
    """The width of a text in DejaVu Sans, the widest of the common fonts, by the font's own metrics."""
    from matplotlib import get_data_path
    from PIL import ImageFont

    file = Path(get_data_path(), "fonts", "ttf", f"DejaVuSans{'-Bold' * bold}.ttf")
    return ImageFont.truetype(file, 100).getlength(text) * size / 100


@pytest.mark.parametrize(
    "draw",
    [
        lambda: gspmd.plan("BLE_xyz, E_xF_yz -> BLF_yzx", SIZES, MESH, lowering="looped").figure(gradients=True),
        lambda: gspmd.plan("BLE_xyz, E_xF_yz -> BLF_yzx", SIZES, MESH).steps_figure(),
        lambda: gspmd.Layout.load("gshard").figure(),
        lambda: gspmd.show("B_xLE_yz", (512, 1, 18432), MESH),
        lambda: bars_figure(
            "a title", [Bar("collective-permute data,fsdp,model", "slice", (1.0,), "1,024 arrays, 9 GB")]
        ),
    ],
    ids=["plan", "steps", "layout", "blocks", "bars"],
)
def test_texts_have_room_in_a_wide_font(draw):
    check_places(draw(), _in_dejavu)
