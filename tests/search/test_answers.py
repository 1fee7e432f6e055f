"""A question and its answer: meshes, the best of them, the file, presets in the space, and why not."""

import itertools
import random
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from math import prod
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.annotate import LayoutError, Spec
from gspmd.hardware.chips import CHIPS
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd.search import Choice, NothingFits, Problem, Search, Term
from gspmd.search.answers import Candidate, NoneFits, Space, document, find, meshes
from gspmd.search.answers.candidate import NEAR, TOLERANCE
from gspmd.search.answers.document import LineCost, remarks
from gspmd.search.answers.frontier import frontier
from gspmd.search.answers.nearby import KINDS, improved, in_ends, nearby, with_picks
from gspmd.search.answers.presets import picks_of, placed_presets
from gspmd.search.answers.why import why
from gspmd.search.finding import NORM
from gspmd.search.peak import PeakSearch
from gspmd.training import OptimizerConfig, jit_step
from gspmd_models import step
from gspmd_models.search.phases import problem_of
from gspmd_models.search.workload import Workload
from tests.references.models import TINY

CHIP = CHIPS["tpu-v5p"]
GATED = replace(TINY, kv_heads=4, tied=False)
PLAIN = replace(TINY, kv_heads=4, activation="gelu", remat="dots")
ROUTED = replace(GATED, moe=MoEConfig(experts=4, every=2, router="gshard"))
SHARED = replace(ROUTED, moe=replace(ROUTED.moe, shared=2))
BATCH, LENGTH = 8, 16


@cache
def candidate(config=GATED, mesh=(("x", 4), ("y", 2)), limit=CHIP.hbm_bytes, phase="train"):
    return Candidate(problem_of(Workload(config, CHIP, BATCH, LENGTH, phase=phase), dict(mesh)), limit)


def written(of, answer, said=()):
    return document(of, answer, ["a header"], dict(said))


def loaded(text, folder):
    path = folder / "found.toml"
    path.write_text(text)
    return Layout.load(path)


def some_answers(of, count, seed=0):
    """Answers for random options of random choices, the others as is best beside them."""
    draw, search = random.Random(seed), of.unlimited_search
    while count:
        chosen = draw.sample([choice for choice in of.unlimited.choices if choice.name != NORM], 2)
        try:
            yield search.best(fixed={choice.name: draw.randrange(len(choice.options)) for choice in chosen})
            count -= 1
        except NothingFits:
            continue


# -- meshes and the best of them ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("torus", [(2, 2, 1), (4, 8, 8), (2, 4, 8), (16, 16), (4, 4, 4, 2), (1, 1)])
def test_meshes_are_all_groupings_of_torus_axes(torus):
    """Held against every assignment of torus axes to three mesh axes."""
    wanted = set()
    for places in itertools.product(range(3), repeat=len(torus)):
        shape = [prod(size for size, at in zip(torus, places) if at == axis) for axis in range(3)]
        wanted.add(tuple(sorted(size for size in shape if size > 1)) or (1,))
    found = meshes(torus)
    assert [tuple(sorted(mesh.values())) for mesh in found] == sorted(
        (tuple(sorted(mesh.values())) for mesh in found), key=len
    )
    assert {tuple(sorted(mesh.values())) for mesh in found} == wanted
    assert len(found) == len(wanted)
    assert all(list(mesh) == list("xyz")[: len(mesh)] for mesh in found)


def spaces(every=None):
    workload = Workload(GATED, CHIP, BATCH, LENGTH)
    return [Space(partial(problem_of, workload, mesh)) for mesh in every or meshes((4, 2))]


@pytest.mark.parametrize("share", [1.0, 0.4, 0.02])
def test_the_best_mesh_is_the_best_of_all_solved_alone(share):
    limit = share * candidate().free.bytes
    alone = []
    for space in spaces():
        phase = space.phase()
        try:
            alone.append((Search(phase.problem(limit)).best().seconds, phase.case.mesh))
        except NothingFits as fault:
            alone.append((float("inf"), fault.nearest.bytes))
    if min(alone, key=lambda each: each[0])[0] == float("inf"):
        with pytest.raises(NoneFits) as none:
            find(spaces(), limit)
        assert none.value.over == min(size for _, size in alone) - limit
        assert none.value.nearest.bytes == min(size for _, size in alone)
        return
    finding = find(spaces(), limit)
    cheapest = min(seconds for seconds, _ in alone)
    assert (
        cheapest * (1 - TOLERANCE) <= finding.bound <= cheapest <= finding.answer.seconds <= cheapest * (1 + 2 * NEAR)
    )
    assert finding.complete
    assert finding.answer.bytes <= limit


