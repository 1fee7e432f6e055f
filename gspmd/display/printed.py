"""The text that `print` and a notebook show for an object with a `__rich__`; rich is imported only when something is
printed."""


class Printed:
    """Base of objects that `print` and notebooks show in full, by their `__rich__`; their `repr` is one line."""

    def __str__(self) -> str:
        from gspmd.display.console import text

        return text(self)

    def _repr_html_(self) -> str:
        from gspmd.display.html import page, rendered

        return page([*rendered(self), *self._figures_html()])

    def _figures_html(self) -> list[str]:
        """Return pictures below the tables, as HTML."""
        return []
