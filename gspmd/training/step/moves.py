"""The moves of a training step: parameters to the loss, gradients to the optimizer, and updated parameters back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from gspmd.annotate.equation import Equation
from gspmd.annotate.spec import Spec

Tree = Any
Reshard = Callable[..., jax.Array]
"""A function such as `gspmd.reshard`, which moves an array by an equation; a lowering may be given."""


@dataclass(frozen=True)
class Moves:
    """Functions that reshard parameters and gradients within a step.

    If all layouts agree, nothing moves. If the optimizer state is sharded over more mesh axes than the parameters
    (ZeRO-1), parameters are sliced before the update, and the new parameters are all-gathered. Gradients are
    reduce-scattered if they are partial sums, and sliced if they are not.

    Attributes:
        to_loss: a function that moves parameters to the specs in which the loss gets them.
        gradients_to_optimizer: a function that moves gradients from the specs that they have after the loss to the
            optimizer's specs.
        to_optimizer: a function that moves parameters to the optimizer's specs.
        to_parameters: a function that moves updated parameters back to their own specs.
        parameters: the spec of each parameter; None if not given.
        loss: the spec in which the loss gets each parameter; None if not given.

    Source: Rajbhandari et al., ZeRO (arXiv 1910.02054), section 5.
    """

    to_loss: Callable[[Tree], Tree] = lambda tree: tree
    gradients_to_optimizer: Callable[[Tree], Tree] = lambda tree: tree
    to_optimizer: Callable[[Tree], Tree] = lambda tree: tree
    to_parameters: Callable[[Tree], Tree] = lambda tree: tree
    parameters: Tree = field(default=None)
    loss: Tree = field(default=None)

    @property
    def partial(self) -> bool:
        """Whether some gradients stay partial sums until they reach the optimizer."""
        return any(spec.reduced for spec in jax.tree.leaves(self.loss, is_leaf=_is_spec))


def plan_moves(
    parameters: Tree, optimizer: Tree, reshard: Reshard, gradients: Tree | None = None, loss: Tree | None = None
) -> Moves:
    """Build the moves of a step from trees of specs.

    If the loss gets a parameter as `EF reduced-x`, the parameter's gradient is `EF partialsum-x`. Microbatches, layers
    and several uses of the parameter add to this partial sum, and a single move reduces it to the optimizer's spec.

    Args:
        parameters: the spec of each parameter.
        optimizer: the spec of each parameter's optimizer state, with the same dimensions.
        reshard: a function that moves an array by an equation, such as `gspmd.reshard`.
        gradients: the spec to which each gradient moves first, before it moves to the optimizer's spec. If this is None
            or the parameter's own spec, there is only one move, to the optimizer's spec.
        loss: the spec in which the loss gets each parameter; None for the parameter's own spec.

    Example:
        >>> specs = [{"w": Spec.parse(text)} for text in ("EF", "E_xF", "EF reduced-x")]
        >>> moves = plan_moves(*specs[:2], reshard=lambda x, equation, **_: print(equation), loss=specs[2])
        >>> moves.to_loss({"w": 0}), moves.gradients_to_optimizer({"w": 0}), moves.to_parameters({"w": 0})
        EF -> EF reduced-x
        EF partialsum-x -> E_xF
        E_xF -> EF
        ({'w': None}, {'w': None}, {'w': None})
    """
    loss = parameters if loss is None else loss
    given = _map(lambda spec: spec.cotangent, loss)
    by = _map(_between, parameters, parameters if gradients is None else gradients, given)
    first, then = _mover(given, by, reshard), _mover(by, optimizer, reshard)
    return Moves(
        _mover(parameters, loss, reshard),
        lambda tree: then(first(tree)),
        _mover(parameters, optimizer, reshard),
        _mover(optimizer, parameters, reshard),
        parameters,
        loss,
    )


def _between(parameter: Spec, gradient: Spec, given: Spec) -> Spec:
    return given if gradient == parameter else gradient


def _mover(sources: Tree, targets: Tree, reshard: Reshard) -> Callable[[Tree], Tree]:
    def move(source: Spec, target: Spec, leaf: jax.Array) -> jax.Array:
        if source == target:
            return leaf
        # A compiler may send a whole sum and then slice it, which sends twice the bytes of a reduce-scatter.
        options = {"lowering": "blocking"} if source.partial else {}
        return reshard(leaf, Equation.move(source, target), **options)

    return lambda tree: _map(move, sources, targets, tree)


def _map(f: Callable, *trees: Tree) -> Tree:
    return jax.tree.map(f, *trees, is_leaf=_is_spec)


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, Spec)
