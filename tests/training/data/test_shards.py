"""Tokens on disk: complete or not there, the same whoever writes them, and no more memory for more text."""

import dataclasses
import io
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from gspmd.training import data
from gspmd.training.data import preparation, shards
from gspmd.training.data.shards import Tokens
from gspmd.training.toml import ConfigError
from tests.training.data.conftest import WORDS


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text(WORDS * 3000)
    return [str(tmp_path / "a.txt")]


@pytest.fixture
def encoded(monkeypatch):
    """Return what has been encoded, and a function that is called before anything is."""
    done, before = [], [lambda: None]
    encode = preparation._batches

    def watched(pieces):
        for batch in encode(pieces):
            before[0]()
            done.append(batch)
            yield batch

    monkeypatch.setattr(preparation, "_batches", watched)
    monkeypatch.setattr(preparation, "BATCH", 1 << 16)
    return done, before


def test_tokens_of_shards_are_those_of_one_array():
    rng = np.random.default_rng(0)
    for _ in range(50):
        shards = [rng.integers(0, 100, size) for size in rng.integers(1, 9, rng.integers(1, 6))]
        tokens, whole = Tokens(shards), np.concatenate(shards)
        np.testing.assert_array_equal(tokens, whole)
        assert [*tokens] == [*whole]
        for start, stop in rng.integers(-len(whole), len(whole) + 3, (20, 2)):
            np.testing.assert_array_equal(tokens[start:stop], whole[start:stop])
            assert tokens[start % len(whole)] == whole[start % len(whole)]


def test_a_text_is_tokenized_once(text, tokenizer, encoded, tmp_path):
    done, _ = encoded
    first = data.load(text, tokenizer=tokenizer)
    count = len(done)
    again = data.load(text, tokenizer=tokenizer)
    assert len(done) == count > 1
    np.testing.assert_array_equal(first.train, again.train)
    assert again == type(again)(**{**vars(first), "train": again.train, "validation": again.validation})
    os.rename(text[0], tmp_path / "b.txt")
    data.load([str(tmp_path / "b.txt")], tokenizer=tokenizer)
    assert len(done) == count  # by another name it is the same text


def test_other_texts_tokenizers_and_settings_are_other_tokens(text, tokenizer, with_begin, cache):
    data.load(text)
    data.load(text, tokenizer=tokenizer)
    data.load(text, tokenizer=with_begin)
    data.load(text, fraction=0.5)
    Path(text[0]).write_text('{"text": "a record"}\n{"text": "another one"}\n' * 99)
    records = Path(text[0]).with_suffix(".jsonl")
    records.write_bytes(Path(text[0]).read_bytes())
    assert "{" in data.load(text).train[:].tobytes().decode()
    assert "{" not in data.load([str(records)]).train[:].tobytes().decode()
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 6


def test_what_was_interrupted_leaves_nothing(text, encoded, cache):
    done, before = encoded
    whole = data.load(text, cache=cache / "other")
    done.clear()

    def interrupt():
        if len(done) == 1:
            raise KeyboardInterrupt

    before[0] = interrupt
    with pytest.raises(KeyboardInterrupt):
        data.load(text)
    assert not [path for path in cache.iterdir() if path.suffix != ".lock" and path.name != "other"]
    before[0] = lambda: None
    assert data.load(text).identity() == whole.identity()


@pytest.mark.slow
def test_what_a_killed_process_has_left_is_removed(text, tokenizer, tmp_path, cache):
    script = f"""
import os, sys
from gspmd.training import data
from gspmd.training.data import shards
shards.write_index = lambda folder, index: os.kill(os.getpid(), 9)
data.load({text!r})
"""
    killed = subprocess.run([sys.executable, "-c", script], env={**os.environ, "GSPMD_CACHE": str(cache.parent)})
    assert killed.returncode == -9
    left = [path for path in cache.iterdir() if path.is_dir()]
    assert len(left) == 1
    assert list(left[0].glob("train-*"))
    corpus = data.load(text)
    assert not left[0].exists()
    assert np.asarray(corpus.train).tobytes() + np.asarray(corpus.validation).tobytes() == Path(text[0]).read_bytes()


def test_a_full_disk_is_one_message(text, small_files, cache):
    with small_files(100_000), pytest.raises(ConfigError) as error:
        data.load(text)
    assert str(error.value) == (
        f"cannot write tokens to {str(cache)!r}:\n"
        "  File too large; no part of them is kept. Name a folder that has room, with --data-cache."
    )
    assert {path.suffix for path in cache.iterdir()} == {".lock"}


