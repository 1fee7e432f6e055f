"""What a configuration file may ask for that changes what a step holds or sends, and has no price in a search."""

from collections.abc import Iterator
from contextlib import contextmanager

from gspmd.commands.compile import File
from gspmd.training.config import ConfigError
from gspmd_models.search.unsearched import Unsearched


@contextmanager
def remedied(remedy: str) -> Iterator[None]:
    """Say of what is not searched what helps, in the flags of the command that was run.

    Raises:
        ConfigError: in place of `Unsearched`.
    """
    try:
        yield
    except Unsearched as fault:
        raise ConfigError(fault.fact, [remedy]) from None


def unpriced(file: File, trains: bool, remedy: str) -> Iterator[str]:
    """Say which settings would be counted wrong.

    Args:
        file: the tables of the configuration file, as flags have changed them.
        trains: whether a training step is searched for.
        remedy: what to do instead, behind each.
    """
    priced_is = "and priced is what trains whole, with parameters and moments of float32"
    for name, value, priced in (
        ("[optimizer] moments", file.optimizer.moments, "float32"),
        ("[training] parameter_dtype", file.training.parameter_dtype, "float32"),
        ("[training] frozen", list(file.training.frozen), []),
    ):
        if trains and value != priced:
            yield f"{name} is {value!r}, {priced_is}{remedy}"
    if lora := file.model.lora or (file.lora if file.lora.rank else None):
        yield f"[lora] has adapters of rank {lora.rank}, which have no price (merged, they hold nothing){remedy}"
    if file.model.int8:
        yield f"[model] int8 has no price: weights count as what is computed in{remedy}"