def random_phase(draw, axes, moments=1):
    """A phase of three choices with random tables, and the seconds and the peak of every assignment."""
    seconds, held = draw.integers(1, 40, (3, 3, 4)), draw.integers(0, 30, (moments, 2, 4))
    choices = [Choice(name, tuple(range(4))) for name in "abc"]

    def counted(shares):
        size = sum(share * held[moment[0]] for moment, share in shares.items())
        terms = [Term("ab", ("a", "b"), seconds[:2].sum(0).repeat(2, 0)[:4] * 1.0, bytes=size[0][None, :] * 1.0)]
        terms += [Term("c", ("c",), seconds[2, 0] * 1.0, bytes=size[1] * 1.0), Term("a", ("a",), seconds[2, 1] * 1.0)]
        return Problem(choices, terms)

    def peak(picks):
        sums = held[:, 0, picks["b"]] + held[:, 1, picks["c"]]
        return (int(sums.argmax()),), float(sums.max())

    problem = counted({(0,): 1.0})
    every = [
        (problem.cost(picks), peak(picks)[1])
        for picks in (dict(zip("abc", each)) for each in itertools.product(range(4), repeat=3))
    ]
    case = SimpleNamespace(mesh=dict.fromkeys(axes, 2), microbatches=1)
    search = partial(PeakSearch, counted, peak, (0,))
    return SimpleNamespace(case=case, overestimate=0.0, problem=lambda limit: problem, search=search), every


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("moments", [1, 3])
def test_the_best_of_random_problems_is_the_best_of_all_their_assignments(seed, moments):
    """With several moments it may be slower than that, but no more than the bound says."""
    draw = np.random.default_rng(seed)
    phases = [random_phase(draw, axes, moments) for axes in ("x", "xy", "xyz")]
    limit = float(draw.integers(4, 30))
    fitting = [
        (seconds, number) for number, (_, every) in enumerate(phases) for seconds, held in every if held <= limit
    ]
    every = [Space(lambda phase=phase: phase) for phase, _ in phases]
    if not fitting:
        with pytest.raises(NoneFits) as none:
            find(every, limit)
        smallest = min(held for _, every in phases for _, held in every)
        assert none.value.over >= smallest - limit
        if moments == 1:
            assert none.value.over == smallest - limit
        return
    finding = find(every, limit)
    seconds, number = min(fitting)  # of equals the first, which has the fewest axes
    assert finding.answer.bytes <= limit
    assert finding.bound <= seconds <= finding.answer.seconds
    if moments == 1:
        assert finding.answer.seconds == seconds
        assert seconds * (1 - TOLERANCE) <= finding.bound
        assert finding.best.phase is phases[number][0]


def test_a_mesh_that_cannot_win_is_not_solved():
    finding = find(spaces(), CHIP.hbm_bytes)
    others = [each for each in finding.candidates if each is not finding.best]
    assert others
    assert all(each.answer is None and each.free.seconds >= finding.answer.seconds for each in others)


def test_of_meshes_that_cost_the_same_the_one_with_fewer_axes_is_taken():
    """With the batch alone to be split, and weights whole, two axes do what one does."""
    doubled = spaces([{"x": 4, "y": 1}, {"x": 4}])
    assert find(doubled, CHIP.hbm_bytes).best.phase.case.mesh == {"x": 4}
    assert find(doubled[::-1], CHIP.hbm_bytes).best.phase.case.mesh == {"x": 4}


def test_an_interrupt_leaves_the_best_so_far(monkeypatch):
    every = spaces()

    def interrupted():
        raise KeyboardInterrupt

    finding = find([every[0], Space(interrupted), every[1]], CHIP.hbm_bytes)
    assert not finding.complete
    assert finding.answer == Candidate(every[0].phase(), CHIP.hbm_bytes).solve()
    assert finding.bound <= finding.answer.seconds
    with pytest.raises(KeyboardInterrupt):
        find([Space(interrupted), *every], CHIP.hbm_bytes)


