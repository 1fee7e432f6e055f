"""Access for tests to the schedules that are not public choices."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from gspmd.layouts.rules import check
from gspmd.lowerings import names
from gspmd.planner.overlap import SCHEDULES


@contextmanager
def every_schedule() -> Iterator[None]:
    """Let calls and layouts ask for every schedule, as for the public ones."""
    every = tuple(dict.fromkeys((*names.LOWERINGS, *(f"looped:{name}" for name in SCHEDULES))))
    with mock.patch.object(names, "LOWERINGS", every), mock.patch.object(check, "LOWERINGS", every):
        yield
