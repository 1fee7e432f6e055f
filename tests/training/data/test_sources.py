"""Files of text: formats by suffix, pieces of long texts, and a line for every fault."""

import bz2
import gzip
import io
import json
import lzma
import random
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspmd.training import data
from gspmd.training.data import sources
from gspmd.training.data.sources import Faults, records, text_pieces
from gspmd.training.toml import ConfigError

TEXTS = ["first text", "second\ntext", "dritter Text, é", "四"]


def lines(texts, field="text"):
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts)


def read(path, field="text"):
    """The texts of a file, and its faults."""
    faults = Faults()
    found = [text.decode() for _, text in records(path, field, faults)]
    return found, said(faults)


def said(faults):
    try:
        faults.refuse("")
    except ConfigError as error:
        return list(error.faults)
    return []


@pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_compressed_files_are_read_by_their_suffix(tmp_path, suffix, pack):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(lines(TEXTS).encode()))
    assert read(path) == (TEXTS, [])
    (tmp_path / f"b.txt{suffix}").write_bytes(pack(b"plain text " * 100))
    corpus = data.load([f"{tmp_path}/b.txt*"], fraction=0.5)
    assert np.asarray(corpus.train).tobytes() + np.asarray(corpus.validation).tobytes() == b"plain text " * 100


def test_blank_lines_empty_texts_and_a_byte_order_mark_are_passed_over(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines(["one", "", "two"]).replace("\n", "\n\n").encode())
    assert read(path) == (["one", "two"], [])


BAD = {
    '{"text": "a"': "line 2: it is not JSON: Expecting ',' delimiter at column 13.",
    "[1, 2]": "line 2 is a list, not an object.",
    '{"id": 3, "body": "a"}': "line 2 has no field 'text'; it has 'id', 'body'. See --data-field.",
    '{"text": null}': "line 2: 'text' is null, not a string.",
    '{"text": 4.5}': "line 2: 'text' is a number, not a string.",
    '{"text": {"a": "b"}}': "line 2: 'text' is an object, not a string.",
    '{"text": "\\ud800"}': "line 2: it has half of a surrogate pair, which is not a character.",
    "[" * 100_000: "line 2: it is nested more than 64 levels deep.",
    "9" * 5000: "line 2: it has a number of more than 4,300 digits.",
    b'{"text": "\xff"}': "line 2 is not UTF-8 (byte 0xff).",
}


@pytest.mark.parametrize(("line", "fault"), BAD.items(), ids=[str(line)[:20] for line in BAD])
def test_a_bad_line_is_a_line_that_names_it(tmp_path, line, fault):
    path = tmp_path / "a.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b"\n".join([lines(["before"]).strip().encode(), line, lines(["after"]).encode()]))
    assert read(path) == (["before", "after"], [f"{str(path)!r}: {fault}"])


def test_all_faults_of_all_files_are_one_message(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\nbad\n{"texts": "x"}\n')
    (tmp_path / "b.txt").write_bytes(b"good\n" * 300_000 + b"caf\xe9\n")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"whole " * 1000)[:-20])
    (tmp_path / "d.jsonl.zst").write_bytes(b"x")
    with pytest.raises(ConfigError) as error:
        data.load([f"{tmp_path}/*"], tokenizer=tokenizer)
    names = {name: repr(str(tmp_path / name)) for name in ("a.jsonl", "b.txt", "c.txt.gz", "d.jsonl.zst")}
    wanted = {
        f"{names['a.jsonl']}: line 2: it is not JSON: Expecting value at column 1.",
        f"{names['a.jsonl']}: line 3 has no field 'text'; it has 'texts'. See --data-field.",
        f"{names['b.txt']}: line 300001 is not UTF-8 (byte 0xe9).",
        f"{names['c.txt.gz']} is damaged: Compressed file ended before the end-of-stream marker was reached.",
    }
    if sys.version_info < (3, 14):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        fault = f"{names['d.jsonl.zst']} is compressed by zstd, which Python {version} does not read"
        wanted.add(f"{fault}; decompress it: zstd -d d.jsonl.zst.")
        assert set(error.value.faults) == wanted
    assert wanted <= set(error.value.faults)


def test_a_line_that_is_too_long_is_refused_in_little_memory(tmp_path):
    """A compressed file of 0.1 MB whose line takes 100 MB; read whole, it would take several times that."""
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb") as file:
        file.write(b'{"text": "first"}\n{"text": "')
        for _ in range(100):
            file.write(b"a" * 2**20)
        file.write(b'"}\n')
    tracemalloc.start()
    texts, faults = read(path)
    assert tracemalloc.get_traced_memory()[1] < 3 * sources.LINE
    tracemalloc.stop()
    assert texts == ["first"]
    assert faults == [
        f"{str(path)!r}: line 2 is longer than 16,777,216 bytes, the limit for a line; split that text, or put it "
        "into a file of its own, of any length."
    ]


