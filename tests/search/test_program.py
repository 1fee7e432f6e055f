"""Programs traced once with unknown lines: what they cost at random placements, against the trace of each."""

import random
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

import gspmd
import gspmd_models as models
from gspmd.hardware.chips import chip
from gspmd.lowerings.in_force import planned_for
from gspmd.moe import MoEConfig
from gspmd.ops import Buckets, argmax, attention, cached_attention, sample, softmax, write_cache
from gspmd.planner.graph.resharding import move
from gspmd.planner.unknown import UnknownMove, UnknownReduction, placed
from gspmd.search.lines import Lines, choices_of
from gspmd.search.pricing import Prices
from gspmd.search.program import read
from gspmd.training import OptimizerConfig
from gspmd_models import step
from gspmd_models.config import LatentConfig
from gspmd_models.finetuning.config import LoraConfig

BATCH, LENGTH = 8, 16
FLAT, CUBE = {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2}
TINY = {
    "layers": 2, "embed": 64, "heads": 8, "kv_heads": 4, "head_size": 16, "feed_forward": 128, "vocabulary": 256,
    "tied": False,
}  # fmt: skip
DROPLESS = MoEConfig(experts=8, router="top-k", dispatch="dropless")
MODELS = {
    "plain": {},
    "tied": {"tied": True},
    "biases": {"qkv_bias": True, "out_bias": True, "ffn_bias": True, "output_bias": True},
    "layer norms": {"norm": "layer", "norm_bias": True, "activation": "gelu"},
    "norms of heads": {"qk_norm": True, "scale_embedding": True},
    "nothing computed again": {"remat": "none"},
    "products kept": {"remat": "dots"},
    "adapters": {"lora": LoraConfig(4, 8.0, ("attention.w_q", "ffn.w_out"))},
    "parallel": {"block": "parallel"},
    "parallel, two norms": {"block": "parallel", "parallel_norms": 2, "norm": "layer", "norm_bias": True},
    "parallel, biases": {"block": "parallel", "qkv_bias": True, "out_bias": True, "ffn_bias": True, "remat": "none"},
    "parallel, plain activation": {"block": "parallel", "activation": "gelu", "norm": "layer", "remat": "dots"},
    "parallel, adapters": {"block": "parallel", "lora": LoraConfig(4, 8.0, ("attention.w_q", "ffn.w_out"))},
    "parallel, experts": {"block": "parallel", "moe": MoEConfig(experts=4, router="switch")},
    "latent": {"kv_heads": 8, "latent": LatentConfig(rank=32, query_rank=48, rotary=8, values=24)},
    "latent, no latent of queries": {
        "kv_heads": 8,
        "latent": LatentConfig(rank=24, rotary=4, values=16),
        "remat": "dots",
    },
    "sliding layers": {"layer_kinds": ("sliding", "full"), "sliding_window": 6, "local_rope_base": 100.0},
    "chunked layers": {
        "layer_kinds": ("chunked", "unrotated"),
        "attention_chunk": 6,
        "qk_norm": "rotated",
        "query_growth": 0.5,
    },
    "norms after": {"norms": "after", "qk_norm": "all", "remat": "none"},
    "soft caps and sinks": {"score_softcap": 5.0, "logit_softcap": 9.0, "sinks": True, "norms": "both"},
    "learned positions": {"positions": "learned", "context_length": 32},
    "alibi": {"positions": "alibi", "embedding_norm": True, "norm": "layer", "norm_bias": True, "qkv_clip": 1.0},
    "switch": {"moe": MoEConfig(experts=4, router="switch")},
    "two experts": {"moe": MoEConfig(experts=4, router="gshard"), "remat": "dots"},
    "noisy router": {"moe": MoEConfig(experts=4, router="noisy-top-k"), "activation": "gelu", "remat": "none"},
    "experts that choose": {"moe": MoEConfig(experts=4, router="expert-choice"), "remat": "selective"},
    "larger groups": {"moe": MoEConfig(experts=8, router="st-moe", groups=4)},
    "shared experts": {"moe": MoEConfig(experts=4, router="top-k", shared=1)},
    "experts in every other layer": {"moe": MoEConfig(experts=4, router="top-k", every=2), "layers": 4},
    "a first layer without experts": {"moe": replace(DROPLESS, every=1, dense_layers=(0,)), "layers": 3},
    "dropless": {"moe": MoEConfig(experts=4, router="top-k", dispatch="dropless")},
    "experts with biases": {"moe": MoEConfig(experts=4, router="gshard", shared=1), "ffn_bias": True},
    "dropless with biases": {"moe": DROPLESS, "ffn_bias": True},
    "dropless, products kept": {"moe": DROPLESS, "remat": "dots"},
    "dropless and shared": {"moe": replace(DROPLESS, shared=1), "activation": "gelu", "remat": "selective"},
    "dropless, parallel": {"moe": DROPLESS, "block": "parallel", "remat": "none"},
}
SLOW = {"experts with biases", "dropless, products kept", "dropless and shared", "dropless, parallel",
        "adapters", "parallel, adapters", "parallel, experts", "shared experts", "experts in every other layer",
        "biases", "norms of heads", "products kept", "parallel, biases", "noisy router", "larger groups",
        "parallel, two norms", "latent", "latent, no latent of queries", "soft caps and sinks", "learned positions",
        "norms after", "a first layer without experts"}  # fmt: skip


