"""What is written of a step: one object in the file, and events of scalars, of layers, and of experts."""

import json
import struct

import numpy as np
from tensorboardX.proto.event_pb2 import Event

from gspmd.training.metrics import Metrics

FIGURES = {
    "loss": 2.0,
    "dropped": np.float32([0.125, 0.0]),
    "load": np.float32([[0.5, 0.25, 0.25], [0.0, 0.25, 0.75]]),
    "absent": None,
}


def events(out):
    """The values in the events of a run, by tag."""
    (path,) = (out / "events").iterdir()
    data, at, found = path.read_bytes(), 0, {}
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + size])
        found |= {value.tag: value for value in event.summary.value}
        at += size + 16
    return found


def test_a_layer_has_events_of_its_own(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.write(3, FIGURES)
    found = events(tmp_path)
    assert found["loss"].simple_value == 2.0
    assert [found[f"dropped/layer_{layer}"].simple_value for layer in (1, 2)] == [0.125, 0.0]
    assert [found[f"load_largest/layer_{layer}"].simple_value for layer in (1, 2)] == [1.5, 2.25]
    assert "absent" not in found


def test_bucket_i_of_a_histogram_is_expert_i(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.write(3, FIGURES)
    histogram = events(tmp_path)["load/layer_2"].histo
    assert list(histogram.bucket_limit) == [0.5, 1.5, 2.5]
    assert list(histogram.bucket) == [0.0, 0.25, 0.75]
    assert (histogram.min, histogram.sum, histogram.sum_squares) == (-0.5, 1.75, 3.25)


def test_the_file_has_the_arrays_themselves(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.write(3, FIGURES)
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row == {"step": 3, "loss": 2.0, "dropped": [0.125, 0.0], "absent": None} | {
        "load": [[0.5, 0.25, 0.25], [0.0, 0.25, 0.75]]
    }
