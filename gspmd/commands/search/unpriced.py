"""Settings that change the bytes that a step holds or sends, but that a search does not price."""

from collections.abc import Iterator
from contextlib import contextmanager

from gspmd.commands.file import File
from gspmd.training.config import ConfigError
from gspmd_models.search.workload import Unsearched


@contextmanager
def remedied(remedy: str) -> Iterator[None]:
    """Add a remedy in terms of the command's flags to the error about a model that cannot be searched.

    Raises:
        ConfigError: in place of `Unsearched`.
    """
    try:
        yield
    except Unsearched as fault:
        raise ConfigError(fault.fact, [remedy]) from None


def unpriced(file: File, trains: bool, remedy: str) -> Iterator[str]:
    """Yield a fault for each setting that a search would price wrongly.

    Args:
        file: the tables of the configuration file, as changed by flags.
        trains: whether a training step is searched for.
        remedy: the remedy that is added to each fault.
    """
    lora = file.model.lora or (file.lora if file.lora.rank else None)
    if lora and not trains:
        yield f"[lora] has adapters of rank {lora.rank}, which have no price (merged adapters need no memory){remedy}"
    if file.model.int8:
        served = "" if trains else ": --weights int8 searches for them"
        yield f"[model] int8 is for weights that are stored in int8{served}{remedy}"
    if not file.model.stacked:
        yield f"[model] stacked is off, and only stacked blocks have a price{remedy}"
    if file.model.offload and trains:
        yield f"[model] offload is set, and copies of activations to host memory have no price{remedy}"
