"""Whatever stands in a flag with a syntax of its own, it is read, or refused by a ConfigError."""

import pytest

from gspmd.training import ConfigError
from gspmd.training.syntax import parse_mesh, parse_processes, parse_profile, parse_relayout
from tests.references.random_texts import faults, texts
from tests.references.volume import scaled

RIGHT = {
    parse_mesh: ["x=4,y=2", "x=1", "data=2,model=4", "x=4 , y=2"],
    parse_relayout: ["200=zero-3", "200=zero-3:x=4,y=2", "1=own/table.toml"],
    parse_processes: ["node1:8476,processes=4,process=0", "127.0.0.1:80,processes=2,process=1"],
    parse_profile: ["20:24", "1:1"],
}


@pytest.mark.parametrize("parse", RIGHT, ids=lambda parse: parse.__name__)
@pytest.mark.parametrize("count", [200, pytest.param(scaled(5000), marks=pytest.mark.slow)])
def test_any_text_is_read_or_refused(parse, count):
    def read(text: str) -> None:
        value = parse(text)
        if parse is parse_mesh:
            assert parse(",".join(f"{axis}={size}" for axis, size in value.items())) == value
        if parse is parse_relayout:
            assert parse(str(value)) == value

    found = faults(read, texts(0, count, RIGHT[parse]), ConfigError)
    assert not found, "\n".join(found[:20])
