"""Experts across a mesh: what every layout sends, in all lowerings, is the list that it names and nothing else."""

import re
from collections import Counter
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.annotate.errors import LayoutError, SpecError
from gspmd.moe import MoEConfig, expert_layer
from tests.moe import placed
from tests.moe.placed import LAYOUTS, E, G, L, X, specs

CONFIG = MoEConfig(experts=X, router="gshard", dispatch="sort")
DROPLESS = replace(CONFIG, dispatch="dropless")
CHUNKS = 2  # of looped on host devices


def _by_kind(found):
    return {(kind, "".join(axes)): amount for (kind, axes), amount in found.by_kind_and_axes().items()}


def _sent(function, arrays):
    """Count and bytes by kind and axes: as planned, and as compiled; every step is there under its own name."""
    program = jax.jit(function)  # traced once for both
    plan = gspmd.trace(program, *arrays)
    ledger = gspmd.ledger(program.lower(*arrays).compile())
    comparison = ledger.compare(plan)
    assert comparison.agrees
    assert not comparison.differing
    assert _by_kind(ledger) == _by_kind(plan)
    return _by_kind(plan)


def _counts(sent):
    return {key: count for key, (count, _) in sent.items()}


def _wanted(layout, lowering, form, passes):
    """The layout's list; dropless also sends counts, once, and looped cuts what is of slots into chunks."""
    wanted = Counter()
    for one in (layout.forward, layout.backward)[:passes]:
        wanted.update(one)
    crossing = [key for key in layout.forward if key[0] == "all-to-all"]
    if crossing and lowering == "looped":
        wanted[crossing[0]] *= CHUNKS
        if ("all-reduce", "y") in layout.forward:  # what settles the sum over F
            wanted[("all-reduce", "y")] *= CHUNKS
    if crossing and form == "dropless":
        wanted[crossing[0]] += 1
    return dict(wanted)


