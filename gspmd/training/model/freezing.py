"""The parameters that are trained: all but those that a pattern freezes."""

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from gspmd.annotate.errors import suggestion
from gspmd.training.toml import ConfigError


def trained_paths(
    keys: Mapping[str, str], frozen: Sequence[str] = (), still: Collection[str] = (), stages: bool = False
) -> tuple[str, ...]:
    """Return the paths of the parameters that are trained, in their order.

    Args:
        keys: the path of every parameter to its line of the layout.
        frozen: patterns of paths, such as `blocks.0.attention.*`, or of lines, `attention.*`.
        still: further paths that are not trained.
        stages: whether the layers are the stages of a pipeline, which train all of theirs.

    Raises:
        ConfigError: a pattern matches no parameter, nothing is left to train, or there are stages.

    Example:
        >>> trained_paths({"table": "embedding.table", "blocks.w_in": "ffn.w_in"}, frozen=("embedding.*",))
        ('blocks.w_in',)
    """
    faults, held = [], {*still}
    for pattern in frozen:
        found = {path for path, key in keys.items() if fnmatchcase(path, pattern) or fnmatchcase(key, pattern)}
        if not found:
            near = suggestion(pattern, (*keys, *keys.values())).strip() or f"They are {', '.join(keys)}."
            faults.append(f"frozen has {pattern!r}, which matches no parameter. {near}")
        held |= found
    if not faults and len(held) == len(keys):
        faults.append(f"frozen {', '.join(map(repr, frozen))} leaves no parameter to train.")
    if held and stages:
        faults.append("the stages of a pipeline train all parameters; leave [lora] and frozen out, or the stages.")
    if faults:
        raise ConfigError("cannot train this model:", faults)
    return tuple(path for path in keys if path not in held)