def trained(config, microbatches=1):
    """Return how a training step of a model is built."""
    optimizer = OptimizerConfig()

    def build(layout, mesh):
        model = models.abstract(config, layout, mesh, "bfloat16", stored="float32")
        state = step.abstract_state(model, optimizer, 10, mesh, parameter_dtype="float32")
        arguments = state, models.abstract_batch(layout, mesh, BATCH, LENGTH), models.abstract_key(mesh)
        return step.training_step(model, optimizer, 10, microbatches, parameter_dtype="float32"), *arguments

    return build


def is_norm(what):
    """Whether a step is the sum of one number over all lines, which no table can have."""
    return isinstance(what, UnknownMove) and not what.before[0].dims


class Program:
    """A program with unknown lines, and its tables on one mesh."""

    def __init__(self, build, layout, mesh, whole=(), on="tpu-v4", settled=False):
        self.build, self.layout, self.mesh, self.settled = build, layout, mesh, settled
        self.lines = Lines.of(layout, {})
        self.lines.whole = {name: {*dims, *whole} for name, dims in self.lines.whole.items()}
        program = read(build, self.lines)
        self.uses = program.uses
        self.choices = choices_of(self.lines, program.sizes, mesh)
        self.prices = Prices(self.choices, mesh, chip(on))
        self.norms = [use for use in program.uses if is_norm(use.what)]
        priced = self.prices.tables(use for use in program.uses if use not in self.norms)
        self.tables = [*priced, *self.prices.ties]

    def draw(self, rng):
        """Draw an option of each choice such that all tables are finite."""
        picks = [rng.randrange(len(choice.rows)) for choice in self.choices]
        for _ in range(1000):
            wrong = [of for of, table in self.tables if not np.isfinite(table[tuple(picks[n] for n in of)])]
            if not wrong:
                return picks
            number = rng.choice(rng.choice(wrong))
            fits = sum(  # in how many tables, by option
                np.isfinite(table[tuple(slice(None) if n == number else picks[n] for n in of)])
                for of, table in self.tables
                if number in of
            )
            picks[number] = rng.choice(np.flatnonzero(fits == fits.max()).tolist())
        raise AssertionError("no placement is allowed")

    def priced(self, picks):
        """Return the seconds of the tables, and for the norm of all gradients those of its one step."""
        known = self.prices.known(picks)
        summed = [(use.times, *placed((use.what.before[0], use.what.after), known)) for use in self.norms]
        norms = sum(
            times * step.seconds
            for times, before, after in summed
            for step in move(before, after, {}, self.mesh, 4, self.prices.chip)
        )
        return norms + sum(table[tuple(picks[number] for number in of)] for of, table in self.tables)

    def traced(self, picks):
        """Return the seconds of the program's trace in this layout."""
        layout = self.layout.override(self.lines.written(self.prices.known(picks), settled=self.settled))
        layout = replace(layout, axes=tuple(self.mesh), factor=())
        explicit = (AxisType.Explicit,) * len(self.mesh)
        mesh = AbstractMesh(tuple(self.mesh.values()), tuple(self.mesh), axis_types=explicit)
        with jax.sharding.use_abstract_mesh(mesh), gspmd.lowering("blocking"), planned_for(self.prices.chip):
            function, *arguments = self.build(layout, mesh)
            return gspmd.trace(function, *arguments).seconds

    def check(self, draws, seed=1, gathers_twice=False):
        """Check that both agree, but for what steps are rounded up by, a picosecond each.

        `gathers_twice` allows for gathers that the gradients of keys and values of one latent share, and that the
        search counts for each of them (docs/search-figures.md).
        """
        rng = random.Random(seed)
        for _ in range(draws):
            picks = self.draw(rng)
            priced, traced = self.priced(picks), self.traced(picks)
            if gathers_twice and priced > traced:
                assert priced <= 1.02 * traced
            else:
                assert priced == pytest.approx(traced, rel=1e-6, abs=3e-11)