def test_an_interrupt_within_a_search_leaves_what_it_had(monkeypatch):
    held = candidate()
    limit = 0.4 * held.free.bytes
    best = held.phase.search(limit).best()

    def interrupted(search, *asked):
        if search.problem.limit is not None:
            search.so_far = best
            raise KeyboardInterrupt
        return original(search, *asked)

    original = Search.best
    monkeypatch.setattr(Search, "best", interrupted)
    finding = find([Space(lambda: held.phase)], limit)
    assert (finding.complete, finding.answer) == (False, replace(best, complete=False))
    assert finding.bound == best.bound


@pytest.mark.parametrize(("block", "phase"), [("serial", "train"), ("parallel", "prefill")])
def test_an_interrupt_at_any_moment_leaves_a_bound(monkeypatch, block, phase):
    """Also among the few options that a search of parallel blocks begins with, of which nothing is proved of all."""
    monkeypatch.setattr("gspmd.search.question.FEW", 1)
    held = candidate(replace(GATED, block=block), phase=phase)
    limit = (held.least.bytes + held.free.bytes) / 2
    cheapest, left = held.phase.search(limit).best().seconds, 0

    def interrupted(budget):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr("gspmd.search.answers.candidate.StepBudget.__call__", interrupted)
    for polls in range(4):
        left = polls
        finding = find([Space(lambda: held.phase)], limit)
        assert not finding.complete
        assert held.free.seconds <= finding.bound <= cheapest * (1 + 1e-9) <= finding.answer.seconds * (1 + 2e-9)


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [GATED, PLAIN], ids=["gated", "plain"])
def test_a_found_layout_loads_and_checks(config, tmp_path):
    held = candidate(config)
    for answer in (held.solve(), *some_answers(held, 6)):
        layout = loaded(written(held, answer), tmp_path)
        layout.check(config.sizes(BATCH, LENGTH), held.phase.case.mesh)
        assert ("ffn.w_gate" in layout.table) == config.gated
        assert layout.mesh_for(8) == held.phase.case.mesh
        for line in held.phase.lines(answer.picks):
            section = layout.overrides[line.section] if line.section else layout.table
            assert config.gated or line.key == "ffn.w_gate" or section[line.key] == line.text


@pytest.mark.slow
def test_searching_again_writes_the_same_bytes():
    texts = set()
    for _ in range(2):
        held = Candidate(candidate().phase, CHIP.hbm_bytes)
        texts.add(written(held, held.solve(), remarks(held, held.solve())))
    assert len(texts) == 1


def test_sections_stand_as_in_presets_and_comments_in_a_column():
    held = candidate()
    lines = written(held, held.solve(), remarks(held, held.solve())).splitlines()
    sections = [line.strip("[]") for line in lines if line.startswith("[")]
    order = ["mesh", "lowering", "embedding", "attention", "ffn", "output", "gradients", "optimizer"]
    assert sections == [name for name in order if name in sections]
    assert lines[0] == "# a header"
    for _, block in itertools.groupby(lines, key=bool):
        assert len({line.index("  # ") for line in block if "  # " in line}) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("gated", [True, False])
def test_every_line_of_shared_experts_is_written_and_commented_and_again_the_same(gated, tmp_path):
    config = replace(SHARED, activation="swiglu" if gated else "gelu")
    texts = set()
    for _ in range(2):
        candidate.cache_clear()
        held = candidate(config, (("x", 2), ("y", 2)))
        texts.add(written(held, held.solve(), remarks(held, held.solve())))
    (text,) = texts
    lines = [line for line in text.splitlines() if line.startswith("shared_")]
    keys = ["shared_in", *["shared_gate"] * gated, "shared_hidden", "shared_out", "shared_in_via", "shared_out_via"]
    assert [line.partition(" ")[0] for line in lines] == keys
    assert all("  # " in line for line in lines)
    loaded(text, tmp_path).check(config.sizes(BATCH, LENGTH), {"x": 2, "y": 2})


