"""Answers of a search: one option for each choice, with its cost and a proved bound, or an error if nothing fits."""

from dataclasses import dataclass

from gspmd.display.units import amount_of_bytes


@dataclass(frozen=True)
class Answer:
    """One option picked for each choice, with the cost and the proved bound.

    Attributes:
        picks: for each choice, the index of the option that was picked.
        seconds: the cost of these picks, in seconds.
        bytes: the bytes that a device holds under these picks.
        bound: a proved lower bound on the seconds of all allowed picks that fit; never above `seconds`.
        complete: whether the search ran to its end. If it did, `bound` equals `seconds`, up to the tolerance of the
            search.
    """

    picks: dict[str, int]
    seconds: float
    bytes: float
    bound: float
    complete: bool


class NothingFits(ValueError):
    """All allowed picks hold more bytes than the limit, or no picks are allowed at all.

    Attributes:
        nearest: the allowed picks that hold the fewest bytes, as far as they are known; None if no picks are allowed.
        limit: the limit in bytes; None if there was none.
        over: the bytes by which `nearest` exceeds the limit; None if there is no `nearest` or no limit.
        proved: whether it is proved that nothing fits. Otherwise no picks that fit were found.
    """

    def __init__(self, nearest: Answer | None, limit: float | None, message: str = "", proved: bool = True):
        """Set the message to `message`, or by default to a text about choices and options."""
        self.nearest = nearest
        self.proved = proved
        self.limit = limit
        self.over = None if nearest is None or limit is None else nearest.bytes - limit
        if message:
            pass
        elif nearest is None or limit is None:
            message = (
                "no combination of options is allowed: each has a term of infinite seconds.\n"
                "  Give fewer fixed choices, exclude fewer options, or give the choices more options."
            )
        else:
            held, over, most = map(amount_of_bytes, (nearest.bytes, nearest.bytes - limit, limit))
            fact, known = ("nothing fits", "") if proved else ("nothing was found that fits", "found ")
            message = (
                f"{fact}: the smallest combination {known}holds {held}, {over} more than the limit of {most}.\n"
                "  Raise the limit, exclude fewer options, or give the choices options that hold less."
            )
        super().__init__(message)
