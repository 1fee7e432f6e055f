"""Custom sections, such as `[ssm]`, in which the first spec of a key declares the key and fixes its dimensions."""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from gspmd.annotate import Fault, Spec, SpecError, parse_via
from gspmd.annotate.errors import shown
from gspmd.layouts.rules.faults import Line
from gspmd.layouts.rules.keys import (
    DIMENSIONS,
    ENCODER,
    OVERRIDES,
    PARTS,
    PIPELINE,
    SERVING,
    Key,
    keys_of_override,
    of_part,
)

#: Sections with a fixed meaning; every other section is a custom section.
KNOWN = (*PARTS, PIPELINE, *OVERRIDES, SERVING, "mesh", "lowering", "dimensions", "padding")

_VIA = "_via"

_BLOCKS = frozenset({"attention", "ffn", "moe"})  # The sections of a transformer's blocks.

#: Methods and attributes of `gspmd.layouts.section.Section`, which must not be names of lines.
METHODS = (
    "add_bias",
    "einsum",
    "equation",
    "key_of",
    "layer_norm",
    "lowering",
    "move",
    "renamed",
    "rms_norm",
    "spec",
    "via",
)

Dims = str | tuple[str, ...]
"""The dimensions of a tensor, such as `"BSE"`, or of the two operands of a via, such as `("BSE", "ES")`."""


def declared(table: Mapping[str, Any]) -> dict[str, Dims]:
    """Return the keys of custom sections, with the dimensions of their specs.

    A spec that cannot be parsed has no dimensions. A section is left out if its name looks like a misspelling of a
    known section.

    >>> declared({"ssm.state": "B_xSE_y", "ssm.in_via": "BSE_y, E_yF", "ffn.w_in": "EF", "fnn.w_in": "EF"})
    {'ssm.state': 'BSE', 'ssm.in_via': ('BSE', 'EF')}
    """
    result, written = {}, sections(table)
    for name, text in table.items():
        section, dot, key = name.partition(".")
        known = section in KNOWN and not is_own_encoder(section, key, written)
        if dot and section.isidentifier() and not known and not misspelt(section, key, written):
            result[name] = _dims(text, via=key.endswith(_VIA))
    return result


def is_own_encoder(section: str, key: str, written: Iterable[str]) -> bool:
    """Return whether a line belongs to a section `[encoder]` of a custom model, not to the overriding section.

    The keys of the overriding section have a dot, as in `"attention.w_q"`. A key without a dot is a mistake in a layout
    that has the sections of a transformer's blocks. In any other layout, such a key is a line of a custom model.

    >>> is_own_encoder("encoder", "w_q", ["embedding", "head"]), is_own_encoder("encoder", "w_q", ["attention"])
    (True, False)
    """
    return section == ENCODER and "." not in key and _BLOCKS.isdisjoint(written)


def sections(own: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the sections to which these keys belong."""
    return tuple(dict.fromkeys(name.partition(".")[0] for name in own))


def keys(own: Mapping[str, Dims]) -> dict[str, Key]:
    """Return a `Key` for each key of a custom section."""
    return {name: _key(name, dims) for name, dims in own.items()}


def misspelt(section: str, key: str, written: Iterable[str] = PARTS) -> str:
    """Return the known section of which `section` is a misspelling, or an empty string.

    A custom section may have any name. Without this check, a typo such as `[fnn]` would silently declare a section and
    leave [ffn] as in the base. A name counts as a typo of a section of the model only if `key` resembles a key of that
    section too.

    A layout without the sections of a transformer's blocks is for a custom model. In such a layout no name counts as a
    typo of a section of the model. It may still be a typo of another known section, such as [optimizer].

    Args:
      section, key: the section and the key of the line.
      written: all sections of the layout.

    >>> misspelt("fnn", "w_in"), misspelt("optimiser", "ffn.w_in")
    ('ffn', 'optimizer')
    >>> misspelt("decoder", "cross"), misspelt("mem", "w_in"), misspelt("fnn", "w_in", ["embedding", "fnn", "output"])
    ('', '', '')
    """
    for near in get_close_matches(section, KNOWN, n=1, cutoff=0.6):
        if near in PARTS:
            if _BLOCKS.isdisjoint(written) or not _one_slip(section, near):
                return ""
            theirs = [known.name.partition(".")[2] for known in of_part(near)]
            return near if get_close_matches(key, theirs, n=1, cutoff=0.75) else ""
        if near == section:
            continue
        if near in OVERRIDES or near == SERVING:
            return near if "." in key or key in keys_of_override(near) else ""
        return near
    return ""


def _one_slip(name: str, known: str) -> bool:
    """Return whether two names differ only by one replaced letter or by the order of their letters.

    The result is also True if the names have different lengths. `get_close_matches` alone is not enough, because it
    counts common letters and so would take `mem` for `moe`.
    """
    others = sum(one != other for one, other in zip(name, known))
    return len(name) != len(known) or others <= 1 or sorted(name) == sorted(known)


def naming_faults(own: Mapping[str, Dims], letters: Mapping[str, Any], sizes: Mapping[str, int]) -> Iterator[Fault]:
    """Yield the faults in [dimensions], and faults for letters without a meaning and for lines named like a method."""
    for letter, meaning in letters.items():
        line = Line(letter, str(meaning), "dimensions")
        if not (len(letter) == 1 and letter.isascii() and letter.isupper()):
            yield line.at_key(f"{letter!r} is not a dimension.", "A dimension is one capital letter.")
        elif letter in DIMENSIONS:
            yield line.at_key(f"dimension {letter} is {DIMENSIONS[letter]} in every layout.", "Take another letter.")
        elif not isinstance(meaning, str):
            yield line.at_text(
                f"the meaning of {letter} must be a string, but it is {shown(meaning)}.", "Write it in quotes."
            )
    for name in own:
        if (short := name.partition(".")[2]) in METHODS:
            yield Line(name).at_key(
                f"`{short}` is a method of sections, so no line can be called that.", "Take another name."
            )
    known = {*DIMENSIONS, *letters, *sizes}
    for name, dims in own.items():
        for letter in (letter for letter in "".join(dims) if letter not in known):
            fact = f"nothing says what dimension {letter} is."
            yield Line(name).at_key(fact, f'Write {letter} = "what it is" in [dimensions], or give its size.')


def _key(name: str, dims: Dims) -> Key:
    if name.endswith(_VIA):
        return Key(name, dims, "via", "Specs in which two custom tensors are multiplied.", optional=True)
    return Key(name, dims, "tensor", "A custom tensor.")


def _dims(text: Any, *, via: bool) -> Dims:
    """Return the dimensions of a spec, or of each operand of a via.

    If the text cannot be parsed, there are no dimensions. If the text is a tuple of alternatives, the first alternative
    is read.
    """
    text = text[0] if isinstance(text, tuple) else text
    try:
        if via:
            return tuple("".join(operand.specs[0].dims) for operand in parse_via(text)[0].operands)
        return "".join(Spec.parse(text).dims)
    except SpecError:
        return ("",) if via else ""