@pytest.mark.parametrize("name", ["n" * 5000, "a\0b", "n" * 300 + "/a.txt"])
def test_a_name_that_no_file_can_have_matches_none(name):
    with pytest.raises(ConfigError, match="no file matches"):
        data.load([name])


def test_bytes_need_not_be_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 " * 100)
    assert len(data.load([f"{tmp_path}/a.txt"]).train)


def test_of_many_faults_the_first_twenty_are_shown(tmp_path):
    (tmp_path / "a.jsonl").write_text("bad\n" * 250)
    with pytest.raises(ConfigError) as error:
        data.load([f"{tmp_path}/a.jsonl"])
    assert len(error.value.faults) == 21
    assert str(error.value).endswith("\n  ... and 230 more.")


def test_a_field_where_there_are_no_records_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("plain text " * 100)
    with pytest.raises(ConfigError) as error:
        data.load([f"{tmp_path}/a.txt"], field="body")
    fact = f"no file has records with a field 'body': {tmp_path}/a.txt is read as plain text. Leave out --data-field."
    assert error.value.faults == (fact,)


# -- Parquet -----------------------------------------------------------------------------------------------------------


def test_parquet(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"id": range(4), "text": TEXTS}), path, row_group_size=3)
    assert read(path) == (TEXTS, [])
    assert read(path, "body") == (
        [],
        [f"{str(path)!r} has no column 'body'; it has 'id', 'text'. Name one with --data-field."],
    )
    assert read(path, "id")[1][0] == f"{str(path)!r}: row 1: 'id' is a number, not a string."
    parquet.write_table(arrow.table({"text": ["a", None]}), path)
    assert read(path) == (["a"], [f"{str(path)!r}: row 2: 'text' is null, not a string."])
    path.write_bytes(b"PAR1 no")
    assert read(path)[1][0].startswith(f"{str(path)!r} cannot be read as Parquet: ")


def test_parquet_without_the_library_that_reads_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    fault = f"{str(path)!r} is read by pyarrow, which is not installed: pip install 'gspmd[parquet]'."
    assert read(path) == ([], [fault])


# -- pieces ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab \n\té四.", min_size=1, max_size=400), st.integers(0, 500))
def test_pieces_join_to_the_text_and_end_with_characters(text, cut):
    whole = text.encode()
    for at in (None, min(cut, len(whole))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sources, "PIECE", 24)
            pieces = list(text_pieces(io.BytesIO(whole), at))
        assert b"".join(piece for _, piece in pieces) == whole
        assert all(0 < len(piece) <= 24 and piece.decode() for _, piece in pieces)
        assert [part for part, _ in pieces] == sorted(part for part, _ in pieces)
        if at is not None:
            assert 0 <= at - sum(len(piece) for part, piece in pieces if part == 0) <= 3


@pytest.mark.parametrize("blanks", [["\n", "\n\n", " \n", "\n    return"], [" \n  "]], ids=["lines", "spaces"])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(backend, monkeypatch, blanks):
    monkeypatch.setattr(sources, "PIECE", 96)
    between = " the dog\nand" if "\n" in blanks else " the dog  and"
    draw, words = random.Random(0), ["the", "quick", " fox", "  ", " ", ",", "é", *blanks]
    count = 0
    for _ in range(50):
        text = between.join("".join(draw.choices(words, k=8)) for _ in range(40))
        pieces = [piece.decode() for _, piece in text_pieces(io.BytesIO(text.encode()))]
        ids = [number for piece in pieces for number in backend.encode(piece).ids]
        assert ids == backend.encode(text).ids
        count += len(pieces)
    assert count > 500


def test_bytes_of_parquet_that_are_no_text_are_one_fault(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = arrow.array([b"a", b"\xff\xfe"]).view(arrow.string())  # which does not look at the bytes
    parquet.write_table(arrow.table({"text": column}), tmp_path / "a.parquet")
    _, faults = read(tmp_path / "a.parquet")
    assert len(faults) == 1
    assert "cannot be read as Parquet: " in faults[0]


@pytest.mark.parametrize("name", ["gone.txt", "gone.txt.gz", "gone.txt.bz2", "gone.txt.xz"])
def test_a_file_that_is_deleted_after_its_name_was_found_is_one_fault(tmp_path, name):
    faults = Faults()
    with sources.opened(tmp_path / name, faults) as file:
        assert file is None
    with pytest.raises(ConfigError, match=rf"cannot read '.*{name}': No such file or directory\.$"):
        faults.refuse("cannot read the data:")
