"""The text of bytes, FLOPs, seconds, mesh axes and meshes in tables and figures."""

from collections.abc import Mapping


def amount_of_bytes(amount: float) -> str:
    """Return an amount of bytes as text, in decimal units.

    >>> amount_of_bytes(4423680), amount_of_bytes(999.7), amount_of_bytes(3.2e18)
    ('4.42 MB', '1 kB', '3.2 EB')
    """
    return _scaled(amount, ("B", "kB", "MB", "GB", "TB", "PB", "EB"))


def amount_of_flops(amount: float) -> str:
    """Return a number of floating-point operations as text."""
    return _scaled(amount, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"))


def amount_of_seconds(amount: float) -> str:
    """Return a duration as text."""
    return "0 µs" if not amount else _scaled(amount * 1e9, ("ns", "µs", "ms", "s"))


def duration(seconds: float) -> str:
    """Return a duration of seconds to days as text, in its two largest units.

    >>> duration(7.6), duration(272), duration(3600 * 50)
    ('8 s', '4 min 32 s', '2 d 2 h')
    """
    rest = round(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        parts += [f"{count} {unit}"] if count or parts or unit == "s" else []
    return " ".join(parts[:2])


def _scaled(amount: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if amount < 999.5:  # A figure that rounds to 1000 belongs to the next unit.
            return f"{amount:.3g} {unit}" if amount < 100 else f"{amount:.0f} {unit}"
        amount /= 1000
    return f"{amount:.3g} {units[-1]}"


def axes_text(axes: tuple[str, ...]) -> str:
    """Return mesh axes for a cell of a table: `yz`, or `data,model`.

    In a spec, longer names are in braces; `axes_suffix` of `gspmd.annotate.parser` writes that form.

    >>> axes_text(("y", "z")), axes_text(("data", "model"))
    ('yz', 'data,model')
    """
    return ("" if all(len(axis) == 1 for axis in axes) else ",").join(axes)


def mesh_text(mesh: Mapping[str, int], *, trivial: bool = True) -> str:
    """Return a mesh as text, in the form of the flag `--mesh`; axes of size 1 are left out if `trivial` is False.

    >>> mesh_text({"x": 4, "y": 1}), mesh_text({"x": 4, "y": 1}, trivial=False)
    ('x=4,y=1', 'x=4')
    """
    return ",".join(f"{axis}={size}" for axis, size in mesh.items() if trivial or size > 1)
