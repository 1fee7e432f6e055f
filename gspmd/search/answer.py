"""Answers of a search: picks with their cost and what is proved of it, or that nothing fits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """Picks of all choices, and how good they are known to be.

    Attributes:
        picks: For each choice the index of its option.
        seconds: What they cost.
        bytes: What they hold.
        bound: No allowed picks that fit cost fewer seconds: proved, and never above `seconds`.
        complete: Whether the search ended by itself: `bound` is `seconds`, up to a tolerance where one was given.
    """

    picks: dict[str, int]
    seconds: float
    bytes: float
    bound: float
    complete: bool


class NothingFits(ValueError):
    """No allowed picks hold as few bytes as the limit asks for, or none are allowed at all.

    Attributes:
        nearest: Allowed picks of the fewest bytes; None where none are allowed.
        limit: The bytes that were the limit; None where there was none.
        over: By how many bytes the nearest exceed it; None without nearest.
    """

    def __init__(self, nearest: Answer | None, limit: float | None):
        self.nearest = nearest
        self.limit = limit
        self.over = None
        if nearest is None or limit is None:
            super().__init__(
                "no combination of options is allowed: each has a term of infinite seconds.\n"
                "  Fix fewer choices, exclude fewer options, or give the choices more of them."
            )
        else:
            self.over = nearest.bytes - limit
            super().__init__(
                f"nothing fits: the smallest combination holds {nearest.bytes:.6g} bytes, {self.over:.6g} more than "
                f"the limit of {limit:.6g}.\n"
                "  Raise the limit, exclude fewer options, or give the choices options that hold less."
            )