def test_a_folder_that_cannot_be_written_is_one_message(text, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write tokens to '.*a\.txt/no':\n  Not a directory; "):
        data.load(text, cache=f"{text[0]}/no")


@pytest.mark.parametrize(
    "fault", ["train-00000.tokens has 5 bytes", "validation-00000.tokens is missing", "index.json"]
)
def test_what_is_damaged_is_said_and_made_anew(text, fault, cache, capsys):
    whole = data.load(text)
    folder = next(path for path in cache.iterdir() if path.is_dir())
    path = folder / fault.split()[0]
    if "missing" in fault:
        path.unlink()
    else:
        path.write_bytes(b"short")
    assert data.load(text, console=Console(width=500)).identity() == whole.identity()
    assert f"are damaged ({fault}" in capsys.readouterr().out


def _damages(content):
    """Yield damages that a file can have, and that change its size or do not."""
    rng = np.random.default_rng(len(content))
    for at in {0, len(content) - 1, *rng.integers(len(content), size=6)}:
        flipped = bytearray(content)
        flipped[at] ^= 1 << int(rng.integers(8))
        yield bytes(flipped)
    yield from (content[: len(content) // 2], b"", content[::-1])


def test_no_damage_of_any_file_is_believed(text, tokenizer, cache):
    """A flipped bit would be trained on, or change what is said of the text."""
    whole = data.load(text, tokenizer=tokenizer)
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == ["index.json", "train-00000.tokens", "validation-00000.tokens"]
    for path in files:
        content, damaged = path.read_bytes(), list(_damages(path.read_bytes()))
        if path.suffix == ".json":  # every figure of it
            damaged += [re.sub(rb"\d", b"7", content), content.replace(b'"texts": 1', b'"texts": 2', 1)]
        for each in damaged:
            path.write_bytes(each)
            said = io.StringIO()
            again = data.load(text, tokenizer=tokenizer, console=Console(file=said, width=500))
            assert dataclasses.replace(again, train=whole.train, validation=whole.validation) == whole
            for one, other in ((again.train, whole.train), (again.validation, whole.validation)):
                np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
            assert "are damaged (" in said.getvalue()
            assert path.read_bytes() == content


def test_tokens_that_another_process_replaces_meanwhile_are_waited_for(text, cache, monkeypatch):
    """Whoever finds damage removes the folder under a lock, and others may be reading in it without one."""
    whole, digest, removed = data.load(text), shards._digest_of, []

    def meanwhile(folder, *given):
        if not removed:
            removed.append(shutil.rmtree(folder))
        return digest(folder, *given)

    monkeypatch.setattr(shards, "_digest_of", meanwhile)
    assert data.load(text).identity() == whole.identity()
    assert removed


def test_parts_that_are_swapped_are_not_believed(text, cache, tmp_path, capsys):
    """Neither of one text, nor those of two."""
    whole = data.load(text)
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    (tmp_path / "b.txt").write_text("another text\n" * 3000)
    data.load([str(tmp_path / "b.txt")])
    (other,) = (path for path in cache.iterdir() if path.is_dir() and path != folder)
    for path in folder.iterdir():
        shutil.copy(other / path.name, path)
    assert data.load(text, console=Console(width=500)).identity() == whole.identity()
    assert "are damaged (index.json belongs to a different text or tokenizer)" in capsys.readouterr().out


def test_a_file_that_changes_meanwhile_is_refused(text, encoded):
    _, before = encoded
    before[0] = lambda: os.utime(text[0], (1, 1))
    with pytest.raises(ConfigError, match=r"a\.txt' has changed while it was read; start again"):
        data.load(text)


def test_of_several_processes_one_tokenizes(text, encoded):
    done, _ = encoded
    data.load(text)
    count = len(done)
    Path(text[0]).write_text(WORDS * 3001)
    done.clear()
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: data.load(text), range(4)))
    assert len(done) == count
    assert len({corpus.identity() for corpus in loaded}) == 1


def test_progress_is_said_where_there_is_no_terminal(text, encoded, monkeypatch, capsys):
    monkeypatch.setattr("gspmd.display.progress._EVERY", 0.0)
    data.load(text, console=Console(width=500))
    said = capsys.readouterr().out
    assert "Reading the text: 198 kB of 198 kB, " in said
    assert "Copying the text: 198 kB of 198 kB, " in said


_PEAKS = """
import gc
import sys
from pathlib import Path
from types import SimpleNamespace
from tokenizers import Tokenizer
from gspmd.training import data

def memory(name):
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1000

tokenizer = SimpleNamespace(backend=Tokenizer.from_file(sys.argv[1]), ends={0}) if sys.argv[1] else None
for path in sys.argv[2:]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    corpus = data.load([path], tokenizer=tokenizer)
    peak, held = memory("VmHWM"), memory("RssAnon")
    batches = corpus.batches(8, 1024, 0)
    for _ in range(len(corpus.train) // (8 * 1024)):
        next(batches)
    print(peak, memory("RssAnon") - held)
    del corpus, batches
    gc.collect()  # what is mapped counts while it is
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a peak since a moment")
@pytest.mark.parametrize("kind", ["txt", "jsonl", "tokens"])
def test_memory_does_not_grow_with_the_text(tmp_path, backend, cache, kind):
    """Megabytes of the process at its peak while tokens are made, and of what an epoch of batches leaves behind."""
    backend.save(str(tmp_path / "tokenizer.json"))
    paths = []
    for size in (4, 4, 16) if kind == "tokens" else (5, 5, 40):  # megabytes; the first is what libraries need
        paths.append(tmp_path / f"{len(paths)}.{kind.replace('tokens', 'txt')}")
        line = f'{{"text": "{WORDS.strip() * 20}"}}\n' if kind == "jsonl" else WORDS
        with paths[-1].open("w") as file:
            for number in range(size * 1_000_000 // len(line)):
                file.write(line.replace("quick", f"{len(paths)} {number}", 1))
    tokenizer = str(tmp_path / "tokenizer.json") if kind == "tokens" else ""
    command = [sys.executable, "-c", _PEAKS, tokenizer, *map(str, paths)]
    # One thread and one arena: what is free in each of several depends on how the threads happened to run.
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    peaks, left = np.array([line.split() for line in shown.splitlines()], float).T
    print(peaks, left)
    assert peaks[2] - peaks[1] < 8  # where the text is longer by 12, or 35
    assert left[2] - left[1] < 8