def of_model(name, mesh=FLAT, microbatches=1, on="tpu-v4"):
    config = models.ModelConfig(**(TINY | MODELS[name]))
    layout = gspmd.Layout.load("gshard" if config.moe else "replicated")
    return Program(trained(config, microbatches), layout, mesh, on=on, settled=microbatches > 1)


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MODELS])
def test_a_training_step(name):
    of_model(name).check(2, gathers_twice="latent" in MODELS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_in_many_layouts(name):
    of_model(name).check(20, seed=2, gathers_twice="latent" in MODELS[name])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "microbatches"), [("plain", 2), ("tied", 1), ("tied", 2), ("switch", 1)])
def test_a_training_step_on_gpus(name, microbatches):
    """Sums of gradients are reduced once: those of a tied embedding, and those of all microbatches."""
    of_model(name, microbatches=microbatches, on="h100").check(3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "tied", "parallel", "switch", "dropless"])
def test_a_training_step_on_three_axes(name):
    of_model(name, CUBE).check(5)


def test_outputs_that_are_added_are_made_alike():
    """A plan searches the gradient of others, which no table says."""
    lines = of_model("parallel").lines
    one, other = ({dim: lines.unknown(f"{part}.out_via", dim) for dim in "BLEHF"} for part in ("attention", "ffn"))
    assert {dim for dim in one if one[dim] == other[dim]} == {*"BLE"}


SERVED = """
[mesh]
axes = ["x"]
[served]
query = "BLHD"
key = "BLKD"
cache = "BKTD"
logits = "BLV"
"""


def served(layout, mesh):
    """A step of decoding: attention to a cache, what it then has, and a token."""
    spec, sizes = layout.section("served").spec, {"B": 8, "L": 4, "H": 8, "K": 4, "D": 16, "T": 32, "V": 64}

    def array(spec, dtype="bfloat16", *layers):
        spec = gspmd.Spec.parse(spec)
        shape = (*layers, *(sizes[dim] for dim in spec.dims))
        parts = jax.P(*(None for _ in layers), *spec.partition_spec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, parts))

    query, key, cache, logits = (str(spec(name)) for name in ("query", "key", "cache", "logits"))
    rows = array("B", "int32")

    def step(q, k, held, stacked, new, scores, lengths):
        answers = cached_attention(q, k, k, held, held, query, key, cache, lengths=lengths)
        written = write_cache(stacked, new, cache, key, lengths=lengths)
        tokens = sample(scores, logits, "V", seeds=lengths, positions=lengths, top_k=5, top_p=0.5)
        return answers, written, tokens, argmax(scores, logits, "V"), softmax(scores, logits, "V")

    arguments = array(query), array(key), array(cache), array(cache, "bfloat16", 2), array(key, "bfloat16", 2)
    return step, *arguments, array(logits, "float32"), rows


@pytest.mark.parametrize("mesh", [FLAT, pytest.param(CUBE, marks=pytest.mark.slow)])
def test_a_step_of_decoding(tmp_path, mesh):
    path = tmp_path / "served.toml"
    path.write_text(SERVED)
    Program(served, gspmd.Layout.load(path), mesh, whole="D").check(5)


BIASED = """
[mesh]
axes = ["x"]
[biased]
query = "BLHD"
key = "BTKD"
new = "BLKD"
cache = "BKTD"
bias = "RH"
"""


