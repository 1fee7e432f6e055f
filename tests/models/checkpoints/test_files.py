"""Safetensors files: any region of a tensor that the library safetensors wrote, and all that may be wrong."""

import json
import os
import random

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gspmd_models.checkpoints.files import CheckpointError, Files, all_finite
from gspmd_models.checkpoints.form import Form
from tests.references import mutations, volume

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
            assert files.read_into(out.T, name, Form.whole(value.shape), region) == out.size * value.itemsize
            np.testing.assert_array_equal(out.T, value[region].astype(wanted))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BF16])
def test_every_bit_pattern_of_nan_and_infinity_is_found(dtype):
    bits = np.random.default_rng(0).integers(0, 2**64, 4096, dtype=np.uint64) >> (64 - 8 * np.dtype(dtype).itemsize)
    values = bits.astype(f"u{np.dtype(dtype).itemsize}").view(dtype)
    values[:4] = np.inf, -np.inf, np.nan, -np.nan
    limits = np.finfo(np.float64) if dtype == np.float64 else ml_dtypes.finfo(dtype)
    sound = np.array([0.0, -0.0, limits.max, limits.min, limits.tiny, -limits.tiny], dtype)
    assert all_finite(sound[:0])
    assert all_finite(sound)
    with np.errstate(invalid="ignore"):  # numpy's own way of asking warns of some NaN
        finite = np.isfinite(values)
    assert finite.any()
    for value, wanted in zip(values, finite, strict=True):
        assert all_finite(np.append(sound, value)) == wanted, value.tobytes()
        assert all_finite(np.append(sound[:3], value).reshape(2, 2).T[::-1]) == wanted, value.tobytes()


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
    with pytest.raises(CheckpointError, match=r"a is in both 1\.safetensors and 2\.safetensors"):
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
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: it is a folder"):
        Files(tmp_path)


def test_a_message_lists_the_first_hundred_faults():
    error = CheckpointError("cannot read it:", [f"fault {number}" for number in range(1234)])
    assert str(error).splitlines()[-2:] == ["  fault 99", "  ... and 1,134 more."]
    assert len(error.faults) == 1234


# -- what may be wrong with the bytes of tensors, held against the library ---------------------------------------------


def two(first: list[int], second: list[int], **more: object) -> dict:
    """Two tensors of eight bytes each."""
    return {"a": FULL | {"data_offsets": first}, "b": FULL | {"data_offsets": second}, **more}


