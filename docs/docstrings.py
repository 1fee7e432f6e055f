"""The reading of docstrings for the reference: examples become code; Source and Differs become separate paragraphs."""

import re

import griffe

_NOTE = re.compile(r"^(Source|Differs): ")


class Docstrings(griffe.Extension):
    """Turn examples into blocks of code, since Markdown would read `>>>` as quotations."""

    def on_object(self, *, obj, **_):
        """Rewrite the docstring of one object: a module, a class, a function or an attribute."""
        if obj.docstring:
            obj.docstring.value = _as_markdown(obj.docstring.value)


def _as_markdown(text):
    lines, fence = [], ""
    for line in text.splitlines():
        if fence and not line.strip():
            lines.append(fence)
            fence = ""
        elif not fence and line.lstrip().startswith(">>>"):
            fence = line[: len(line) - len(line.lstrip())] + "```"
            if lines and lines[-1].strip() and not lines[-1].endswith(":"):
                lines.append("")  # it follows prose, not a heading
            lines.append(f"{fence}pycon")
        elif _NOTE.match(line):
            lines.append("")
        lines.append(_NOTE.sub(r"**\1:** ", line))
    return "\n".join([*lines, fence] if fence else lines)
