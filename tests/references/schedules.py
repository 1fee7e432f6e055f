"""A door for tests to the schedules that are no public choice."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from gspmd.lowerings import default
from gspmd.planner.overlap import SCHEDULES


@contextmanager
def every_schedule() -> Iterator[None]:
    """Let every schedule be asked for, as those that are public."""
    every = (f"looped:{name}" for name in SCHEDULES)
    with mock.patch.object(default, "LOWERINGS", tuple(dict.fromkeys((*default.LOWERINGS, *every)))):
        yield