def test_shared_experts_lie_as_the_width_of_one_divides():
    """Layouts are checked by the width of one shared expert, though the axes would divide two together."""
    config = replace(SHARED, feed_forward=6)
    held = candidate(config, (("x", 4),))
    vias = [
        Spec.parse(each["", "moe.shared_in_via"].split(", ")[1]) for each in held.options.texts["moe.shared_in_via"]
    ]
    assert any(via.axes_of("F") for via in vias)
    for answer in some_answers(held, 12):
        lines = {line.key: line.text for line in held.phase.lines(answer.picks)}
        of_shared = [text for key, text in lines.items() if key.startswith("moe.shared_")]
        assert not [text for text in of_shared if "F_" in text]


def test_what_is_said_of_a_choice_is_what_it_costs_and_what_the_next_best_would():
    held = candidate()
    answer, problem = held.solve(), held.unlimited
    terms, said = problem.seconds_of(answer.picks), dict(remarks(held, answer))
    assert list(said) == [choice.name for choice in problem.choices if choice.name != NORM]
    for name, remark in said.items():
        own = [term.name for term in problem.terms if name in term.of]
        assert remark.seconds == pytest.approx(sum(terms[each] for each in own))
        alike = held.options.alike(name, answer.picks[name])
        other = held.phase.search(held.limit).best(without={name: alike})
        assert remark.more == pytest.approx(other.seconds / answer.seconds - 1)
        assert remark.other.picks[name] not in alike


@pytest.mark.slow
@pytest.mark.parametrize("share", [1e3, 0.3])
def test_near_an_answer_are_the_cheapest_with_each_tensor_sharded_otherwise(share):
    held = candidate(mesh=(("x", 2), ("y", 2)), phase="prefill")
    limit = held.least.bytes + share * (held.free.bytes - held.least.bytes)
    held = Candidate(held.phase, limit)
    most, exact = 1e6 * held.solve().seconds, held.phase.search(held.limit)
    found, wanted = [*nearby(held, most)], set()
    for name, options in held.options.texts.items():
        costs = []
        for kind in () if in_ends(name) else held.options.kinds(name):
            assert sorted(held.options.alike(name, kind[0])) == kind
            try:
                costs.append(exact.best(without={name: {*range(len(options))} - {*kind}}).seconds)
            except NothingFits:
                continue
        wanted |= {round(each * 1e15) for each in sorted(costs)[:KINDS] if each <= most}
    seconds = {round(answer.seconds * 1e15) for _, answer in found}
    assert seconds <= {round(each * 1e15) for each in map(held.unlimited.cost, (answer.picks for _, answer in found))}
    assert all(answer.seconds <= most and answer.bytes <= limit for _, answer in found)
    assert len({(answer.seconds, answer.bytes) for _, answer in found}) == len(found) >= 5
    # Without a limit bounds are reached, so none of the cheapest is missing, but for the answer itself.
    assert share < 1 or wanted <= seconds | {round(held.solve().seconds * 1e15)}


PARALLEL = replace(PLAIN, block="parallel", kv_heads=1)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "phase"), [(GATED, "train"), (PARALLEL, "decode"), (ROUTED, "train")])
def test_a_layout_is_improved_by_one_line_at_a_time(config, phase):
    """Every line that makes the layout cheaper, with all others kept, is improved as far as its options allow."""
    held = candidate(config, (("x", 4),), phase=phase)
    for placed in placed_presets([held])[-3:]:
        if not placed.answer:
            continue
        picks = placed.answer.picks
        found = dict(improved(held, picks))
        written = {name for name, texts in held.options.texts.items() if any(texts)}
        for name in written:
            every = []
            for option in range(len(held.phase.choices[name])):
                fixed = {other: {*range(len(held.phase.choices[other]))} - {picks[other]} for other in written - {name}}
                fixed[name] = {*range(len(held.phase.choices[name]))} - {option}
                with suppress(NothingFits):
                    every.append(held.phase.search(held.limit).best(without=fixed).seconds)
            gains = min(every) < with_picks(held, picks).seconds * (1 - NEAR)
            assert gains == (name in found)
            if gains:
                assert found[name].seconds == pytest.approx(min(every), rel=1e-9)
                assert all(found[name].picks[other] == picks[other] for other in written - {name})