PLACES = {
    "the same bytes": (two([0, 8], [0, 8]), 8, "b begins at byte 0, but a goes on to 8"),
    "an overlap": (two([0, 8], [4, 12]), 12, "b begins at byte 4, but a goes on to 8"),
    "a gap": (two([0, 8], [12, 20]), 20, "b begins at byte 12, but the bytes from 8 are unused"),
    "a gap before all": (two([4, 12], [12, 20]), 20, "a begins at byte 4, but the bytes from 0 are unused"),
    "bytes behind the last": (two([0, 8], [8, 16]), 17, "bytes, but its header describes only "),
    "more than there is": (two([0, 8], [8, 16]), 15, "is truncated"),
    "an unknown dtype": ({"a": FULL | {"dtype": "F31"}}, 8, "has the dtype 'F31', which is not a dtype of the format"),
    "a product that overflows": ({"a": FULL | {"shape": [2**62, 4]}}, 8, "is F32 of shape"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": FULL}, 8, "__metadata__ is not an object of strings"),
}


@pytest.mark.parametrize("what", PLACES)
def test_tensors_divide_the_bytes_among_them(what, tmp_path):
    entries, size, fault = PLACES[what]
    (tmp_path / "model.safetensors").write_bytes(header(entries, bytes(size)))
    with pytest.raises(CheckpointError, match=fault):
        Files(tmp_path)
    with pytest.raises(SafetensorError):
        safe_open(tmp_path / "model.safetensors", "numpy").__enter__()


def test_a_name_that_comes_twice_and_deep_nesting_are_refused(tmp_path):
    whole = json.dumps(FULL)
    for text, fault in {
        f'{{"a": {whole}, "a": {whole}}}': "the key 'a' appears twice",
        f'{{"a": {"[" * 100_000}': "nested more than 64 levels deep",
    }.items():
        (tmp_path / "model.safetensors").write_bytes(header(text.encode(), bytes(8)))
        with pytest.raises(CheckpointError, match=fault):
            Files(tmp_path)


def other_numbers(draw: random.Random) -> dict:
    entries = {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [8], "data_offsets": [16, 32]},
        "c": {"dtype": "I64", "shape": [0, 3], "data_offsets": [32, 32]},
        "d": {"dtype": "U8", "shape": [], "data_offsets": [32, 33]},
    }
    for _ in range(draw.choice((1, 1, 2))):
        entry = entries[draw.choice([*entries])]
        places = [0, 8, 15, 16, 17, 32, 33, 34, 64, -1, 2**32, 2**64]
        shapes = [[], [2], [4], [8], [2, 2], [1, 16], [16], [0], [2**62, 4], [1.0], [True], None]
        kinds = ["F16", "U8", "I64", "F64", "BOOL", "F8_E4M3", "F4", "F6_E2M3", "C64", "I16", "F8_E8M0", "f32", None]
        match draw.randrange(3):
            case 0:
                entry["data_offsets"][draw.randrange(2)] = draw.choice(places)
            case 1:
                entry["shape"] = draw.choice(shapes)
            case _:
                entry["dtype"] = draw.choice(kinds)
    return entries


@pytest.mark.parametrize("count", [300, pytest.param(6000, marks=pytest.mark.slow)])
def test_what_is_accepted_is_what_the_library_accepts(count, tmp_path):
    path, draw = tmp_path / "model.safetensors", random.Random(volume.SEED)
    for _ in range(count):
        entries = other_numbers(draw)
        text = mutations.other_json(entries, draw) if draw.random() < 0.3 else json.dumps(entries).encode()
        data = header(text, bytes(draw.choice((33, 33, 33, 33, 32, 34, 0))))
        path.write_bytes(mutations.damaged(data, draw) if draw.random() < 0.1 else data)
        try:
            with safe_open(path, "numpy") as file:
                theirs = {*file.keys()}
        except SafetensorError:
            theirs = None
        try:
            ours = {*Files(tmp_path).tensors}
        except CheckpointError as error:
            ours = None if "appears twice" not in str(error) else theirs  # which the library does not refuse
        assert ours == theirs, path.read_bytes()


# -- which files an index may name -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/model.safetensors", "", "a\0b"])
def test_an_index_names_files_of_its_folder_only(name, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "own").mkdir()
    save_file({"a": np.zeros(2)}, tmp_path / "other" / "model.safetensors")
    index(tmp_path / "own", {"a": name})
    with pytest.raises(CheckpointError, match=r"which is outside the checkpoint's folder"):
        Files(tmp_path / "own")


def test_files_may_be_links_as_in_a_download_cache(tmp_path):
    blobs, own = tmp_path / "blobs", tmp_path / "own"
    blobs.mkdir()
    own.mkdir()
    save_file({"a": np.arange(2.0, dtype=np.float32)}, blobs / "1234")
    (own / "part.safetensors").symlink_to("../blobs/1234")
    index(own, {"a": "part.safetensors"})
    with Files(own) as files:
        out = np.empty(2, np.float32)
        files.read_into(out, "a", Form.whole((2,)), (slice(0, 2),))
    np.testing.assert_array_equal(out, [0, 1])


def test_an_index_that_names_a_fifo_or_a_device_is_one_message(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name, kind in {"fifo": "a FIFO", "zero": "a device", "folder": "a folder"}.items():
        index(tmp_path, {"a": name})
        with pytest.raises(CheckpointError, match=f"{name} cannot be read: it is {kind}, not a regular file"):
            Files(tmp_path)
