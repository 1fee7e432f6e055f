"""Files that others wrote: read, or refused by one reason, in bounded time and memory."""

import os
import re
import time
import tracemalloc

import pytest

from gspmd import reading
from gspmd.annotate.errors import LayoutError
from gspmd.layouts import Layout
from gspmd.reading import (
    ContentError,
    MissingError,
    ReadError,
    parse_json,
    parse_toml,
    read_json,
    read_text,
    similar_file,
)
from gspmd.training.config import TrainingConfig
from gspmd.training.toml import ConfigError, load_toml

DEEP = 100_000
JSON = {
    "[" * DEEP + "]" * DEEP: "nested more than 64 levels",
    '{"a":' * DEEP: "nested more than 64 levels",
    "[" * 65 + "]" * 65: "nested more than 64 levels",
    "9" * 5000: "a number of more than 4,300 digits",
    '{"a": 1,}': "it is not JSON: .* at column",
    '{"a": 1,\n\n "b"}': "it is not JSON: .* at line 3, column",
    r'["\ud800"]': "half of a surrogate pair",
    "": "it is not JSON",
}
TOML = {
    "a = " + "[" * DEEP: "nested more than 64 levels",
    "a = " + "{b = " * DEEP: "nested more than 64 levels",
    "[" + ".".join("a" * 50_000) + "]": "nested more than 64 levels",
    "x = 1\n" + " . ".join(['"a"'] * 50_000) + " = 1": "nested more than 64 levels",
    "a = " + "9" * 5000: "a number of more than 4,300 digits",
    "a = 0x" + "f" * 5000: "does not fit into 64 bits",
    "a = 2020-02-31": "it is not TOML",
    "a = 1\na = 2": "it is not TOML: a appears a second time in line 2; write it once",
    "[a]\nb = 1\n'b' = 2\nc = 3": "it is not TOML: a.'b' appears a second time in line 3; write it once",
    "[a]\nb = 1\n[a]\nc = 3": r"it is not TOML: \[a\] appears a second time in line 3; write it once",
    "a.b = 1\n[a]\nc = 3": r"it is not TOML: \[a\] appears a second time in line 2; write it once",
    "[[a]]\n[[b]]\n[b]": r"it is not TOML: \[b\] appears a second time in line 3; write it once",
    "a = 1\n\n[a]\nc = 3": r"it is not TOML: \[a\] in line 3: a is a value, so it cannot be a table too$",
    "a = 1\n[a.b]": r"it is not TOML: \[a\.b\] in line 2: a is a value, so it cannot be a table too$",
    "[[t]]\n[t.a]\nb = 1\nb.c = 2": r"it is not TOML: t\.a\.b\.c in line 4: t\.a\.b is a value, so it cannot",
    "a = 1\na = [\n  [1],\n]": r"it is not TOML: Cannot overwrite a value \(at (line 4, column 2|end of document)\)$",
    "a = 1\na = '''\nz = 3\n'''": r"it is not TOML: Cannot overwrite a value \(at (line 4, |end of document)",
    "a = 1\nb = '''\n[z]\n'''\na = 2": "it is not TOML: a appears a second time in line 5; write it once",
    "a = {b = 1, b = [\n1]}\n": r"it is not TOML: Duplicate inline table key 'b' \(at line 2, ",
    r'"a\"=" = 1' + "\n" + r'"a\"=" = 2': r"it is not TOML: Cannot overwrite a value \(at",
    '"a=b" = 1\n"a=b" = 2': 'it is not TOML: "a=b" appears a second time in line 2; write it once',
    '["a b"."--"]\nc.d = 1\nc.d = 2': r"it is not TOML: 'a b'\.--\.c\.d appears a second time in line 3",
    "a = {b = 1, b = 2}\n": "it is not TOML: 'b' appears a second time in line 1; write it once",
    "'#' = 1\n'#' = 2": "it is not TOML: '#' appears a second time in line 2; write it once",
    "a = E_xF": r"it is not TOML: Invalid value \(at line 1, column 5\); text stands in quotes",
    "\x7fELF\0": "it is not text: it has a null byte",
}


@pytest.mark.parametrize(("text", "reason"), JSON.items(), ids=range(len(JSON)))
def test_json_that_cannot_be_read_is_one_reason(text, reason):
    with pytest.raises(ReadError, match=reason):
        parse_json(text)


