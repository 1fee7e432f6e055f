"""The data: found, split by file, batched, and the same again after a resume."""

import dataclasses
import gzip
import json
import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from gspmd.training import data
from gspmd.training.config import TrainingConfig
from gspmd.training.data.sources import matching
from gspmd.training.data.split import hold_out_files
from gspmd.training.toml import ConfigError


@pytest.fixture
def folder(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_bytes(bytes([97 + number]) * (100 + number))
    return tmp_path


def test_split_is_by_file_and_complete(folder):
    corpus = data.load([f"{folder}/*.txt"], fraction=0.2)
    assert corpus.files == (8, 2)
    train, held_out = set(corpus.train) - {0}, set(corpus.validation) - {0}
    assert not train & held_out
    assert train | held_out == set(range(97, 107))


def test_split_does_not_depend_on_names(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for path in folder.iterdir():
        (other / f"z{path.name}.text").write_bytes(path.read_bytes())
    one, two = data.load([f"{folder}/*.txt"]), data.load([f"{other}/*"])
    np.testing.assert_array_equal(one.validation, two.validation)


def test_copies_count_once(folder):
    (folder / "copy.txt").write_bytes((folder / "0.txt").read_bytes())
    assert sum(data.load([f"{folder}/*.txt"]).files) == 10


def test_one_file_is_split_near_its_end(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 101)))
    corpus = data.load([str(tmp_path / "a.txt")], fraction=0.1)
    assert (corpus.train[-1], corpus.validation[0], len(corpus.validation)) == (90, 91, 10)


def test_a_tiny_file_beside_a_huge_one_does_not_hold_it_out(tmp_path):
    sizes = {"a": 100, "b": 100_000}
    for name, size in sizes.items():
        (tmp_path / f"{name}.txt").write_bytes(name.encode() * size)
    corpus = data.load([f"{tmp_path}/*.txt"], fraction=0.1)
    assert len(corpus.validation) - 1 == 10 + 10_000
    assert len(corpus.train) - 1 == 90 + 90_000
    assert corpus.files == (2, 2)


def test_whole_files_are_held_out_up_to_their_share_of_the_bytes():
    rng = np.random.default_rng(0)
    for fraction in (0.05, 0.2, 0.5, 0.9):
        sizes = [int(size) for size in rng.integers(1, 1000, 200)]
        held_out, cuts = hold_out_files(sizes, fraction)
        assert fraction / 2 <= sum(sizes[index] for index in held_out) / sum(sizes) <= 2 * fraction
        assert len(held_out) < 200
        assert not cuts


@pytest.mark.parametrize("texts", [[b"a"], [b"ab", b"c"], [b"abc", b"d" * 50], [b"abcdefgh", b"hgfedcba"]])
def test_a_split_keeps_every_byte(tmp_path, texts):
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text)
    corpus = data.load([f"{tmp_path}/*.txt"], fraction=0.3)
    kept = (np.asarray(corpus.train).tobytes() + np.asarray(corpus.validation).tobytes()).replace(b"\0", b"")
    assert sorted(kept) == sorted(b"".join(texts))
    assert len(corpus.validation)


def test_gzip_is_of_each_file_by_itself(tmp_path):
    texts = [f"hello world {number} " * 50 for number in range(2)]
    for number, text in enumerate([*texts, "long " * 3000]):
        (tmp_path / f"{number}.txt").write_text(text)
    corpus = data.load([f"{tmp_path}/*.txt"], fraction=0.05)
    held_out = np.asarray(corpus.validation).tobytes().split(b"\0")
    packed = sum(len(gzip.compress(text)) for text in held_out)
    assert corpus.gzip_bits_per_byte == pytest.approx(8 * packed / sum(map(len, held_out)))


def test_standard_library_without_installed_packages():
    root = Path(sysconfig.get_path("stdlib"))
    paths = matching([])
    assert root / "argparse.py" in paths
    assert not any({"site-packages", "test"} & set(path.relative_to(root).parts) for path in paths)


REMEDY = "Name other files, or none for Python's standard library."


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [("none/*.txt", "no file matches 'none/*.txt'."), ("missing.txt", "no file matches 'missing.txt'.")],
)
def test_missing(pattern, fault):
    with pytest.raises(ConfigError) as error:
        data.load([pattern])
    assert str(error.value) == f"cannot find the data:\n  {fault} {REMEDY}"