def biased(layout, mesh):
    """Attention with segments and a relative position bias, and its gradients; and to caches, with and without it."""
    section, sizes = layout.section("biased"), {"B": 8, "L": 16, "T": 16, "H": 8, "K": 4, "D": 16, "R": 8}
    query, key, new, cache, bias = (section.spec(name) for name in ("query", "key", "new", "cache", "bias"))
    more = {"bias_spec": bias, "buckets": Buckets(8, 16)}

    def array(spec, dtype="float32", dims=4):
        spec = gspmd.Spec(spec.dims[:dims], spec.axes[:dims])
        sharding = NamedSharding(mesh, spec.partition_spec())
        return jax.ShapeDtypeStruct(tuple(sizes[dim] for dim in spec.dims), dtype, sharding=sharding)

    def step(g, q, k, new_k, held, table, of_queries, of_keys, lengths):
        pair = of_queries, of_keys
        attend = lambda q, k, table: attention(q, k, k, query, key, segments=pair, bias=table, **more)  # noqa: E731
        y, pull = jax.vjp(attend, q, k, table)
        specs = query, new, cache
        own = cached_attention(q, new_k, new_k, held, held, *specs, lengths=lengths, bias=table, **more)
        other = cached_attention(q, None, None, held, held, *specs, lengths=lengths)
        return y, pull(g), own, other

    tokens = array(query, "int32", 2), array(key, "int32", 2)
    lengths = array(gspmd.Spec(("B",), ((),)), "int32")
    return step, array(query), array(query), array(key), array(new), array(cache), array(bias), *tokens, lengths


def test_attention_with_a_bias(tmp_path):
    path = tmp_path / "biased.toml"
    path.write_text(BIASED)
    Program(biased, gspmd.Layout.load(path), FLAT, whole="D").check(3)


OWN = """
[mesh]
axes = ["x"]
[mine]
x = "BE"
y = "BE"
z = "BE"
w = "EF"
outer = "BEF"
at_via = "BE, EF"
"""


def abstract(section, mesh, name, *shape):
    """An array of this shape, sharded as a line of a section says."""
    sharding = NamedSharding(mesh, gspmd.Spec.parse(section.spec(name)).partition_spec())
    return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)


def of_one_tensor(layout, mesh):
    """One tensor that goes to two places, and a product without a sum; with gradients."""
    mine = layout.section("mine")
    array = partial(abstract, mine, mesh)

    def results(x, w):
        y, z = mine.move("x -> y", x), mine.move("x -> z", x)
        return y, z, mine.einsum("x, w -> outer", x, w, via="at_via")

    def step(x, w, cotangents):
        found, pull = jax.vjp(results, x, w)
        return found, pull(cotangents)

    x, w = array("x", 16, 8), array("w", 8, 32)
    return step, x, w, (array("y", 16, 8), array("z", 16, 8), array("outer", 16, 8, 32))


@pytest.mark.slow
def test_first_steps_in_common(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    Program(of_one_tensor, gspmd.Layout.load(path), CUBE).check(40)


SUMMED = """
[mesh]
axes = ["x"]
[mine]
x = "BE"
w = "EF"
y = "BF"
at_via = "BE, EF"
"""


def of_sums(layout, mesh):
    """A weight that is used twice, with its gradient, and a loop that adds such gradients up."""
    mine = layout.section("mine")
    array = partial(abstract, mine, mesh)

    def gradient(x, w, y):
        product = lambda w, by: mine.einsum("x, w -> y", x * by, w, via="at_via")  # noqa: E731
        return jax.vjp(lambda w: product(w, 1) + product(w, 2), w)[1](y)[0]

    def step(x, w, y):
        trip = lambda total, by: (total + gradient(x * by, w, y), None)  # noqa: E731
        return gradient(x, w, y), jax.lax.scan(trip, w * 0, jax.numpy.ones(4))[0]

    return step, array("x", 16, 8), array("w", 8, 32), array("y", 16, 32)


@pytest.mark.parametrize("on", ["h100", "tpu-v4"])
def test_reductions_whose_results_are_only_added(tmp_path, on):
    """A GPU reduces the sum of both gradients, and that of the loop behind it; a TPU reduces each."""
    path = tmp_path / "sums.toml"
    path.write_text(SUMMED)
    program = Program(of_sums, gspmd.Layout.load(path), FLAT, on=on)
    program.check(10)
    saved = program.prices.tables(use for use in program.uses if isinstance(use.what, UnknownReduction))
    assert any((table < 0).any() for _, table in saved) == (on == "h100")


def test_what_cannot_be_marked_is_refused(monkeypatch):
    """A step that is planned on an unknown mesh would send nothing there."""
    from gspmd.ops import _bias

    real = _bias.move
    mesh = {"x": 2}
    monkeypatch.setattr(_bias, "move", lambda src, dst, sizes, _, *more: real(
        gspmd.Spec.parse("F_x"), gspmd.Spec.parse("F"), {"F": 4}, mesh, *more))  # fmt: skip
    with pytest.raises(gspmd.PlanError, match="cannot search the placement of 'bias"):
        of_model("biases")
