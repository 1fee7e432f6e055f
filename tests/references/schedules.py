"""A door for tests to the schedules that are no public choice."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from gspmd.layouts.rules import check
from gspmd.lowerings import in_force
from gspmd.planner.overlap import SCHEDULES


@contextmanager
def every_schedule() -> Iterator[None]:
    """Let every schedule be asked for, by a call or by a layout, as those that are public."""
    every = tuple(dict.fromkeys((*in_force.LOWERINGS, *(f"looped:{name}" for name in SCHEDULES))))
    with mock.patch.object(in_force, "LOWERINGS", every), mock.patch.object(check, "LOWERINGS", every):
        yield
