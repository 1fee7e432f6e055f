"""Random equations, meshes, lowerings and axis types against numpy, values and gradients, exactly."""

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.references.random_equations import Case, cases, check
from tests.references.volume import scaled

pytestmark = pytest.mark.usefixtures("every_schedule")

_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@settings(max_examples=30, derandomize=True, **_COMMON)
@given(cases())
def test_equations_give_what_one_device_gives(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_equations_at_length_give_what_one_device_gives(part):
    """Ten draws of 50 (of 500 with DRAWS=10), each with its seed; what fails is reported as drawn."""

    @seed(part)
    @settings(max_examples=scaled(50), phases=[Phase.generate], **_COMMON)
    @given(cases())
    def draws(case):
        check(case)

    draws()


MISCOMPILED = Case(
    equation="(B_zFE_xyH, EB_z), HB_zE_xy -> (H_zB_xF_y, H_zyB_x)",
    sizes=(("B", 2), ("E", 8), ("F", 6), ("H", 12)),
    mesh=(("x", 2), ("y", 2), ("z", 2)),
    axis_type="auto",
    lowering="blocking",
)


def test_blocking_is_right_where_the_partitioner_has_been_seen_to_be_wrong():
    check(MISCOMPILED)
