"""Figures for a reader: bytes, operations and seconds in one system of units, mesh axes as a spec writes them."""


def amount_of_bytes(amount: float) -> str:
    """Bytes for a reader.

    >>> amount_of_bytes(4423680), amount_of_bytes(999.7), amount_of_bytes(3.2e18)
    ('4.42 MB', '1 kB', '3.2 EB')
    """
    return _scaled(amount, ("B", "kB", "MB", "GB", "TB", "PB", "EB"))


def amount_of_flops(amount: float) -> str:
    """Floating-point operations for a reader."""
    return _scaled(amount, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"))


def amount_of_seconds(amount: float) -> str:
    """Seconds for a reader."""
    return "0 µs" if not amount else _scaled(amount * 1e9, ("ns", "µs", "ms", "s"))


def _scaled(amount: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if amount < 999.5:  # what rounds to 1000 belongs to the next unit
            return f"{amount:.3g} {unit}" if amount < 100 else f"{amount:.0f} {unit}"
        amount /= 1000
    return f"{amount:.3g} {units[-1]}"


def axes_text(axes: tuple[str, ...]) -> str:
    """Mesh axes as a spec writes them: `yz`, or `data,model`.

    >>> axes_text(("y", "z"))
    'yz'
    """
    return ("" if all(len(axis) == 1 for axis in axes) else ",").join(axes)
