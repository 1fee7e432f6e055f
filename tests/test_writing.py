"""Files are written whole, and keep what they had otherwise: mode, links, protection, other writers."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from gspmd.display import images
from gspmd.writing import replace_file


def writing(text):
    return lambda file: file.write_text(text)


def fails(file):
    file.write_text("half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_old_or_new_contents(tmp_path):
    file = tmp_path / "plan.json"
    with pytest.raises(OSError, match="No space left") as caught:
        replace_file(file, fails)
    assert (caught.value.errno, caught.value.filename, os.listdir(tmp_path)) == (errno.ENOSPC, str(file), [])
    replace_file(file, writing("old"))
    with pytest.raises(OSError, match="No space left"):
        replace_file(file, fails)
    assert (file.read_text(), os.listdir(tmp_path)) == ("old", ["plan.json"])


def test_the_error_of_the_writer_is_its_own(tmp_path):
    with pytest.raises(ZeroDivisionError):
        replace_file(tmp_path / "a", lambda file: 1 / 0)
    with pytest.raises(ValueError, match=r"^a fault of its own$"):
        replace_file(tmp_path / "a", lambda file: (_ for _ in ()).throw(ValueError("a fault of its own")))
    assert os.listdir(tmp_path) == []


def test_writers_in_a_folder_do_not_meet(tmp_path):
    """Two files with one ending are written at once, by threads of one process."""
    both = threading.Barrier(2, timeout=60)

    def write(name):
        def meeting(file):
            file.write_text(name)
            both.wait()

        replace_file(tmp_path / f"{name}.svg", meeting)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("one", "two")]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"one.svg": "one", "two.svg": "two"}


def test_a_writer_may_use_another(tmp_path):
    replace_file(tmp_path / "a.png", lambda file: replace_file(file, writing("inner")))
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"a.png": "inner"}


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o666])
def test_the_mode_stays(tmp_path, mode):
    file, modes = tmp_path / "a", []
    file.touch()
    file.chmod(mode)
    replace_file(file, lambda beside: modes.append(stat.S_IMODE(beside.stat().st_mode)))
    assert [*modes, stat.S_IMODE(file.stat().st_mode)] == [mode, mode]  # also while it is written


def test_a_new_file_has_the_mode_of_the_umask(tmp_path):
    replace_file(tmp_path / "a", writing(""))
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_read_only_file_is_left_alone(tmp_path, monkeypatch):
    file = tmp_path / "a"
    file.write_text("old")
    usual = os.access  # root may write anything
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != file and usual(path, mode))
    with pytest.raises(PermissionError) as caught:
        replace_file(file, writing("new"))
    assert (caught.value.filename, file.read_text(), os.listdir(tmp_path)) == (str(file), "old", ["a"])


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EPERM])
def test_a_file_that_cannot_be_renamed_over_is_written(tmp_path, monkeypatch, number):
    """A file that is mounted into a container, or another user's in a sticky folder."""

    def refuses(path, target):
        raise OSError(number, os.strerror(number), str(path))

    file = tmp_path / "a"
    file.write_text("something older")
    monkeypatch.setattr(Path, "replace", refuses)
    replace_file(file, writing("new"))
    assert (file.read_text(), os.listdir(tmp_path)) == ("new", ["a"])


def test_both_names_of_a_file_are_written(tmp_path):
    """A rename would leave the second one, a hard link, with the old contents."""
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    replace_file(tmp_path / "a", writing("new"))
    assert (tmp_path / "b").read_text() == "new"


def test_the_file_of_another_user_stays_theirs(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old")
    kept = os.stat(tmp_path / "a").st_ino
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    replace_file(tmp_path / "a", writing("new"))
    assert ((tmp_path / "a").read_text(), os.stat(tmp_path / "a").st_ino) == ("new", kept)


def test_an_error_about_another_file_names_that_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'/none/font\.ttf'"):
        replace_file(tmp_path / "a", lambda file: Path("/none/font.ttf").read_bytes())


@pytest.mark.parametrize("name", ["chart", "chart.png", "chart.svg", "chart." + 100 * "p" + "ng"])
def test_pictures_of_matplotlib_have_the_name_that_it_gives_them(tmp_path, name):
    if len(name) > 20:
        with pytest.raises(ValueError, match="not supported"):
            images.save(Figure(), tmp_path / name, "title", "1 s")
        assert os.listdir(tmp_path) == []
        return
    images.save(Figure(), tmp_path / name, "title", "1 s")
    [file] = tmp_path.iterdir()
    assert file.name == (name if "." in name else "chart.png")
    assert file.read_bytes()[1:4] in (b"PNG", b"?xm")


def test_links_stay(tmp_path):
    file, link = tmp_path / "a", tmp_path / "link"
    link.symlink_to("a")
    replace_file(link, writing("new"))
    assert (file.read_text(), link.is_symlink()) == ("new", True)


@pytest.mark.parametrize("form", ["/proc/self/fd/{}", "/dev/fd/{}", "{link}"])
def test_open_files_are_written_as_they_are(tmp_path, form):
    """Standard output that is sent to a file has other writers, before and after."""
    file, link = tmp_path / "out", tmp_path / "link"
    with file.open("w") as out:
        link.symlink_to(f"/proc/self/fd/{out.fileno()}")
        kept = os.fstat(out.fileno()).st_ino
        replace_file(form.format(out.fileno(), link=link), writing("new"))
        assert (file.stat().st_ino, file.read_text()) == (kept, "new")


def test_pipes_and_devices_are_written(tmp_path):
    fifo, read = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: read.append(fifo.read_text()))
    reader.start()
    replace_file(fifo, writing("new"))
    reader.join(60)
    assert (read, stat.S_ISFIFO(fifo.stat().st_mode)) == (["new"], True)
    with pytest.raises(OSError, match=r"No space left.*'/dev/full'"):
        replace_file("/dev/full", writing("new"))


@pytest.mark.parametrize("name", ["a" * 251 + ".svg", "a." + 253 * "b"])
def test_the_longest_names(tmp_path, name):
    replace_file(tmp_path / name, writing("new"))
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["none/a", "file/a", "folder", "a" * 256])
def test_impossible_files_are_named(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as raw:
        (tmp_path / name).write_text("new")
    with pytest.raises(OSError) as caught:
        replace_file(tmp_path / name, writing("new"))
    assert (type(caught.value), str(caught.value)) == (type(raw.value), str(raw.value))
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_names_that_no_file_can_have(name):
    with pytest.raises(ValueError, match=r"^cannot write 'a\\(x00|ud800)b': .*\.\n  Give another name\.$"):
        replace_file(name, writing("new"))
