"""What a configuration file may ask for that changes what a step holds or sends, and has no price in a search."""

from collections.abc import Iterator
from contextlib import contextmanager

from gspmd.commands.compile import File
from gspmd.training.config import ConfigError
from gspmd_models import ModelConfig
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


def unpriced(file: File, model: ModelConfig, trains: bool) -> Iterator[str]:
    """Say which settings would be counted wrong, and what to search instead.

    Args:
        file: the tables of the configuration file.
        model: as flags have changed it.
        trains: whether a training step is searched for.
    """
    beside = "and priced is what trains whole, with parameters and moments of float32; leave it out to search for that."
    for name, value, priced in (
        ("[optimizer] moments", file.optimizer.moments, "float32"),
        ("[training] parameter_dtype", file.training.parameter_dtype, "float32"),
        ("[training] frozen", list(file.training.frozen), []),
    ):
        if trains and value != priced:
            yield f"{name} is {value!r}, {beside}"
    if lora := model.lora or (file.lora if file.lora.rank else None):
        yield f"[lora] has adapters of rank {lora.rank}, which have no price; leave it out: merged, they hold nothing."
    if model.int8:
        yield "[model] int8 has no price: weights count as what is computed in; set it to false to search for that."
