"""Interrupts as exceptions, and the signal that each of them comes from.

This imports nothing that takes time: a command answers an interrupt while it still imports what does.
"""

import signal


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it is not deferred.

    Attributes:
        number: the signal.
    """

    number = signal.SIGTERM


class HungUp(KeyboardInterrupt):
    """SIGHUP, where it is not deferred: the terminal is closed.

    Attributes:
        number: the signal.
    """

    number = signal.SIGHUP


def number_of(interrupt: BaseException | type[BaseException]) -> int:
    """Return the signal that an interrupt came from, by the exception or by its type.

    >>> number_of(KeyboardInterrupt()) == signal.SIGINT, number_of(Terminated) == signal.SIGTERM
    (True, True)
    """
    return getattr(interrupt, "number", signal.SIGINT)
