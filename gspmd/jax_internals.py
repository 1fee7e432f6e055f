"""Uses of JAX outside its public interface, for the supported releases: 0.10.2 and 0.12.

All other modules use only public names of JAX, so that changes of a new release are handled in this file:

- rules of dead code elimination (`jax.interpreters.partial_eval.dce_rules`), whose signature has changed;
- rules of partial evaluation, by which a loop's invariants are hoisted;
- the parameters of a jaxpr's equations (`PARAMETERS`), of which `scan` has changed some, and the primitive of a call;
- a function of JAX that is looked for on the stack (`is_hoisted_from_checkpoint`);
- the class of errors about shardings under Explicit axes;
- the mesh of `jax.set_mesh` with its devices, which public functions do not return under `jax.jit`;
- the client of a run of several processes, whose key-value store has no public name, and the cluster that JAX detects;
- what XLA's compiler for host devices does with optimization barriers;
- the version of cuDNN, for which JAX asks the library while it traces.

tests/test_jax_internals.py checks each of these uses against the installed JAX, so it shows what a new release has
changed.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax._src.clusters import ClusterEnv
from jax._src.core import ShardingTypeError as ShardingTypeError
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.distributed import global_state
from jax._src.mesh import get_concrete_mesh
from jax.extend.core import Jaxpr, Primitive
from jax.extend.core.primitives import closed_call_p
from jax.interpreters import partial_eval

PARAMETERS: dict[str, frozenset[str]] = {
    "scan": frozenset({"jaxpr", "length", "reverse", "unroll"}),  # and what `scan_operands` reads
    "while": frozenset({"cond_jaxpr", "cond_nconsts", "body_jaxpr", "body_nconsts"}),
    "cond": frozenset({"branches"}),
    "jit": frozenset({"name", "jaxpr"}),
    "remat2": frozenset({"jaxpr", "prevent_cse", "differentiated"}),
    "shard_map": frozenset({"jaxpr", "mesh", "in_specs", "out_specs"}),
    "custom_jvp_call": frozenset({"call_jaxpr"}),
    "custom_vjp_call": frozenset({"call_jaxpr"}),
    "custom_vmap_call": frozenset({"call"}),
    "dot_general": frozenset({"dimension_numbers"}),
    "reshape": frozenset({"dimensions"}),
    "broadcast_in_dim": frozenset({"broadcast_dimensions"}),
}
"""A mapping from the name of a primitive to the parameters that are read from equations of this primitive."""

CLOSED_CALL = closed_call_p.name
"""The name of the primitive of a plain call in a jaxpr: `closed_call`, or since JAX 0.12 `eval_jaxpr`."""


# -- the mesh ----------------------------------------------------------------------------------------------------------


def has_no_rule_for_partial_sums(error: BaseException | None) -> bool:
    """Return whether JAX raised an error because an operation has no rule for partial sums.

    The error comes from the operation on a parameter whose gradient is a partial sum, or from the operation's gradient.
    The errors of most operations state this cause. Cumulative sums, sorts and convolutions fail only when they read the
    array's `PartitionSpec`.
    """
    if isinstance(error, NotImplementedError):
        return "unreduced" in str(error)
    return isinstance(error, ValueError) and "non-empty unreduced/reduced set" in str(error)


def concrete_mesh() -> jax.sharding.Mesh | None:
    """Return the mesh of `jax.set_mesh` with its devices, or None if no mesh is set.

    This also works while a function is traced.
    """
    mesh = get_concrete_mesh()
    return None if mesh is None or mesh.empty else mesh


# -- loops -------------------------------------------------------------------------------------------------------------


def scan_operands(equation: Any) -> tuple[int, int]:
    """Return the number of constant operands and the number of carried operands of a `scan`.

    The sliced operands come after these.
    """
    params = equation.params
    if "num_consts" in params:  # JAX 0.10 and 0.11
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = map(len, params["ft_in"].unpack())  # since 0.12
    return constants, carried


# -- dead code ---------------------------------------------------------------------------------------------------------

DceRule = Callable[[list[bool], Any], tuple[list[bool], Any]]
"""(which results are used, equation) -> (which operands are used, reduced equation).