def test_every_missing_pattern_is_named(folder):
    with pytest.raises(ConfigError) as error:
        data.load(["a", f"{folder}/*.txt", "b"])
    assert error.value.faults == (f"no file matches 'a'. {REMEDY}", f"no file matches 'b'. {REMEDY}")


def test_folder_suggests_a_pattern(folder):
    with pytest.raises(ConfigError, match=r"It is a folder; write '.*/\*\*/\*\.txt'\."):
        data.load([str(folder)])


def test_empty(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(ConfigError) as error:
        data.load([f"{tmp_path}/a.txt"])
    assert str(error.value) == f"cannot train on this data:\n  '{tmp_path}/a.txt' holds no text. {REMEDY}"


def test_too_small(folder):
    corpus = data.load([f"{folder}/*.txt"], fraction=0.1)
    with pytest.raises(ConfigError) as error:
        data.check_size(corpus, batch=8, length=256)
    message = str(error.value)
    assert (
        f"the training text has {len(corpus.train):,} bytes, but a batch of 8 sequences of 256 needs 2049." in message
    )
    assert f"the held-out text has {len(corpus.validation):,} bytes, but a sequence of 256 needs 257." in message
    assert message.endswith("Give more text with --data, or lower --batch or --length.")


def test_text_that_is_too_short_for_any_batch(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"\n  Give more text with --data\.$"):
        data.check_size(data.load([f"{tmp_path}/a.txt"]), batch=8, length=16)


@pytest.fixture
def counting():
    text = np.arange(1000) % 251
    return data.Corpus("counting", text.astype(np.uint8), text[:333].astype(np.uint8), (1, 1), 1.0)


def test_batches_are_windows_with_one_byte_shared(counting):
    batch = next(counting.batches(4, 16, seed=0))
    assert batch.shape == (4, 17)
    assert batch.dtype == np.uint8
    assert (batch[:, 0] == batch[:, 16] - 16).sum() + (batch[:, 16] < 16).sum() == 4


def test_an_epoch_reads_every_window_once_and_is_shuffled(counting):
    batches = counting.batches(6, 16, seed=0)
    first = np.concatenate([next(batches) for _ in range(10)])
    # 62 windows; ten batches of six are 60 of them.
    assert len({row.tobytes() for row in first}) == 60
    assert not (np.diff(first[:, 0].astype(int)) > 0).all()


def test_resume_goes_on_where_it_stopped(counting):
    batches = counting.batches(4, 16, seed=3)
    for _ in range(40):
        next(batches)
    position = batches.get_state()
    wanted = [next(batches) for _ in range(5)]
    again = counting.batches(4, 16, seed=3)
    again.set_state(position)
    np.testing.assert_array_equal([next(again) for _ in range(5)], wanted)


@pytest.mark.parametrize("processes", [2, 3, 6])
def test_processes_read_the_rows_of_one_batch(counting, processes):
    whole = counting.batches(6, 16, seed=2)
    parts = [counting.batches(6, 16, 2, process, processes) for process in range(processes)]
    for _ in range(25):  # two epochs and a half
        np.testing.assert_array_equal(np.concatenate([next(part) for part in parts]), next(whole))
        assert all(part.get_state() == whole.get_state() for part in parts)
    each = [counting.validation_batches(6, 16, 0, process, processes) for process in range(processes)]
    for rows, batch in zip(zip(*each), counting.validation_batches(6, 16), strict=True):
        np.testing.assert_array_equal(np.concatenate(rows), batch)


def test_a_run_goes_on_with_the_same_batches_in_another_number_of_processes(counting):
    begun = [counting.batches(6, 16, 5, process, 3) for process in range(3)]
    for part in [part for part in begun for _ in range(13)]:
        next(part)
    position = begun[0].get_state()
    wanted = np.stack([np.concatenate([next(part) for part in begun]) for _ in range(12)])
    for processes in (1, 2):
        parts = [counting.batches(6, 16, 5, process, processes) for process in range(processes)]
        for part in parts:
            part.set_state(position)
        found = np.stack([np.concatenate([next(part) for part in parts]) for _ in range(12)])
        np.testing.assert_array_equal(found, wanted)


def test_processes_that_do_not_divide_a_batch_are_refused(counting):
    with pytest.raises(ConfigError, match="4 processes do not divide a batch of 6 sequences; use a multiple of 4"):
        counting.batches(6, 16, 0, 1, 4)


def test_seeds_differ(counting):
    one, two = (next(counting.batches(4, 16, seed)) for seed in (0, 1))
    assert (one != two).any()


def test_validation_leaves_no_byte_out(counting):
    batches = list(counting.validation_batches(4, 16))
    assert {batch.shape for batch in batches} == {(4, 17)}
    rows = np.concatenate(batches)
    assert rows[0, 0] == counting.validation[0]
    assert rows[-1, -1] == counting.validation[-1]
    predicted = set().union(*({(row[0] + i) % 251 for i in range(1, 17)} for row in rows.astype(int)))
    assert predicted == set(range(251))


def test_limited_validation_spreads_over_the_text(counting):
    batches = list(counting.validation_batches(2, 16, limit=2))
    assert len(batches) == 2
    assert batches[-1][-1, -1] == counting.validation[-1]


def test_number_of_validation_batches(counting):
    for batch, length, limit in ((4, 16, 0), (2, 16, 2), (2, 16, 500), (1, 332, 0), (1, 331, 0), (3, 83, 0)):
        count = counting.validation_count(batch, length, limit)
        assert len(list(counting.validation_batches(batch, length, limit))) == count
    assert counting.validation_count(1, 332) == 1
    assert counting.validation_count(1, 331) == 2


def test_another_stream_is_one_message(counting):
    config = TrainingConfig(batch=4, length=16)
    saved = data.stream(counting, config)
    data.check_stream(saved, data.stream(counting, config))
    other = dataclasses.replace(counting, train=counting.train[:-1])
    with pytest.raises(ConfigError) as error:
        data.check_stream(saved, data.stream(other, TrainingConfig(batch=8, length=16, seed=1)))
    assert error.value.faults[:-1] == (
        "the text differs, because of its files, their contents, or validation_fraction.",
        "batch was 4, but is 8.",
        "seed was 0, but is 1.",
    )


def test_prompts_are_read_and_not_predicted(tmp_path):
    """Records keep their order, prompt tokens are stored as their complement, and the end of a text is predicted."""
    pairs = [(f"ask {number}?", f"answer {number}") for number in range(40)]
    lines = [json.dumps({"q": asked, "a": answer}) for asked, answer in pairs]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    corpus = data.load([str(tmp_path / "chats.jsonl")], fraction=0.2, field="a", prompt="q", cache=tmp_path / "cache")
    assert corpus.masked
    predicted = read = 0
    texts = set()
    for part in (corpus.train, corpus.validation):
        tokens = np.asarray(part)
        assert tokens.dtype == np.int16
        whole = np.where(tokens < 0, ~tokens, tokens).astype(np.uint8).tobytes()
        texts |= {*whole.split(b"\0")}
        for kept in tokens[tokens >= 0].astype(np.uint8).tobytes().split(b"\0"):
            assert kept.startswith(b"answer ")
        predicted, read = predicted + np.sum(tokens >= 0), read + np.sum(tokens < 0)
    assert texts == {f"{asked}{answer}".encode() for asked, answer in pairs}
    assert read == sum(len(asked) for asked, _ in pairs)
    assert predicted == sum(len(answer) for _, answer in pairs) + len(pairs) - 2  # with the ends between texts
    assert corpus.bytes_per_token == 1.0
    assert 0 < corpus.gzip_bits_per_byte < 16


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"field": "a", "prompt": "p"}, "line 1 has no field 'p'; it has 'q', 'a'. See --data-prompt."),
        ({"field": "a", "prompt": "a"}, "prompt and text are both in the field 'a'"),
    ],
)
def test_prompts_that_are_not_there_are_refused(tmp_path, fields, said):
    (tmp_path / "chats.jsonl").write_text(json.dumps({"q": "ask", "a": "answer"}))
    with pytest.raises(ConfigError, match=re.escape(said)):
        data.load([str(tmp_path / "chats.jsonl")], cache=tmp_path / "cache", **fields)
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(ConfigError, match="no file has records with a field 'q'"):
        data.load([str(tmp_path / "a.txt")], cache=tmp_path / "cache", prompt="q")
