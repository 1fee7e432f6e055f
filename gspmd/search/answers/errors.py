"""Expected relative errors of planned step times, measured on compiled steps, by phase and chip."""

import tomllib
from functools import lru_cache
from importlib.resources import files


def expected_error(phase: str, chip: str) -> float | None:
    """Return the median of |planned / compiled - 1| over the steps of a phase on a chip.

    The result is None if no such steps were compiled.

    An exact search finds the layout that is best according to its plan, so the planned seconds of that layout are more
    likely to be too low than too high.

    Args:
        phase: `"train"`, `"prefill"`, `"decode"` or `"encode"`.
        chip: the name of the chip, such as `"tpu-v4"`.

    Source: errors.toml, which `python benchmarks/ranks.py --errors` writes.
    """
    return _measured().get(phase, {}).get(chip)


@lru_cache(maxsize=1)
def _measured() -> dict[str, dict[str, float]]:
    return tomllib.loads(files(__package__).joinpath("errors.toml").read_text())
