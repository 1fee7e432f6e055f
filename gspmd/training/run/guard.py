"""Updates whose loss or gradient is not finite: each is skipped, and too many such updates end the run."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console


class Diverged(Exception):
    """Raised if more updates than allowed had a loss or gradient that was not finite.

    Attributes:
        step: the step of the newest checkpoint, from which to resume; None if there is none.
        out: the run's folder.
    """

    def __init__(self, reason: str, step: int | None, out: Path):
        self.step, self.out = step, out
        super().__init__(f"{reason} {'No step' if step is None else f'Step {step}'} is saved.")


class Guard:
    """A counter of the updates that were skipped during the whole run.

    Args:
        allowed: number of updates that may be skipped; one more ends the run.
        skipped: number of updates skipped before the run was resumed.
        console: the console on which each skipped update is reported.
    """

    def __init__(self, allowed: int, skipped: int, console: Console):
        self.allowed, self.skipped, self._console = allowed, skipped, console

    def count(self, step: int, figures: Mapping[str, Any]) -> str | None:
        """Count an update if it was skipped; return the reason why the run must end, or None if it goes on."""
        if not figures["non_finite"]:
            return None
        self.skipped += 1
        finite = math.isfinite(figures["loss"])
        name, value = ("gradient's norm", figures["gradient_norm"]) if finite else ("loss", figures["loss"])
        fact, allowed = f"the {name} is {value} at step {step}", self.allowed
        if self.skipped <= allowed:
            self._console.print(f"{fact.capitalize()}; the update is skipped, {self.skipped} of at most {allowed}.")
            return None
        if step == 1:
            return (
                f"{fact}, before any update: look at the loss, the initial parameters and the data (JAX_DEBUG_NANS=1)."
            )
        if allowed == 0:
            return f"{fact}: lower --learning-rate, or raise --warmup."
        return f"{fact}, after {allowed} skipped updates: lower --learning-rate, or raise --warmup or --non-finite."