@pytest.mark.slow
def test_what_is_said_where_there_is_no_next_best():
    """On one device nothing can be otherwise; at the least memory something can, and does not fit."""
    alone = candidate(mesh=(("x", 1),))
    assert {str(each).partition("; ")[2] for _, each in remarks(alone, alone.solve())} == {"the only option"}
    least = Candidate(candidate().phase, candidate().least.bytes)
    said = {str(each).partition("; ")[2] for _, each in remarks(least, least.solve())}
    assert "nothing else fits" in said
    assert "the only option" not in said


@pytest.mark.parametrize(
    ("more", "text"), [(75.25, "+7,500%"), (0.996, "+100%"), (0.0149, "+1.5%"), (-4.7e-4, "-0.047%")]
)
def test_how_much_dearer_is_written_without_exponents(more, text):
    assert str(LineCost(0.5, "EF_x", more)) == f"500 ms; next EF_x: {text}"


@pytest.mark.turns(1)
@pytest.mark.parametrize(
    ("config", "phase"),
    [(GATED, "train"), (PARALLEL, "train"), (ROUTED, "train"), (GATED, "decode"), (PARALLEL, "decode"),
     (ROUTED, "prefill"), (SHARED, "train"), (SHARED, "decode")],
)  # fmt: skip
def test_what_an_option_writes_is_what_a_layout_with_it_has(config, phase):
    held = candidate(config, (("x", 2), ("y", 2)), phase=phase)
    first, search = dict.fromkeys(held.phase.choices, 0), held.unlimited_search
    assert list(held.options.texts) == list(first)
    for name, options in held.options.texts.items():
        assert len(options) == len(held.phase.choices[name])
        for number, texts in enumerate(options):
            picks = {**first, name: number}
            if phase != "train":  # where vias agree on the place of an operand, which is a choice of its own
                try:
                    picks = search.best(fixed={name: number}).picks
                except NothingFits:
                    continue
            lines = held.phase.lines(picks)
            wanted = {(line.section, line.key): line.text for line in lines if line.choice == name}
            # An optimizer's state is not written where it lies as its parameter does, which is another choice.
            alike = {where for where in texts if where[0] == "optimizer" and where not in wanted}
            assert {where: text for where, text in texts.items() if where not in alike} == wanted
            for (section, key), text in texts.items():
                specs = tuple(map(Spec.parse, text.split(", ")))
                assert number in held.options.having(name, section, key, specs)


def test_options_that_differ_in_the_names_of_axes_alone_are_alike():
    def same(mesh, spec):
        options = candidate(mesh=mesh).options
        specs = [texts["", "ffn.hidden"] for texts in options.texts["ffn.hidden"]]
        return {specs[number] for number in options.alike("ffn.hidden", specs.index(spec))}

    square = (("x", 4), ("y", 4))
    assert same(square, "B_xLF_y") == {"B_xLF_y", "B_yLF_x"}
    assert same(square, "BLF_xy") == {"BLF_xy", "BLF_yx"}
    assert same((("x", 4), ("y", 2)), "B_xLF_y") == {"B_xLF_y"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "share", "steps"),
    [
        (GATED, 0.35, 3),
        *(pytest.param(GATED, share, 50, marks=pytest.mark.slow) for share in (1.0, 0.5, 0.3)),
        *(pytest.param(SHARED, share, 50, marks=pytest.mark.slow) for share in (1.0, 0.5)),
    ],
)
def test_a_found_layout_trains_as_one_device_does(config, share, steps, tmp_path):
    config = replace(config, remat="full")
    held = candidate(config)
    answer = held.phase.search(share * held.free.bytes).best()
    layout = loaded(written(held, answer), tmp_path)
    found, wanted = (losses(config, each, mesh, steps) for each, mesh in (
        (layout, held.phase.case.mesh), (Layout.load("replicated"), {"x": 1, "y": 1, "z": 1})))  # fmt: skip
    assert wanted[-1] < wanted[0] - 0.05
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def losses(config, layout, sizes, steps):
    devices = jax.devices()[: prod(sizes.values())]
    types = (jax.sharding.AxisType.Explicit,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)
    tokens = (np.cumsum(np.random.default_rng(0).choice([1, 5], size=(BATCH, LENGTH + 1)), axis=1) % 64).astype("int32")
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        model = models.build(config, layout, mesh, jax.random.key(0))
        optimizer = OptimizerConfig(learning_rate=1e-2)
        state = step.initial_state(model, optimizer, 50, mesh)
        placed = jax.NamedSharding(mesh, models.batch_spec(layout).partition_spec())
        batch = jax.device_put(tokens, placed)
        update, found = jit_step(step.training_step(model, optimizer, 50), state), []
        for _ in range(steps):
            state, figures = update(state, batch, jax.random.key(1))
            found.append(float(figures["loss"]))
    return np.array(found)


