"""TensorBoard events of a run: scalars, scalars per layer, histograms over experts, pictures and texts."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import histogram_raw, scalar, text

# Seconds between two flushes, because each one waits for the disk.
_SECONDS = 10


class Events:
    """The events in `<out>/events`, written in the calling thread so that a full disk raises an error in this thread.

    Args:
        out: the run's folder.
        resumed_at: the step from which the run resumes; events of later steps are hidden.
    """

    def __init__(self, out: str | Path, resumed_at: int | None = None):
        folder = Path(out) / "events"
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = RecordWriter(str(folder / name))
        self._due = 0.0
        self._write(Event(file_version="brain.Event:2"))
        if resumed_at is not None:
            self._write(Event(step=resumed_at + 1, session_log=SessionLog(status=SessionLog.START)))

    def add(self, step: int, name: str, value: np.ndarray) -> None:
        """Add a metric of a step. Its value is a scalar, [layers] or [layers, X]; see `Metrics.write`."""
        if value.ndim == 0:
            self._add(step, scalar(name, float(value)))
            return
        for layer, of_layer in enumerate(value, 1):
            if value.ndim == 1:
                self._add(step, scalar(f"{name}/layer_{layer}", float(of_layer)))
            else:
                self._add(step, scalar(f"{name}_largest/layer_{layer}", float(of_layer.max() * len(of_layer))))
                self._add(step, histogram_raw(f"{name}/layer_{layer}", **_buckets(of_layer)))

    def text(self, step: int, name: str, markdown: str) -> None:
        """Add a text to the events."""
        self._add(step, text(name, markdown))

    def picture(self, step: int, name: str, png: Path) -> None:
        """Add a picture from a PNG file."""
        data = png.read_bytes()
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))  # read from the PNG header, IHDR
        image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=data)
        self._add(step, Summary(value=[Summary.Value(tag=name, image=image)]))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, step: int, summary: Any) -> None:
        self._write(Event(step=step, summary=summary))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._file.write(event.SerializeToString())
        if event.wall_time >= self._due:
            self._due = event.wall_time + _SECONDS
            self._file.flush()


def _buckets(shares: np.ndarray) -> dict[str, Any]:
    """Return tensorboardX's arguments for a histogram in which bucket i, from i - ½ to i + ½, has expert i's load."""
    shares, index = shares.astype(np.float64), np.arange(len(shares))
    moments = {"num": shares.sum(), "sum": (shares * index).sum(), "sum_squares": (shares * index**2).sum()}
    limits = {"bucket_limits": (index + 0.5).tolist(), "bucket_counts": shares.tolist()}
    return {"min": -0.5, "max": len(shares) - 0.5, **moments, **limits}
