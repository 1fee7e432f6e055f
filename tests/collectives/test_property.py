"""Random equations, meshes, lowerings and axis types against numpy, values and gradients, exactly."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.collectives.random_equations import cases, check

_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@settings(max_examples=350, derandomize=True, **_COMMON)
@given(cases())
def test_equations_give_what_one_device_gives(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=5000, print_blob=True, **_COMMON)
@given(cases())
def test_many_equations_give_what_one_device_gives(case):
    check(case)