# -- presets -----------------------------------------------------------------------------------------------------------


@pytest.mark.turns(1)
@pytest.mark.parametrize(
    ("config", "phase"),
    [(GATED, "train"), (PLAIN, "train"), (GATED, "prefill"), (PLAIN, "decode"), (SHARED, "train"), (SHARED, "decode")],
)
def test_a_layout_of_the_space_is_found_there_again(config, phase, tmp_path):
    held = candidate(config, phase=phase)
    search = held.unlimited_search
    for answer in some_answers(held, 12, seed=1):
        again = picks_of(held, search, loaded(written(held, answer), tmp_path))
        assert again.seconds == pytest.approx(answer.seconds, rel=1e-12)
        assert again.bytes == answer.bytes
        assert written(held, again) == written(held, answer)


def test_no_preset_is_better_than_what_was_found():
    finding = find(spaces(), CHIP.hbm_bytes)
    priced = [each for each in placed_presets(finding.candidates) if each.answer]
    named = {"zero-1", "zero-2", "zero-3", "megatron-1d", "data-parallel", "replicated"}
    assert named | {"weight-stationary-1d", "weight-stationary-2d", "weight-gathered-xyz"} <= {
        each.name for each in priced
    }
    for each in priced:
        assert each.answer.seconds >= finding.answer.seconds


@pytest.mark.parametrize(("phase", "lowering"), [("train", "blocking"), ("prefill", "auto"), ("decode", "blocking")])
def test_the_file_asks_for_the_lowering_that_suits_the_phase(tmp_path, phase, lowering):
    of = candidate(phase=phase)
    assert loaded(written(of, of.solve()), tmp_path).lowering == lowering
    given = document(of, of.solve(), ["a header"], {}, "looped")
    assert loaded(given, tmp_path).lowering == "looped"


@pytest.mark.parametrize("phase", ["train", "decode"])
def test_on_one_device_all_presets_are_one_layout(phase):
    held = candidate(mesh=(("x", 1),), phase=phase)
    found = placed_presets([held])
    usable = [each for each in found if each.usable]
    assert len(usable) > 12
    assert {each.answer.seconds for each in usable} == {held.free.seconds}


@pytest.mark.slow
def test_with_microbatches_all_presets_are_priced():
    """Also `replicated`, whose gradients have no partial sums to add up."""
    phase = problem_of(Workload(GATED, CHIP, 2 * BATCH, LENGTH, microbatches=2), {"x": 4, "y": 2})
    found = [each for each in placed_presets([Candidate(phase, CHIP.hbm_bytes)]) if each.usable]
    assert [each.name for each in found if not each.answer] == []
    assert "replicated" in [each.name for each in found]


def test_a_preset_takes_the_order_of_axes_that_is_best_for_it():
    held = candidate()
    placed = next(each for each in placed_presets([held]) if each.name == "megatron-1d")
    layout, costs = Layout.load("megatron-1d"), []
    for names in itertools.permutations(layout.axes, 2):
        own = dict.fromkeys(layout.axes, 1) | dict(zip(names, held.phase.case.mesh.values()))
        try:
            layout.check(GATED.sizes(BATCH, LENGTH), own)
        except LayoutError:
            continue
        costs.append(picks_of(held, held.unlimited_search, layout, dict(zip(names, held.phase.case.mesh))).seconds)
    assert placed.answer.seconds == min(costs) < max(costs)


