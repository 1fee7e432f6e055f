"""Which dimension each mesh axis shards while an einsum runs: the exact search behind every plan.

One tensor, the shared one, meets one or several partners. For each mesh axis the search asks where it stands during the
local einsums: on a dimension (of the shared tensor, or of a partner alone), nowhere, or still owing a partial sum.
Every assignment gets a lower bound, all of them at once in numpy; the exact cost, with the moves in and out, is worked
out in the order of the bounds until a bound exceeds the best cost found. So the search is exhaustive in its answer, not
its work.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.collectives.bounds import OWED, THEIRS, Bounds
from gspmd.collectives.cost import einsum_seconds, itemsize
from gspmd.collectives.moves import move_within
from gspmd.collectives.plan import Step, picoseconds, total_cost
from gspmd.collectives.problem import Member, Setting, Tensor, wider

Cost = tuple[int, int, int]


@dataclass(frozen=True)
class Choice:
    """How one member runs: where the partner is brought, the local einsum, its result, the way to the target."""

    partner: Spec | None
    partner_steps: tuple[Step, ...]
    einsum: Step
    result: Spec
    settle_steps: tuple[Step, ...]

    @property
    def cost(self) -> Cost:
        """Of everything but the shared tensor's own move."""
        return total_cost((*self.partner_steps, self.einsum, *self.settle_steps))


@dataclass(frozen=True)
class Found:
    """The answer of a search: the shared tensor's spec during the einsums, its move, and one choice per member."""

    shared: Spec
    shared_steps: tuple[Step, ...]
    choices: tuple[Choice, ...]

    @property
    def cost(self) -> Cost:
        """Of the whole group; the shared tensor travels once."""
        return add(total_cost(self.shared_steps), *(choice.cost for choice in self.choices))


def add(*costs: Cost) -> Cost:
    """Costs add up component by component."""
    return tuple(map(sum, zip(*costs)))


@lru_cache(maxsize=1 << 14)
def search(setting: Setting, shared: Tensor, members: tuple[Member, ...], pinned: Spec | None = None) -> Found:
    """Find the cheapest way to bring `shared` and each member's partner together, multiply, and settle.

    Raises:
        PlanError: no assignment of mesh axes gives the targets (a target owes a sum that nothing makes).
    """
    twins = _twins(shared, members, pinned)
    bounds = [Bounds(setting, shared, member, pinned, twins) for member in members]
    best, found = None, None
    for bound, key in _by_bound(bounds):
        if best is not None and bound > best[0]:
            break
        for spec in _orderings(bounds[0].axes, key, shared.spec.dims, _hints(shared, members, pinned), OWED):
            if pinned is not None and spec != pinned:
                continue
            candidate = _complete(setting, shared, spec, members, bounds, key, best)
            if candidate is not None and (best is None or _rank(candidate) < best):
                best, found = _rank(candidate), candidate
    if found is None:
        raise PlanError(_impossible(shared, members, pinned))
    return found


def _twins(shared: Tensor, members: tuple[Member, ...], pinned: Spec | None) -> tuple[tuple[str, str], ...]:
    """Pairs of dimensions, such as batch and length, that stand unsharded in the same tensors: one can do for both."""
    tensors = [shared, *(tensor for member in members for tensor in (member.partner, member.target) if tensor)]
    specs = [tensor.spec for tensor in tensors]
    specs += [spec for spec in (pinned, *(member.pinned for member in members)) if spec is not None]
    dims = dict.fromkeys(dim for spec in specs for dim in spec.dims)
    plain = [dim for dim in dims if not any(dim in spec.dims and spec.axes_of(dim) for spec in specs)]
    parts = {dim: [dim in spec.dims for spec in specs] for dim in plain}
    return tuple((one, two) for i, one in enumerate(plain) for two in plain[i + 1 :] if parts[one] == parts[two])


def _rank(found: Found) -> tuple:
    return (*found.cost, str(found.shared), *(str(choice.partner) for choice in found.choices))


def _by_bound(bounds: "list[Bounds]") -> Iterator[tuple[int, tuple]]:
    """Assignments of the shared tensor's axes, cheapest bound first, that every member can complete."""
    totals: dict[tuple, int] = {}
    for key, own in bounds[0].shared_bound.items():
        rests = [bound.best_rest.get(key) for bound in bounds]
        if None not in rests:
            totals[key] = own + sum(rests)
    return iter(sorted((total, key) for key, total in totals.items()))


def _complete(setting, shared, spec, members, bounds, key, best) -> Found | None:
    """The exact best of every member, given the shared tensor's spec during the einsum."""
    sizes, mesh = dict(setting.sizes), dict(setting.mesh)
    limit = None if best is None else best[0]
    steps = move_within(limit, shared.spec, spec, sizes, mesh, shared.itemsize, setting.chip, shared.name)
    if steps is None:
        return None
    spent = total_cost(steps)[0]
    choices = []
    for member, bound in zip(members, bounds):
        left = None if limit is None else limit - spent
        choice = _best_choice(setting, shared, spec, member, bound, key, left)
        if choice is None:
            return None
        spent += choice.cost[0]
        choices.append(choice)
    return Found(spec, steps, tuple(choices))


def _best_choice(setting, shared, spec, member, bound, key, limit) -> Choice | None:
    best, found = None, None
    for low, row in bound.completions(key):
        most = min((each for each in (limit, None if best is None else best[0]) if each is not None), default=None)
        if most is not None and low > most:
            break
        for choice in _choices(setting, shared, spec, member, bound, row, most):
            rank = (*choice.cost, str(choice.partner))
            if best is None or rank < best:
                best, found = rank, choice
    return found


