"""The wrapper that turns a function into a router, by adding checks, finite logits, random draws and the z-loss."""

from collections.abc import Callable
from dataclasses import replace
from functools import update_wrapper
from inspect import signature

import jax
import jax.numpy as jnp

from gspmd.annotate.errors import PlanError, SpecError
from gspmd.moe import inputs
from gspmd.moe.config import ROUTERS, MoEConfig
from gspmd.moe.routers.losses import z_loss
from gspmd.moe.routers.routing import Routing, every_token, finite

Rule = Callable[..., Routing]
Numbers = Callable[..., jax.Array]


class Router:
    """A router, called as `route(logits, config, *, key=None, mask=None)`, which draws numbers and then assigns tokens.

    Random numbers are drawn for all groups together (`draw`), before each device routes its own groups (`assign`). So
    the random numbers are the same on every mesh. A router has the docstring of its rule.

    Args:
        rule: a function (finite float32 logits [G, L, X], config, random numbers or None, mask [G, L] of real tokens)
            -> Routing. The rule must route groups independently, and must not draw random numbers. If the router is
            `scored` (`gspmd.moe.config.Kind`), the rule takes one more argument, which is the bias [X] for choosing
            experts, or None.
        name: the router's name in a config.
        numbers: a function (key, shape [G, L, X], out_sharding) -> the random numbers for the rule, [G, L] or [G, L,
            X]; None if the rule uses no random numbers.

    Example:
        >>> from gspmd.moe.config import ROUTERS, Kind
        >>> from gspmd.moe.routers.routing import assigned
        >>> @router("by-position")
        ... def by_position(logits, config, draws, mask):  # each token to the expert after its predecessor's
        ...     expert = jnp.broadcast_to(jnp.arange(logits.shape[1])[:, None] % config.experts, (*mask.shape, 1))
        ...     return assigned(expert, jnp.ones((*mask.shape, 1)), logits, config, mask, losses={})
        >>> ROUTERS["by-position"] = Kind(choices=1)
        >>> config = MoEConfig(experts=2, router="by-position", capacity_factor=0.5)
        >>> by_position(jnp.zeros((1, 4, 2)), config).kept[0, :, 0].tolist()
        [True, True, False, False]
        >>> del ROUTERS["by-position"]
    """

    def __init__(self, rule: Rule, name: str, numbers: Numbers | None = None):
        self.name, self._rule, self._numbers = name, rule, numbers
        self._route = jax.jit(self._draw_and_assign, static_argnames="config")
        update_wrapper(self, rule)
        self.__signature__ = signature(self.__call__)  # update_wrapper has set the rule's signature

    def __call__(
        self,
        logits: jax.Array,
        config: MoEConfig,
        *,
        key: jax.Array | None = None,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
    ) -> Routing:
        """Route the tokens of each group; see the docstring of the rule."""
        inputs.settings("route", config)
        inputs.prng_key("route", key)
        logits = inputs.array("route", "logits", logits, "GLX")
        mask = None if mask is None else inputs.array("route", "mask", mask, "GL")
        bias = None if bias is None else inputs.array("route", "bias", bias, "X", real=True)
        return self._route(logits, config, key=key, mask=mask, bias=bias)

    def draw(self, key: jax.Array | None, shape: tuple[int, ...], *, out_sharding=None) -> jax.Array | None:
        """Draw the random numbers for logits of shape [G, L, X].

        The result is None if there is no key, or if the rule uses no random numbers.
        """
        if key is None or self._numbers is None:
            return None
        return self._numbers(key, shape, out_sharding=out_sharding)

    def assign(
        self,
        logits: jax.Array,
        config: MoEConfig,
        draws: jax.Array | None,
        mask: jax.Array | None,
        bias: jax.Array | None = None,
    ) -> Routing:
        """Route the tokens of each group, independently of other groups, with the random numbers that `draw` returned.

        Raises:
            PlanError: the config names a different router; the config has a bias for choosing experts, but `bias` is
                None; or the config has no such bias, but `bias` is not None.
            SpecError: the shape of logits, mask or bias does not fit the config.
        """
        self._check(logits, config, mask, bias)
        padded, logits, mask = mask is not None, finite(logits), every_token(logits, mask)
        if padded:  # padding may be NaN, which would make gradients NaN, because 0 · NaN is NaN
            logits = jnp.where(mask[..., None] | ~jnp.isnan(logits), logits, 0)
        if ROUTERS[self.name].scored:
            bias = None if bias is None else jax.lax.stop_gradient(bias.astype(jnp.float32))
            routing = self._rule(logits, config, draws, mask, bias)
        else:
            routing = self._rule(logits, config, draws, mask)
        weight = config.z_coefficient
        routing = replace(routing, experts=config.experts, capacity=config.capacity(logits.shape[1]))
        if not weight:
            return routing
        z = weight * z_loss(logits[..., : config.experts], mask)
        return replace(routing, losses=routing.losses | {"z": z})

    def _draw_and_assign(self, logits, config, key, mask, bias):
        draws = self.draw(key, (*logits.shape[:2], config.experts))
        return self.assign(logits, config, draws, mask, bias)

    def _check(
        self, logits: jax.Array, config: MoEConfig, mask: jax.Array | None, bias: jax.Array | None = None
    ) -> None:
        if config.router != self.name:
            raise PlanError(
                f"cannot route: this is router {self.name}, and the config names {config.router}.\n"
                "  Call gspmd.moe.route, which uses the router of the config."
            )
        widths = (config.experts, 2 * config.experts) if config.noisy else (config.experts,)
        if logits.ndim != 3 or logits.shape[-1] not in widths:
            wanted = " or ".join(f"[G, L, {width}]" for width in widths)
            raise SpecError(
                f"cannot route: logits for {config.experts} experts must have shape {wanted}, "
                f"but they have {logits.shape}."
            )
        if mask is not None and mask.shape != logits.shape[:2]:
            raise SpecError(
                f"cannot route: for logits of shape {logits.shape} the mask must have shape {logits.shape[:2]}, "
                f"but it has {mask.shape}.\n"
                "  Pass a mask that says for every token whether it is real."
            )
        if (bias is not None) != config.choice_bias:
            fact, remedy = "has none", "Leave out bias, or set choice_bias in the config."
            if config.choice_bias:
                fact, remedy = "has one", f"Pass bias, an array of shape {(config.experts,)}: a number for each expert."
            raise PlanError(
                f"cannot route {'without' if bias is None else 'with'} a bias for choosing experts: "
                f"the config {fact}.\n"
                f"  {remedy}"
            )
        if bias is not None and bias.shape != (config.experts,):
            raise SpecError(f"cannot route: bias must have shape [X] = {(config.experts,)}, but it has {bias.shape}.")


def router(name: str, numbers: Numbers | None = None) -> Callable[[Rule], Router]:
    """Return a decorator that turns a rule into a `Router` with this name."""
    return lambda rule: Router(rule, name, numbers)


def one_per_token(key: jax.Array, shape: tuple[int, ...], *, out_sharding=None) -> jax.Array:
    """Draw one uniform number in [0, 1) per token: [G, L] for logits of `shape` [G, L, X]."""
    return jax.random.uniform(key, shape[:2], jnp.float32, out_sharding=out_sharding)


def normal_per_logit(key: jax.Array, shape: tuple[int, ...], *, out_sharding=None) -> jax.Array:
    """Draw one standard normal number per logit of `shape` [G, L, X]."""
    return jax.random.normal(key, shape, jnp.float32, out_sharding=out_sharding)
