"""A change of layout between two steps: the state keeps its values, bit for bit, and gets other shardings."""

from collections.abc import Sequence

import jax

from gspmd.training.state import TrainState
from gspmd.training.toml import ConfigError

# Arrays that an error names.
_SHOWN = 4


def move(state: TrainState, like: TrainState) -> TrainState:
    """Return a state sharded as `like` is, of the same devices; the old one is given up, array by array.

    Args:
        state: arrays.
        like: shapes with shardings, or arrays, on another mesh; of the form of `state`.

    Source: the idea is that of PipeTransformer (He et al. 2021, arXiv 2102.03161), which changes the parallelism of a
        run as it goes on.
    Differs: any layout follows any other one, and no process is started anew.
    """

    def put(leaf: jax.Array, to: jax.Array) -> jax.Array:
        moved = jax.block_until_ready(jax.device_put(leaf, to.sharding, may_alias=False))
        leaf.delete()
        return moved

    return jax.tree.map(put, state, like)


def check_same_form(states: Sequence[tuple[str, TrainState]]) -> None:
    """Refuse states of which one cannot be moved to the shardings of the next, such as of layouts that pad differently.

    Args:
        states: an arrangement's name, and the shapes and dtypes of its state.

    Raises:
        ConfigError: with the arrays that differ from those of the first.
    """
    (first, wanted), *others = [(name, _forms(state)) for name, state in states]
    for name, forms in others:
        paths = [path for path in {**wanted, **forms} if forms.get(path) != wanted.get(path)]
        faults = [
            f"{path} is {wanted.get(path)} in {first}, but {forms.get(path)} in {name}." for path in paths[:_SHOWN]
        ]
        faults += [f"... and {len(paths) - _SHOWN} more."] * (len(paths) > _SHOWN)
        if faults:
            raise ConfigError(
                "cannot change the layout, which pads otherwise:", [*faults, "Take layouts that pad alike."]
            )


def _forms(state: TrainState) -> dict[str, str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): f"{x.dtype} {tuple(x.shape)}" for path, x in leaves}
