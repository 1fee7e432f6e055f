"""Random training steps as a user writes them: what one device computes and what is planned, or refused in time."""

import pytest

from tests.references.random_steps import Verdict, draw, verdicts
from tests.references.volume import scaled

TRAINED, REFUSED = [3, 106], [10]
PARTS = 20


def told(found: list[Verdict]) -> str:
    """The faults, each with the two files that show it."""
    return "\n\n".join(str(verdict) for verdict in found if verdict.is_fault)


@pytest.mark.slow
def test_some_steps_train_and_one_is_refused():
    """Run in a process of its own, which may abort."""
    found = list(verdicts([*TRAINED, *REFUSED]))
    assert not told(found), told(found)
    assert [verdict.outcome for verdict in found] == ["trained"] * len(TRAINED) + ["refused"] * len(REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_steps_at_length_train_or_are_refused(part):
    """Twenty parts of 10; of 20 with DRAWS=2."""
    start = 1000 * part
    found = list(verdicts(range(start, start + scaled(10))))
    assert len(found) == scaled(10)
    assert not told(found), told(found)


def test_a_step_is_its_seed_and_prints_both_files():
    assert draw(7) == draw(7)
    text = str(draw(7))
    assert text.startswith("# step 7\n[model]\n")
    assert "# its layout.toml" in text


def test_an_abort_and_a_traceback_are_faults():
    assert Verdict(0, "ends its process with -6").is_fault
    assert Verdict(0, "raises").is_fault
    assert not Verdict(0, "refused").is_fault