def test_on_several_nodes_a_preset_shows_its_axes_in_the_order_of_its_price():
    """`--mesh` with the shown sizes fills nodes in this order, and has to cost what the table says."""
    two_nodes = replace(CHIPS["h100"], node_devices=2)
    phase = problem_of(Workload(GATED, two_nodes, BATCH, LENGTH), {"x": 2, "y": 2})
    held = Candidate(phase, two_nodes.hbm_bytes)
    shown = {each.name: each for each in placed_presets([held]) if each.answer}
    assert any([*each.mesh] != sorted(each.mesh) for each in shown.values())
    for name, placed in shown.items():
        axes = [axis for axis, size in placed.mesh.items() if size > 1]
        layout = Layout.load(name).resolved(GATED.sizes(BATCH, LENGTH), placed.mesh)
        again = picks_of(held, held.unlimited_search, layout, dict(zip(axes, held.phase.case.mesh)))
        assert again.seconds == placed.answer.seconds


def test_stages_and_what_else_is_not_searched_is_no_preset_of_the_space():
    held = candidate()
    with pytest.raises(LayoutError, match=r"pipeline\.layers = 'N_p' is not in the space"):
        picks_of(held, held.unlimited_search, Layout.load("pipeline"), {"p": "x", "x": "y"})
    odd = Layout.load("zero-3").override({"attention.w_q": "EHD_x"}).resolved({}, {"x": 4, "y": 2, "z": 1})
    with pytest.raises(LayoutError, match=r"attention\.w_q = 'EHD_x' is not in the space"):
        picks_of(held, held.unlimited_search, odd, {"x": "x", "y": "y"})


# -- why not -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "config"),
    [*((key, text, GATED) for key, text in [
        ("ffn.w_in", "E_xF_y"), ("ffn.w_in", "E_{x} F_{y}"), ("attention.key", "B_xLKD"),
        ("optimizer.ffn.w_out", "F_xyE"), ("ffn.in_via", "B_xLE, EF_y"), ("ffn.residual", "B_xL_yE"),
        ("attention.key_via", "B_xyLE, EKD")]),
     *((key, text, SHARED) for key, text in [
        ("moe.shared_in", "E_xF_y"), ("optimizer.moe.shared_out", "F_xyE"), ("moe.shared_in_via", "B_xLE, EF_y")])],
)  # fmt: skip
def test_another_line_costs_what_the_search_with_it_given_says(key, text, config):
    held = candidate(config)
    asked = why(held, key, text)
    wanted = tuple(map(Spec.parse, text.split(", ")))
    section, _, name = key.partition(".") if key.startswith("optimizer") else ("", "", key)
    lines = held.phase.lines(asked.answer.picks)
    written = {(line.section, line.key): line.text for line in lines}
    text_there = written.get((section, name), written.get(("", name)))
    assert tuple(map(Spec.parse, text_there.split(", "))) == wanted
    seconds = sum(theirs - ours for _, ours, theirs in asked.terms)
    assert asked.answer.seconds - asked.best.seconds == pytest.approx(seconds, abs=1e-12)
    # no option with this text is cheaper
    choice = held.options.choices[section, name]
    for number, texts in enumerate(held.options.texts[choice]):
        there = texts.get((section, name), texts.get(("", name)))
        if there and tuple(map(Spec.parse, there.split(", "))) == wanted:
            try:
                alone = held.phase.search(held.limit).best(fixed={choice: number})
            except NothingFits:
                continue
            assert alone.seconds >= asked.answer.seconds * (1 - 1e-12)
    changed = {line for line, *_ in asked.lines}
    ours = {(line.section, line.key): line.text for line in held.phase.lines(asked.best.picks)}
    assert changed == {
        ".".join(filter(None, each)) for each in {*ours, *written} if ours.get(each) != written.get(each)
    }


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [("ffn.w_inn", "EF_x", "no line of the search is called 'ffn.w_inn'.\n  The nearest are 'ffn.w_in', "),
     ("ffn.w_onn", "EF_x",
      "no line of the search is called 'ffn.w_onn'.\n  The nearest are 'ffn.w_in', 'ffn.w_out' and "),
     ("ffn.w_in", "EF_q", "ffn.w_in cannot be 'EF_q': the mesh has no axis q.\n  The options are '"),
     ("ffn.w_in", "E_qF_r", "ffn.w_in cannot be 'E_qF_r': the mesh has no axis q; the mesh has no axis r.\n  The"),
     ("ffn.in_via", "BEL, EF_q", "ffn.in_via cannot be 'BEL, EF_q': 'BEL' has dimensions BEL, but needs BLE; the mesh"),
     ("ffn.w_in", "E_xF_x", "cannot read ffn.w_in = 'E_xF_x': "),
     ("ffn.w_in", "F_xE", "ffn.w_in cannot be 'F_xE': 'F_xE' has dimensions FE, but needs EF.\n  The options are "),
     ("attention.key", "BLK_xyD", "attention.key cannot be 'BLK_xyD': dimension K has size 4, which "),
     ("ffn.in_via", "BLE", "ffn.in_via cannot be 'BLE': it has 1 spec, but needs 2.\n  The options are 'B"),
     ("attention.query", "BLHD_x", "attention.query cannot be 'BLHD_x': it does not fit ")],
)  # fmt: skip
def test_what_is_no_option_is_one_message(key, text, said):
    with pytest.raises(LayoutError) as error:
        why(candidate(), key, text)
    assert str(error.value).startswith(said)