def _slot_bytes(layout, form):
    """Return the bytes that a device sends when its slots, or its rows, cross once."""
    spec = gspmd.Spec.parse(layout.specs["expert_input"])
    shards = np.prod([layout.mesh[axis] for axis in spec.axes_of("X")], dtype=int)
    groups = gspmd.Spec.parse(layout.specs["groups"]).axes_of("G")
    slots = X * CONFIG.capacity(L) if form == "sort" else shards * L * min(2, X // shards)
    held = 4 * G * slots * E // np.prod([layout.mesh[axis] for axis in groups], dtype=int)
    return held * (shards - 1) // shards


FORWARD = [
    *((name, "blocking", "sort") for name in LAYOUTS),
    ("two axes", "looped", "sort"),
    ("experts x model", "looped", "dropless"),
]
BOTH = [
    ("experts x model", "blocking", "sort"),
    ("experts x zero", "looped", "sort"),
    ("experts x data x model", "looped", "dropless"),
    ("data", "blocking", "dropless"),
]
PRODUCT = list(product(LAYOUTS, ("blocking", "looped"), ("sort", "dropless")))


def _check(make_mesh, name, lowering, form, passes, biases=None):
    layout, config = LAYOUTS[name], CONFIG if form == "sort" else DROPLESS
    function = (placed.layer if passes == 1 else placed.pullback)(layout, config)
    with jax.set_mesh(make_mesh(layout.mesh)), gspmd.lowering(lowering):
        sent = _sent(function, placed.arrays(layout, biased=biases is not None))
    assert _counts(sent) == Counter(_wanted(layout, lowering, form, passes)) + Counter(biases)
    crossing = [amount for (kind, _), (_, amount) in sent.items() if kind == "all-to-all"]
    if crossing:
        counts = crossing[0] - 2 * passes * _slot_bytes(layout, form)
        assert 0 < counts < 200 if form == "dropless" else counts == 0


@pytest.mark.turns(5)
@pytest.mark.parametrize("case", FORWARD, ids=" ".join)
def test_a_forward_pass_sends_its_list(case, make_mesh):
    _check(make_mesh, *case, passes=1)


@pytest.mark.turns(2)
@pytest.mark.parametrize("case", BOTH, ids=" ".join)
def test_a_backward_pass_sends_its_list(case, make_mesh):
    _check(make_mesh, *case, passes=2)


# Three biases, each moved to its product once, and its gradient summed over the devices of its slots once.
BIASES = [
    ("experts x model", "blocking", "sort", {}),
    ("experts x data", "looped", "dropless", {("all-reduce", "y"): 3}),
    ("experts x zero", "blocking", "sort", {("all-gather", "y"): 3, ("reduce-scatter", "y"): 3}),
    ("experts x zero", "looped", "dropless", {("all-gather", "y"): 3, ("reduce-scatter", "y"): 3}),
]


@pytest.mark.turns(1)
@pytest.mark.parametrize(("name", "lowering", "form", "biases"), BIASES, ids=[" ".join(case[:3]) for case in BIASES])
def test_biases_are_gathered_once_and_their_gradients_summed_once(name, lowering, form, biases, make_mesh):
    _check(make_mesh, name, lowering, form, passes=2, biases=biases)


@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("case", PRODUCT, ids=" ".join)
def test_every_pass_sends_its_list(case, passes, make_mesh):
    _check(make_mesh, *case, passes=passes)


WRONG = [
    ("rows are not slots", specs("G_xXCE -> GX_xC_yE", "GX_xC_yF", "X_xEF", "X_xFE"), "GX_xC_yE"),
    (
        "experts that are gathered",
        specs("G_xXCE -> GX_xCE", "GX_xCF", "X_xEF", "X_xFE", in_via="GXCE, XEF"),
        "GXCE",
    ),
    ("hidden elsewhere", specs("G_xXCE -> GX_xCE", "G_xXCF", "X_xEF", "X_xFE"), "G_xXCF"),
]


@pytest.mark.parametrize(("_", "section", "wrong"), WRONG, ids=[name for name, *_ in WRONG])
def test_rows_that_would_have_to_move_are_refused(_, section, wrong, make_mesh):
    layout = placed.Placed(placed.TWO, section, {}, {})
    with jax.set_mesh(make_mesh(layout.mesh)), pytest.raises(LayoutError) as error:
        jax.eval_shape(placed.layer(layout, DROPLESS), *placed.arrays(layout))
    assert str(error.value).splitlines()[1:] == [
        f"    {wrong}",
        f"    {'^' * len(wrong)}",
        "  rows, sorted by expert, stay where they arrive: G, X and C must be sharded as in 'GX_xCE'.",
        "  Change this spec, or fix it with moe.in_via in the layout, or use dispatch 'sort'.",
    ]


@pytest.mark.parametrize("config", [CONFIG, DROPLESS], ids=lambda config: config.dispatch)
def test_experts_that_do_not_divide_are_refused(config, make_mesh):
    x, weights, _ = placed.inputs()
    weights = {name: w[:, :6] if name == "router" else w[:6] for name, w in weights.items()}
    section, config = LAYOUTS["one axis"].section, replace(config, experts=6)
    fact = "dimension X has size 6, which mesh axis x (size 4) does not divide."
    with jax.set_mesh(make_mesh({"x": 4}, "auto")), pytest.raises(SpecError, match=re.escape(fact)):
        jax.eval_shape(lambda: expert_layer(x, weights, section, config))


@pytest.mark.parametrize("lowering", ["blocking", "looped", "xla"])
@pytest.mark.parametrize("config", [CONFIG, DROPLESS], ids=lambda config: config.dispatch)
@pytest.mark.parametrize("narrow", ["tokens", "weights"])
def test_tokens_and_weights_of_two_dtypes_meet_in_their_joint_one(narrow, config, lowering, make_mesh):
    layout = LAYOUTS["one axis"]
    with jax.set_mesh(make_mesh(layout.mesh)), gspmd.lowering(lowering):
        x, weights, mask = placed.arrays(layout)
        if narrow == "tokens":
            x = x.astype("bfloat16")
        else:
            weights |= {"w_out": weights["w_out"].astype("bfloat16")}
        loss = lambda x, w, mask: jnp.sum(placed.layer(layout, config)(x, w, mask)[0])  # noqa: E731
        y, _, _ = jax.eval_shape(placed.layer(layout, config), x, weights, mask)
        gradients = jax.eval_shape(jax.grad(loss, (0, 1)), x, weights, mask)
    assert y.dtype == jnp.float32
    assert jax.tree.map(lambda leaf: leaf.dtype, gradients) == jax.tree.map(lambda leaf: leaf.dtype, (x, weights))
