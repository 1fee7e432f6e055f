"""The text that `print` and a notebook show for an object with a `__rich__`.

rich is imported only when something is printed.
"""


class Printed:
    """The base class of objects that `print` and notebooks show in full, by `__rich__`, and whose `repr` is one line.

    A notebook shows the tables, and below them the picture if the class has a method `figure`.
    """

    def __str__(self) -> str:
        from gspmd.display.console import text

        return text(self)

    def _repr_html_(self) -> str:
        from gspmd.display.html import page, rendered

        figure = getattr(self, "figure", None)
        return page([*rendered(self), *([figure().document(standalone=False)] if figure else [])])
