"""Tables in pages: what a benchmark found, between two marks."""

from pathlib import Path


def write_between(path: Path, marks: tuple[str, str], content: str) -> None:
    """Replace what stands between two marks of a page."""
    before, _, rest = path.read_text().partition(marks[0])
    path.write_text(f"{before}{marks[0]}\n{content}\n\n{marks[1]}{rest.partition(marks[1])[2]}")
