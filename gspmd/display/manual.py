"""Addresses of the documentation, for messages, because an installed package has no docs/ folder to point to."""

DOCS = "https://github.com/gspmd/gspmd/tree/main/docs"


def page(name: str) -> str:
    """Return the address of a page of the documentation.

    >>> page("slices.md")
    'https://github.com/gspmd/gspmd/tree/main/docs/slices.md'
    """
    return f"{DOCS}/{name}"
