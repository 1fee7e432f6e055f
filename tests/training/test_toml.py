"""Settings from TOML: what fits is read, and every fault of a file is in one error."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from gspmd.training.toml import ConfigError, from_mapping, load_toml, to_mapping


@dataclass(frozen=True)
class Inner:
    experts: int = 4
    kind: Literal["switch", "gshard"] = "switch"

    def __post_init__(self):
        if self.experts < 1:
            raise ValueError(f"experts must be positive, but is {self.experts}.")


@dataclass(frozen=True)
class Outer:
    rate: float = 0.1
    steps: int = 10
    name: str = "a"
    data: tuple[str, ...] = ()
    seed: int | None = None
    inner: Inner | None = None
    always: Inner = field(default_factory=Inner)


def write(tmp_path, text):
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return path


def test_reads_nested_tables(tmp_path):
    path = write(tmp_path, 'rate = 1\ndata = ["a", "b"]\n[inner]\nexperts = 8\nkind = "gshard"\n')
    assert load_toml(Outer, path) == Outer(rate=1.0, data=("a", "b"), inner=Inner(8, "gshard"))


def test_goes_there_and_back():
    config = Outer(seed=3, inner=Inner(2), data=("x",))
    assert from_mapping(Outer, to_mapping(config)) == config


def test_lists_every_fault(tmp_path):
    path = write(tmp_path, 'rte = 1\nsteps = 1.5\nname = 3\n[inner]\nkind = "swich"\nexprts = 2\n')
    with pytest.raises(ConfigError) as error:
        load_toml(Outer, path)
    assert str(error.value).splitlines() == [
        f"cannot use config {str(path)!r}:",
        "  unknown key 'rte'; did you mean 'rate'?",
        "  steps must be an integer, but is 1.5.",
        "  name must be a string, but is 3.",
        "  inner.kind must be one of 'switch', 'gshard', but is 'swich'. Did you mean 'switch'?",
        "  unknown key 'inner.exprts'; did you mean 'inner.experts'?",
    ]


def test_an_unlike_key_lists_the_known_ones():
    with pytest.raises(ConfigError, match="known keys: always, data, inner, name, rate, seed, steps"):
        from_mapping(Outer, {"zzz": 1})


def test_what_a_dataclass_refuses_is_a_fault_of_the_file():
    with pytest.raises(ConfigError, match=r"\[always\] experts must be positive, but is 0\."):
        from_mapping(Outer, {"always": {"experts": 0}})


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"steps": True}, "steps must be an integer, but is True."),
        ({"rate": "fast"}, "rate must be a number, but is 'fast'."),
        ({"data": "a"}, "data must be a list, but is 'a'."),
        ({"data": ["a", 1]}, "data[1] must be a string, but is 1."),
        ({"inner": 3}, "inner must be a table, but is 3."),
        ({"name": "a\0"}, "name must have no null bytes, but is 'a\\x00'."),
        ({"data": ["a", "\udcff"]}, "data[1] must be UTF-8, but is '\\udcff'."),
    ],
)
def test_wrong_types(values, fault):
    with pytest.raises(ConfigError) as error:
        from_mapping(Outer, values)
    assert error.value.faults == (fault,)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        load_toml(Outer, tmp_path / "none.toml")


def test_a_missing_file_has_a_neighbour_of_nearly_its_name(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.toml").touch()
    for wrong in ("tiny", "configs/tny.toml"):
        with pytest.raises(ConfigError) as error:
            load_toml(Outer, tmp_path / wrong)
        assert error.value.faults == (f"there is no such file. Did you mean '{tmp_path}/configs/tiny.toml'?",)


def test_folder_instead_of_file(tmp_path):
    with pytest.raises(ConfigError, match=r"it is a folder, not a regular file\. Give a TOML file\.$"):
        load_toml(Outer, tmp_path)


def test_not_toml(tmp_path):
    with pytest.raises(ConfigError, match=r"it is not TOML: .*line 1, column 5\)(; text stands in quotes)?\.$"):
        load_toml(Outer, write(tmp_path, "a = = 1"))
