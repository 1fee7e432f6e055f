"""A door for tests to the schedule that is no public choice."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from gspmd.lowerings import default


@contextmanager
def every_schedule() -> Iterator[None]:
    """Let `looped:one-way` be asked for, as the schedules that are public."""
    with mock.patch.object(default, "LOWERINGS", (*default.LOWERINGS, "looped:one-way")):
        yield