@pytest.mark.parametrize(("text", "reason"), TOML.items(), ids=range(len(TOML)))
def test_toml_that_cannot_be_read_is_one_reason_and_soon(text, reason):
    began = time.process_time()
    with pytest.raises(ReadError, match=reason):
        parse_toml(text)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("text", "is_content"),
    [("a = [1", True), ("a = " + "[" * 65 + "]" * 65, True), ("a = 1\na = 2", True), ("a = " + "9" * 5000, True),
     ("a = 0x" + "f" * 17, True), ("a = 2020-02-31", True), ("line\0", False)],
)  # fmt: skip
def test_the_remedy_is_another_file_only_where_this_one_is_no_text(tmp_path, text, is_content):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ReadError) as read:
        parse_toml(text)
    with pytest.raises(LayoutError) as layout:
        Layout.load(str(path))
    with pytest.raises(ConfigError) as config:
        load_toml(TrainingConfig, path)
    assert isinstance(read.value, ContentError) is is_content
    assert str(layout.value).endswith("\n  Correct the file.") is is_content
    assert ("Give the path of a TOML file" in str(layout.value)) is not is_content
    assert str(config.value).endswith(" Give a TOML file.") is not is_content


def test_what_can_be_read_is():
    assert parse_json("[" * 64 + "]" * 64)
    assert parse_json(r'{"a": "\ud83d\ude00", "b": [1e400, 123456789012345678901234567890]}')["a"] == "😀"
    assert parse_json("[" + "[]," * 100 + "1]")[-1] == 1
    assert parse_toml(f'a = "{".".join("b" * 100)}"')["a"][:3] == "b.b"
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}
    assert parse_json('\ufeff{"a": 1}') == parse_toml("\ufeffa = 1") == {"a": 1}  # as some editors begin a file
    with pytest.raises(ReadError, match="the key 'a' appears twice"):
        parse_json('{"a": 1, "a": 2}', unique=True)


def test_what_is_no_file_is_neither_waited_for_nor_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    os.symlink("loop", tmp_path / "loop")
    for name, reason in {
        "fifo": "it is a FIFO, not a regular file",
        ".": "it is a folder",
        "/dev/zero": "it is a device",
        "loop": "[Ss]ymbolic links",
        "a" * 5000: "File name too long",
        "a\0b": "a null byte",
    }.items():
        with pytest.raises(ReadError, match=reason):
            read_text(tmp_path / name)
    for name in ("none", "none/none"):
        with pytest.raises(MissingError, match="there is no such file"):
            read_json(tmp_path / name)


def test_a_pipe_of_the_shell_is_read():
    """The shell's `--config <(command)` passes such a pipe."""
    reader, writer = os.pipe()
    os.write(writer, b"[1, 2]")
    os.close(writer)
    assert read_json(f"/dev/fd/{reader}") == [1, 2]
    os.close(reader)


def test_the_size_is_bounded_and_so_is_the_memory(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    tracemalloc.start()
    with pytest.raises(ReadError, match="larger than 1,000 bytes"):
        read_text(path, 1000)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    path.write_bytes(b"a" * 10 + b"\n\xff")
    with pytest.raises(ReadError, match=r"not UTF-8 text \(byte 0xff in line 2\)"):
        read_text(path)


def test_links_to_elsewhere_are_inside_and_ways_up_are_not():
    assert not reading.is_inside("a\0b")
    assert reading.is_inside("a..b/c..")


def test_a_missing_file_is_answered_with_the_most_similar_name_of_its_folder(tmp_path, monkeypatch):
    (tmp_path / "layout.toml").write_text("")
    (tmp_path / "layouts.d").mkdir()
    assert similar_file(str(tmp_path / "layuot.toml")) == f"Did you mean '{tmp_path}/layout.toml'? "
    with pytest.raises(LayoutError, match=re.escape(f"Did you mean '{tmp_path}/layout.toml'?")):
        Layout.load(str(tmp_path / "layuot.toml"))
    monkeypatch.chdir(tmp_path)
    assert similar_file("layot.toml") == "Did you mean 'layout.toml'? "
    (tmp_path / "o.toml").write_text("")
    assert [similar_file(name) for name in ("nofile.toml", "other.txt", "none/layout.toml", "", "a" * 300, "\0/x")] == [
        ""
    ] * 6