The reduced equation is None if nothing is left."""

_dce_rules = cast(dict[Primitive, Callable], partial_eval.dce_rules)  # its type differs between releases of JAX
_RULES_ASK_LIVE_INPUTS = jax.__version_info__ >= (0, 12)


def set_dce_rule(primitive: Primitive, rule: DceRule) -> None:
    """Register the rule that reduces an equation of this primitive when only some of its results are used."""
    # JAX also says which mutable references are read later; none of our primitives takes one.
    asked: Callable = (lambda used, live, equation: rule(used, equation)) if _RULES_ASK_LIVE_INPUTS else rule
    _dce_rules[primitive] = asked


def without_unused_results(equation: Any, used: Sequence[bool]) -> Any:
    """Reduce an equation to the part that computes the used results.

    Returns:
        The reduced equation, the given equation if JAX has no rule for its primitive, or None if nothing is left.
    """
    rule = _dce_rules.get(equation.primitive)
    if rule is None:
        return equation
    live = ([True] * len(equation.invars),) if _RULES_ASK_LIVE_INPUTS else ()
    return rule(list(used), *live, equation)[1]


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """Return the program without the operations that no result needs; the program keeps all its arguments."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


# -- partial evaluation ------------------------------------------------------------------------------------------------


def set_partial_evaluation(primitive: Primitive, evaluated: Callable, evaluated_in_checkpoint: Callable) -> None:
    """Register the rules by which a primitive is evaluated when only some of its operands are known.

    Args:
        primitive: a primitive with several results.
        evaluated: (trace, *tracers, **parameters) -> tracers; the trace and its tracers are JAX's.
        evaluated_in_checkpoint: the rule inside the jaxpr of a `jax.checkpoint` or of a loop: (policy of what may be
            saved, which operands are unknown, which operands are instantiated, equation) -> (equation of the known
            part, equation of the unknown part, which results are unknown, which results are instantiated, residuals).
    """
    rules, rules_in_checkpoint = partial_eval.custom_partial_eval_rules, partial_eval.partial_eval_jaxpr_custom_rules
    cast(dict[Primitive, Callable], rules)[primitive] = evaluated
    cast(dict[Primitive, Callable], rules_in_checkpoint)[primitive] = evaluated_in_checkpoint


def is_hoisted_from_checkpoint() -> bool:
    """Return whether JAX is evaluating a `jax.checkpoint` whose operands are all known.

    In this case JAX moves the whole checkpoint out of the loop around it. The arguments of a rule do not show this, so
    JAX's own function is looked for on the stack.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "remat_partial_eval" and frame.f_globals["__name__"] == "jax._src.ad_checkpoint":
            return not any(frame.f_locals["in_unknowns"])
        frame = frame.f_back
    return False


# -- compilers ---------------------------------------------------------------------------------------------------------

HOST_MERGES_ACROSS_BARRIERS = jax.__version_info__ < (0, 11)
"""Whether XLA:CPU eliminates common subexpressions once more after it has expanded optimization barriers."""

PARTITIONER_KEEPS_AXIS_NAMES = jax.__version_info__ >= (0, 12)
"""Whether XLA's partitioner gets the names of mesh axes. If so, it aborts when it must split an axis unevenly."""


def assume_cudnn(version: int) -> None:
    """Let JAX trace cuDNN's attention without the library, to compile for GPUs that are not attached.

    JAX asks the library for its version. If there is no library, JAX gets `version` as the answer from now on.

    Args:
        version: a version in cuDNN's numbering, in which 90800 is 9.8.0.
    """
    ask = fused_attention_stablehlo.check_cudnn_version

    def version_of_cudnn() -> int:
        try:
            return ask()
        except RuntimeError:
            return version

    if not hasattr(ask, "_is_ours"):
        version_of_cudnn._is_ours = True  # type: ignore[attr-defined]  # so that it is replaced only once
        fused_attention_stablehlo.check_cudnn_version = version_of_cudnn


# -- several processes -------------------------------------------------------------------------------------------------

distributed_runtime = global_state
"""The state of `jax.distributed.initialize`, whose `client` keeps keys and values for all processes of a run."""


def detected_processes(limit: float) -> tuple[str, int, int] | None:
    """Return the processes that `jax.distributed.initialize` would detect, or None if there is no cluster.

    Args:
        limit: the maximum number of seconds to wait for the first process to give its address.

    Returns:
        The address of the first process, the number of processes, and the index of this process.
    """
    given = os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None
    address, processes, process, _ = ClusterEnv.auto_detect_unset_distributed_params(*given, None, int(limit))
    return None if address is None or processes is None or process is None else (address, processes, process)
