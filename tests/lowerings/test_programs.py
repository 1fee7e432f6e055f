"""Random programs on a mesh against the same on one device: values, gradients, second derivatives, vmap."""

import pytest

from tests.references.random_programs import draw, faults
from tests.references.volume import scaled


@pytest.mark.turns(4)
@pytest.mark.parametrize("seed", range(12))
def test_programs_give_what_one_device_gives(seed):
    assert not faults([seed]), "\n".join(faults([seed]))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_programs_at_length_give_what_one_device_gives(part):
    """Ten parts of 10; of 50 with DRAWS=5."""
    start = 1000 + 50 * part
    found = faults(range(start, start + scaled(10)))
    assert not found, "\n\n".join(found)


def test_a_program_says_how_to_run_it_again():
    assert draw(3) == draw(3)
    assert str(draw(3)).startswith("program 3: ")
