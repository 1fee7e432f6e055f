"""Safetensors files: any region of a tensor that the library safetensors wrote, and all that may be wrong."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from gspmd_models.checkpoints.files import CheckpointError, Files

BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("wanted", [np.float32, BF16])
def test_any_region_is_read_and_counted(dtype, wanted, tmp_path):
    random = np.random.default_rng(0)
    values = {name: random.standard_normal((6, 4, 5)).astype(dtype) for name in "abc"}
    save_file({name: value.reshape(24, 5) for name, value in values.items()}, tmp_path / "model.safetensors")
    with Files(tmp_path) as files:
        for name, value in values.items():
            bounds = [sorted(random.integers(0, size + 1, 2)) for size in value.shape]
            region = tuple(slice(*map(int, bound)) for bound in bounds)
            out = np.full(value[region].shape[::-1], np.nan, wanted)
            assert files.read_into(out.T, name, value.shape, region) == out.size * value.itemsize
            np.testing.assert_array_equal(out.T, value[region].astype(wanted))


def test_every_length_of_a_truncated_file_is_one_message(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": np.arange(6.0), "b": np.arange(3.0)}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated") as error:
            Files(tmp_path)
        assert len(error.value.faults) == 1
        assert f"{length:,} bytes" in error.value.faults[0]


def header(entries: object, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode() if not isinstance(entries, bytes) else entries
    return len(text).to_bytes(8, "little") + text + data


FULL = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "no JSON": header(b"{not json"),
    "no object": header([1, 2]),
    "no dtype": header({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "one offset": header({"a": FULL | {"data_offsets": [0]}}, bytes(8)),
    "bytes that do not make the shape": header({"a": FULL | {"shape": [3]}}, bytes(8)),
    "a negative size": header({"a": FULL | {"shape": [-2]}}, bytes(8)),
    "no text": header(b"\xff\xfe\xfd"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_malformed_header_is_one_message(what, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(BROKEN[what])
    with pytest.raises(CheckpointError, match=r"header that cannot be read: (?!\w+Error)"):
        Files(tmp_path)


def index(folder, places: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_all_missing_and_truncated_files_are_named(tmp_path):
    index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors", "c": "3.safetensors"})
    save_file({"a": np.zeros(2)}, tmp_path / "1.safetensors")
    with pytest.raises(CheckpointError) as error:
        Files(tmp_path)
    assert [fault.split()[0] for fault in error.value.faults] == ["2.safetensors", "3.safetensors"]
    for name in "23":
        (tmp_path / f"{name}.safetensors").write_bytes(b"123")
    with pytest.raises(CheckpointError) as error:
        Files(tmp_path)
    assert [fault.split()[0] for fault in error.value.faults][:2] == ["2.safetensors", "2.safetensors"]
    assert "3.safetensors is truncated" in str(error.value)


def test_an_index_that_promises_too_much_or_is_broken(tmp_path):
    save_file({"a": np.zeros(2)}, tmp_path / "1.safetensors")
    save_file({"a": np.zeros(2)}, tmp_path / "2.safetensors")
    index(tmp_path, {"a": "1.safetensors", "b": "1.safetensors"})
    with pytest.raises(CheckpointError, match=r"1\.safetensors lacks b"):
        Files(tmp_path)
    index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    with pytest.raises(CheckpointError, match=r"a stands in 1\.safetensors and in 2\.safetensors"):
        Files(tmp_path)
    for places in (None, ["a"], {"a": 1}):
        index(tmp_path, places)
        with pytest.raises(CheckpointError, match="has no weight_map"):
            Files(tmp_path)


def test_a_folder_without_safetensors_says_what_it_holds(tmp_path):
    with pytest.raises(CheckpointError, match="it is empty"):
        Files(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"it holds pytorch_model\.bin"):
        Files(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        Files(tmp_path / "none")


def test_a_folder_in_the_place_of_a_file_is_one_message(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: Is a directory"):
        Files(tmp_path)


def test_a_message_lists_the_first_hundred_faults():
    error = CheckpointError("cannot read it:", [f"fault {number}" for number in range(1234)])
    assert str(error).splitlines()[-2:] == ["  fault 99", "  ... and 1,134 more."]
    assert len(error.faults) == 1234