@pytest.mark.slow
def test_what_does_not_fit_is_priced_without_the_limit():
    held = candidate(limit=0.3 * candidate().free.bytes)
    asked = why(held, "ffn.w_in", "EF")
    smallest = held.phase.search(-1.0)
    with pytest.raises(NothingFits) as none:
        smallest.best(without={"ffn.w_in": [n for n, each in enumerate(held.options.texts["ffn.w_in"])
                                            if each["", "ffn.w_in"] != "EF"]})  # fmt: skip
    assert asked.over == pytest.approx(max(0.0, none.value.nearest.bytes - held.limit))


# -- seconds against bytes ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_front_falls_and_nothing_is_below_it():
    held = candidate()
    points = frontier(held, searches=4)
    assert 3 < len(points) <= 6
    assert all(after.answer.seconds < before.answer.seconds for before, after in itertools.pairwise(points))
    assert points[0].answer.bytes == held.least.bytes
    assert points[-1].answer == held.free
    for before, after in itertools.pairwise(points):
        assert before.answer.bytes <= before.limit < after.answer.bytes
        assert before.answer.seconds > after.answer.seconds
    for point in points[:-1]:
        for limit in (point.answer.bytes, point.limit):
            exact = held.phase.search(limit).best().seconds  # the front tells apart what differs by the tolerance
            assert point.answer.seconds * (1 - TOLERANCE) <= exact <= point.answer.seconds * (1 + 1e-9)
    for answer in some_answers(held, 10, seed=2):
        fits = [point for point in points if point.answer.bytes <= answer.bytes <= point.limit]
        assert all(answer.seconds >= point.answer.seconds * (1 - TOLERANCE) for point in fits)


@pytest.mark.slow
def test_the_answer_is_a_point_of_the_front():
    of = Candidate(candidate().phase, (candidate().least.bytes + candidate().free.bytes) / 2)
    answer = of.solve()
    assert answer not in (of.least, of.free)
    points = frontier(of, 2)
    assert answer in [point.answer for point in points]
    for before, after in itertools.pairwise(points):
        assert before.answer.bytes < after.answer.bytes
        assert before.answer.seconds > after.answer.seconds


@pytest.mark.parametrize("seed", range(10))
def test_every_point_is_the_cheapest_up_to_its_limit(seed):
    phase, every = random_phase(np.random.default_rng(seed), "x")
    points = frontier(Candidate(phase, 1e9), searches=seed % 7)
    for point in points:
        assert point.answer.seconds == min(seconds for seconds, held in every if held <= point.answer.bytes)
        assert point.answer.seconds == min(seconds for seconds, held in every if held <= point.limit)
    assert points[0].answer.bytes == min(held for _, held in every)
    assert points[-1].answer.seconds == min(seconds for seconds, _ in every)


def test_what_a_line_costs_does_not_depend_on_what_was_asked_before():
    held = candidate()
    held.solve()
    line = next(line for line in held.phase.lines(held.solve().picks) if line.key == "ffn.hidden")
    first = why(held, "ffn.hidden", line.text)
    held.budget.left = 0
    assert why(held, "ffn.hidden", line.text).answer == first.answer
