"""`Figure`: a picture in an SVG document, in a file, in a notebook, or as text on a terminal."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from os import PathLike, fspath
from pathlib import Path

from gspmd.display import theme
from gspmd.display.plain import printable
from gspmd.display.xml import escaped
from gspmd.writing import replace_file

Text = str | Callable[[], str]
"""A text, or a function that returns it when it is first needed."""
_XMLNS = "http://www.w3.org/2000/svg"
_PROBE = f'<svg xmlns="{_XMLNS}" width="9" height="9"><text font-family="{theme.FONT}" y="9">%s</text></svg>'
"""A template of an SVG document with one text; on a machine without fonts, any text is drawn like an empty text."""
_SANS_SERIF = (None, "DejaVu Sans", "Liberation Sans", "Noto Sans", "FreeSans")
"""Fonts that resvg is told to use as sans-serif, tried in this order. None keeps the default of resvg, Arial."""
_SCALE = 3.0
"""Pixels of a PNG for each CSS pixel of its figure: about 290 dots per inch."""


@dataclass(frozen=True, repr=False)
class Figure:
    """A picture that notebooks show, `print` writes as text, and `save` writes as SVG or PNG.

    Attributes:
      title: the subject of the picture, for a window's title and for screen readers.
      description: a sentence for those who cannot see the picture.
      text: the same information as text, or a function that returns it.
      box: left, top, width and height of the drawing, in CSS pixels.
      body: the SVG elements, without the document around them.

    Example:
      >>> figure = Figure("A dot", "One dot.", "*", (0, 0, 8, 8), '<circle r="2" cx="4" cy="4" class="ink"/>')
      >>> print(figure)
      *
      >>> figure.svg.splitlines()[0][:59]
      '<svg xmlns="http://www.w3.org/2000/svg" class="gspmd-figure'
    """

    title: str
    description: str
    text: Text
    box: tuple[float, float, float, float]
    body: str = field(repr=False)

    @cached_property
    def plain(self) -> str:
        """The information of the picture as text; `print(figure)` prints it."""
        return self.text if isinstance(self.text, str) else self.text()

    @property
    def width(self) -> float:
        """The width of the picture at its own size, in CSS pixels."""
        return self.box[2]

    @property
    def height(self) -> float:
        """The height of the picture at its own size, in CSS pixels."""
        return self.box[3]

    @property
    def svg(self) -> str:
        """The picture as an SVG document: light, or dark if the reader prefers that. Texts are stored as text."""
        return self.document()

    def document(self, color: str = "", *, standalone: bool = True) -> str:
        """Return the picture as an SVG document.

        Args:
          color: `"light"` or `"dark"` for one theme; empty for the theme that the reader prefers.
          standalone: whether the picture is a document of its own. If false, the picture is part of a page, such as
              JupyterLab's: it follows the theme of this page, and shrinks to the width that is available there.

        Raises:
          ValueError: `color` is not a theme.
        """
        if color not in ("", *theme.THEMES):
            raise ValueError(f"cannot draw a figure in color {color!r}.\n  Write 'light' or 'dark', or leave it out.")
        left, top, wide, high = (f"{value:.6g}" for value in self.box)
        size = f'width="{wide}" height="{high}" viewBox="{left} {top} {wide} {high}"'
        fitted = "" if standalone else ' style="max-width:100%;height:auto"'
        head = f'<svg xmlns="{_XMLNS}" class="gspmd-figure" role="img" {size}{fitted}'
        corner = "" if standalone else ' rx="6"'
        ground = f'<rect class="ground" x="{left}" y="{top}" width="{wide}" height="{high}"{corner}/>'
        return "\n".join(
            (
                f'{head} aria-label="{escaped(self.title)}">',
                f"<title>{escaped(self.title)}</title>",
                f"<desc>{escaped(self.description)}</desc>",
                f"<style>\n{theme.style(color, standalone=standalone)}</style>",
                ground,
                self.body,
                "</svg>\n",
            )
        )

    def save(self, path: str | PathLike[str], *, color: str = "") -> Path:
        """Write the picture to a file with a name that ends in `.svg` or `.png`.

        Args:
          path: the file, which is replaced if it exists.
          color: `"light"` or `"dark"`; by default an SVG has both, and a PNG is light.

        Returns:
          The path of the file.

        Raises:
          ValueError: the name has a different ending or is no valid file name, or `color` is not a theme.
          OSError: the file cannot be written.
          ImportError: a PNG is requested, but resvg, which draws PNGs, is not installed.
          RuntimeError: a PNG is requested, but the machine has no fonts.
        """
        path = Path(fspath(path))
        if path.suffix.lower() == ".svg":
            data = self.document(color).encode()
        elif path.suffix.lower() == ".png":
            data = self.png(color or "light")
        else:
            raise ValueError(f"cannot save a figure as '{path}'.\n  Give a name that ends in .svg or .png.")
        replace_file(path, lambda file: file.write_bytes(data))
        return path

    def png(self, color: str = "light", scale: float = _SCALE) -> bytes:
        """Return the picture as the bytes of a PNG.

        Args:
          color: `"light"` or `"dark"`.
          scale: number of pixels for each CSS pixel.

        Raises:
          ValueError: `color` is not a theme.
          ImportError: resvg is not installed.
          RuntimeError: the machine has no fonts; resvg would leave out all texts.
        """
        document = self.document(color)
        try:
            import resvg_py
        except ImportError:
            raise ImportError(
                "cannot draw a PNG without resvg.\n  Install it with pip install 'gspmd[png]', or save an .svg."
            ) from None
        for family in _SANS_SERIF:
            draw = partial(resvg_py.svg_to_bytes, sans_serif_family=family)
            with_text, without = (draw(svg_string=_PROBE % text) for text in ("x", ""))
            if with_text != without:
                return bytes(draw(svg_string=document, width=round(self.width * scale)))
        raise RuntimeError(
            "cannot draw a PNG on a machine without fonts.\n  Install some, such as DejaVu, or save an .svg."
        )

    def __str__(self) -> str:
        return printable(self.plain)

    def __repr__(self) -> str:
        return printable(f"<Figure {self.title!r}, {self.width:.0f} × {self.height:.0f}; print it for its text>")

    def _repr_html_(self) -> str:
        return self.document(standalone=False)

    def _repr_svg_(self) -> str:
        return self.svg
