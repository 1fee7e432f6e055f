"""Answers of a search: picks with their cost and what is proved of it, or that nothing fits."""

from dataclasses import dataclass

from gspmd.display.units import amount_of_bytes


@dataclass(frozen=True)
class Answer:
    """Picks of all choices, and how good they are known to be.

    Attributes:
        picks: the index of the option of each choice.
        seconds: that they cost.
        bytes: that they hold.
        bound: seconds below which no allowed picks are that fit: proved, and never above `seconds`.
        complete: whether the search ended by itself: `bound` is `seconds`, up to a tolerance where one was given.
    """

    picks: dict[str, int]
    seconds: float
    bytes: float
    bound: float
    complete: bool


class NothingFits(ValueError):
    """No allowed picks hold as few bytes as the limit asks for, or none are allowed at all.

    Attributes:
        nearest: allowed picks of the fewest bytes; None where none are allowed.
        limit: the bytes that were the limit; None where there was none.
        over: the bytes by which the nearest exceed it; None without nearest.
    """

    def __init__(self, nearest: Answer | None, limit: float | None, message: str = ""):
        """Say by how much nothing fits, in these words or in those of choices and options."""
        self.nearest = nearest
        self.limit = limit
        self.over = None if nearest is None or limit is None else nearest.bytes - limit
        if message:
            pass
        elif nearest is None or limit is None:
            message = (
                "no combination of options is allowed: each has a term of infinite seconds.\n"
                "  Fix fewer choices, exclude fewer options, or give the choices more of them."
            )
        else:
            held, over, most = map(amount_of_bytes, (nearest.bytes, nearest.bytes - limit, limit))
            message = (
                f"nothing fits: the smallest combination holds {held}, {over} more than the limit of {most}.\n"
                "  Raise the limit, exclude fewer options, or give the choices options that hold less."
            )
        super().__init__(message)