def _choices(setting, shared, spec, member, bound, row, most: int | None) -> Iterator[Choice]:
    """Every order of the partner's own axes for one assignment, as far as it takes no more than `most` picoseconds."""
    sizes, mesh = dict(setting.sizes), dict(setting.mesh)
    for partner in _partners(setting, spec, member, bound, row):
        if member.pinned is not None and partner != member.pinned:
            continue
        result = _result(spec, partner, member.target.spec)
        wanted = _without_broadcast(member.target.spec, result)
        if not set(wanted.partial) <= set(result.partial):
            continue
        einsum = _einsum_step(setting, shared, spec, member, partner, result)
        left = None if most is None else most - picoseconds(einsum.seconds)
        steps = ()
        if partner is not None:
            held = member.partner
            steps = move_within(left, held.spec, partner, sizes, mesh, held.itemsize, setting.chip, held.name)
            if steps is None:
                continue
            left = None if left is None else left - total_cost(steps)[0]
        settle = move_within(
            left, result, wanted, sizes, mesh, member.target.itemsize, setting.chip, member.target.name
        )
        if settle is not None:
            yield Choice(partner, steps, einsum, result, settle)


def _partners(setting, spec: Spec, member: Member, bound: "Bounds", row: tuple) -> Iterable[Spec | None]:
    if member.partner is None:
        return (None,)
    fixed = {dim: spec.axes_of(dim) for dim in spec.dims}
    dims = member.partner.spec.dims
    hints = [member.pinned] if member.pinned else [member.partner.spec, member.target.spec]
    return _orderings(bound.axes, row, dims, hints, THEIRS, fixed)


def _orderings(axes, key, dims, hints, owed: str, fixed: Mapping = {}) -> Iterator[Spec]:
    """The specs that an assignment stands for: each dimension's axes in every order worth trying."""
    placed = {dim: tuple(axis for axis, where in zip(axes, key) if where == dim) for dim in dims}
    partial = tuple(axis for axis, where in zip(axes, key) if where == owed)
    written = dict.fromkeys(group for hint in hints for group in hint.axes)  # an all-to-all brings them as they stand
    orders = [
        [fixed[dim]]
        if dim in fixed
        else _orders(placed[dim], [hint.axes_of(dim) for hint in hints if dim in hint.dims], written)
        for dim in dims
    ]
    for combination in product(*orders):
        yield Spec(dims, tuple(combination), tuple(sorted(partial)))


def _orders(axes: tuple[str, ...], hints: list[tuple[str, ...]], written: Iterable) -> list[tuple[str, ...]]:
    """The orders in which axes come to stand on one dimension without a permute: each spec's, what is new behind."""
    if len(axes) < 2:
        return [axes]
    orders = {}
    for hint in hints:
        known = tuple(axis for axis in hint if axis in axes)
        for other in (*written, axes):
            tail = tuple(axis for axis in other if axis in axes and axis not in known)
            if len(known) + len(tail) == len(axes):
                orders[known + tail] = None
    return list(orders)


def _hints(shared: Tensor, members: tuple[Member, ...], pinned: Spec | None) -> list[Spec]:
    specs = [shared.spec, *(member.target.spec for member in members)]
    specs += [member.partner.spec for member in members if member.partner is not None]
    return specs if pinned is None else [pinned, *specs]


def _result(left: Spec, right: Spec | None, target: Spec) -> Spec:
    """What the local einsum leaves: free axes on their dimensions, contracted and owed ones as a partial sum."""
    where = {dim: left.axes_of(dim) for dim in left.dims}
    owed = set(left.partial)
    if right is not None:
        where |= {dim: right.axes_of(dim) for dim in right.dims}
        owed |= set(right.partial)
    owed |= {axis for dim, axes in where.items() if dim not in target.dims for axis in axes}
    dims = tuple(dim for dim in target.dims if dim in where)
    return Spec(dims, tuple(where[dim] for dim in dims), tuple(sorted(owed)))


def _without_broadcast(target: Spec, result: Spec) -> Spec:
    """The target without the dimensions that no operand has: those are broadcast at the end, at no cost."""
    return Spec(result.dims, tuple(target.axes_of(dim) for dim in result.dims), target.partial)


def _einsum_step(setting, shared: Tensor, spec: Spec, member: Member, partner: Spec | None, result: Spec) -> Step:
    sizes, mesh = dict(setting.sizes), dict(setting.mesh)
    local = {}
    for held in (spec, partner):
        if held is not None:
            local |= {dim: sizes[dim] // prod(mesh[axis] for axis in held.axes_of(dim)) for dim in held.dims}
    contracted = any(dim not in result.dims for dim in local)
    points = prod(local.values())
    flops = 0 if partner is None else points * (2 if contracted else 1)
    touched = prod(local[d] for d in spec.dims) * itemsize(shared.dtype)
    touched += prod(local[d] for d in result.dims) * itemsize(member.target.dtype)
    if partner is not None:
        touched += prod(local[d] for d in partner.dims) * itemsize(member.partner.dtype)
    dtype = wider(shared, member)
    seconds = 0.0 if partner is None and not contracted else einsum_seconds(flops, touched, dtype, setting.chip)
    return Step("einsum", (), 0, seconds, spec, result, member.target.name, flops, partner)


def _impossible(shared: Tensor, members: tuple[Member, ...], pinned: Spec | None) -> str:
    targets = ", ".join(f"'{member.target.spec}'" for member in members)
    via = "" if pinned is None else f" via '{pinned}'"
    return (
        f"no plan brings '{shared.spec}'{via} to {targets}.\n"
        "  A partial sum in the result comes from a mesh axis on a summed dimension, or from an operand that owes it;\n"
        "  via specs must agree on every dimension that the operands share."
    )
