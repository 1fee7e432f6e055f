"""A profile of some training steps: an XProf trace in the run's folder."""

from collections.abc import Callable
from pathlib import Path

import jax

from gspmd.training.syntax import parse_profile

_FOLDER = "profile"


class Profile:
    """A recording of some steps by JAX's profiler; requested steps that are already done are reported.

    Args:
        steps: `"FROM:TO"`, both included, or "" for no recording.
        out: the run's folder, in which the trace is written to profile/.
        done: the number of steps done before this start.
        tell: a function that is called with a line of text if some of the requested steps are already done. This is not
            an error, because a run may be resumed with the flags that began it.
        record: whether this process records. Of several processes, only the first one should.
    """

    def __init__(
        self, steps: str, out: Path, done: int = 0, tell: Callable[[str], None] = print, *, record: bool = True
    ):
        self.folder, self._running = out / _FOLDER, False
        first, self._last = parse_profile(steps) if steps else (0, 0)
        self._first = max(first, done + 1) if record and self._last > done else 0
        if steps and first <= done:
            rest = "nothing is profiled" if self._last <= done else f"the profile begins with step {done + 1}"
            tell(f"profile is {steps!r}, but step {done} is done: {rest}.")

    def before(self, step: int) -> None:
        """Start recording if this is the first step to record."""
        if step == self._first:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # Python's calls would hide the devices', and take most of the file.
            jax.profiler.start_trace(str(self.folder), profiler_options=options)
            self._running = True

    def after(self, step: int) -> bool:
        """Stop recording and write the trace if this was the last step to record; return whether it was the last."""
        if not self._running or step < self._last:
            return False
        self.close()
        return True

    def close(self) -> None:
        """Stop a recording in progress, and write the trace of the steps so far."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
