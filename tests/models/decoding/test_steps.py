"""Prefill and decode steps: the logits and the cache of one device at every position, whatever the layouts and chunks.

A case is one program: it reads prompts whole, reads them again in chunks, and goes on from there token by token.
"""

import functools
import itertools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.annotate import LayoutError
from gspmd.layouts import Layout
from gspmd.layouts.layout import presets
from gspmd.moe import MoEConfig
from gspmd_models.config import LatentConfig
from gspmd_models.decoding import abstract_cache, cache_spec, decode_step, for_serving, phases, prefill_step, served
from gspmd_models.parameters import pad, parameters
from tests.conftest import AXIS_TYPES
from tests.models import plain

READ = np.array([1, 3, 8, 5, 8, 2, 7, 4])
"""Tokens of each row that are read as its prompt; the next ones are decoded."""
ROWS, MOST, DECODED = len(READ), READ.max(), 16
ROOM = MOST + DECODED


@dataclass(frozen=True)
class Case:
    """A model, the layouts in which it reads and decodes, and how."""

    config: dict
    decode: str
    prefill: str | None = None
    chunk: int = 4
    lowering: str = "blocking"
    mesh: dict | None = None
    changes: dict | None = None
    axis_type: str = "explicit"

    def __str__(self) -> str:
        settings = ",".join(f"{name}={value}" for name, value in self.config.items() if name != "moe")
        moe = "moe," * ("moe" in self.config)
        return f"{moe}{settings}-{self.decode}-{self.prefill or 'same'}-{self.chunk}-{self.lowering}"


@dataclass(frozen=True)
class Texts:
    """Logits by row and position, and keys and values [N, B, T, K, D], of tokens [B, T] that are read in some way."""

    logits: dict[tuple[int, int], np.ndarray]
    keys: np.ndarray
    values: np.ndarray
    lengths: np.ndarray


def tokens_of(settings) -> np.ndarray:
    return np.random.default_rng(0).integers(0, settings.vocabulary, (ROWS, ROOM)).astype(np.int32)


@functools.cache
def one_device(settings):
    """The parameters by path, and a full pass on one device: logits [B, L, V], and keys and values [N, B, L, K, D].

    Of a dense model in plain JAX; of one with experts in our own, without keys and values.
    """
    layout = Layout.load("replicated")
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        model, tokens = models.build(settings, layout, mesh, jax.random.key(0)), tokens_of(settings)
        weights = {path: np.asarray(value) for path, value in models.arrays(model).items()}
        if settings.moe:
            return weights, np.asarray(jax.jit(lambda ids: model(ids)[0])(tokens)), None, None
        return weights, *map(np.asarray, jax.jit(functools.partial(plain.forward, settings))(weights, tokens))


def cache_of(settings, layout, mesh, int8=False):
    return abstract_cache(settings, layout, mesh, ROWS, ROOM, "float32", int8=int8)


def gathered(cache, layout, latent):
    """Keys and values [N, B, T, K, D], those of the layers' period after one another."""
    places = len(cache.keys)
    if len({each.shape for each in cache.keys}) > 1:  # some are rings
        yield from (None, None)
        return
    order = [0, *(1 + cache_spec(layout).dims.index(dim) for dim in "BTKD")]
    scales = [of and [np.asarray(each)[..., None] for each in of] for of in (cache.key_scales, cache.value_scales)]
    if latent is not None and scales[0]:  # a latent is key and value; the rotated key behind it has its own scales
        first = np.arange(latent.rank + latent.rotary) < latent.rank
        scales = [[np.where(first, *each) for each in zip(*scales)]] * 2
    for held, of in zip((cache.keys, cache.values or cache.keys), scales):
        whole = [np.asarray(each) for each in held]
        if of:
            whole = [each * each_scales for each, each_scales in zip(whole, of)]
        whole = [each.transpose(order) for each in whole]
        yield np.stack(whole, 1).reshape(-1, *whole[0].shape[1:]) if places > 1 else whole[0]


def layouts_of(case, settings, mesh):
    """The layouts for reading and for decoding; a layout that no alternative makes fit is an error here."""
    layout = Layout.load(case.decode).override(case.changes or {})
    sizes = [settings.sizes(ROWS, length) | {"T": ROOM} for length in (case.chunk, 1)]
    reading, writing = phases(layout, case.prefill and Layout.load(case.prefill), sizes=tuple(sizes), mesh=mesh)
    writing.one_position().check(sizes[1], mesh)
    return reading.check(sizes[0] | {"L": int(MOST)}, mesh).check(sizes[0], mesh), writing


def read_and_decode(case, settings, mesh, *, int8=False):
    """The prompts read whole, and read in chunks with 16 tokens decoded after them, as two `Texts`; and the cache."""
    reading, writing = layouts_of(case, settings, mesh)
    model, tokens = models.abstract(settings, writing, mesh), tokens_of(settings)
    starts = np.arange(0, MOST, case.chunk)
    counts = np.clip(READ - starts[:, None], 0, case.chunk).astype(np.int32)
    padded = np.pad(tokens, ((0, 0), (0, case.chunk)), constant_values=1)
    follow = np.stack([tokens[np.arange(ROWS), READ + step] for step in range(DECODED)])

    def run(weights, prompts, chunks, counts, follow, empty):
        def read(cache, chunk):
            return prefill(weights, *chunk, cache)[::-1]

        def add(cache, ids):
            return decode(weights, ids, cache)[::-1]

        whole = first(weights, prompts, counts.sum(0), empty)
        # One after the other: host devices that have independent collectives at once can block one another for good.
        counts = jnp.where(jnp.isnan(whole[0]).any(), 0, counts)
        cache, of_chunks = jax.lax.scan(read, empty, (chunks, counts))
        cache, decoded = jax.lax.scan(add, cache, follow)
        return whole, (of_chunks, decoded, cache)

    def put(value, axes=()):
        return jax.device_put(value, jax.NamedSharding(mesh, jax.P(*axes)))

    with jax.set_mesh(mesh), gspmd.lowering(case.lowering):
        first, prefill = (prefill_step(served(model, reading), fresh=fresh) for fresh in (True, False))
        decode = decode_step(model)
        rows, values = parameters(settings, writing), one_device(settings)[0]
        weights = {
            path: put(np.asarray(pad(value, rows[path].padding)), rows[path].spec.partition_spec())
            for path, value in values.items()
        }
        where = reading.spec("embedding.tokens").partition_spec()
        chunks = put(np.stack([padded[:, at : at + case.chunk] for at in starts]), (None, *where))
        empty = jax.tree.map(
            lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
            cache_of(settings, writing, mesh, int8),
        )
        whole, (of_chunks, decoded, cache) = jax.jit(run)(
            weights, put(padded[:, :MOST], where), chunks, put(counts), put(follow), empty
        )
    of_chunks, decoded = np.asarray(of_chunks), np.asarray(decoded)
    last = {(row, READ[row] - 1): of_row for row, of_row in enumerate(np.asarray(whole[0]))}
    found = {
        (row, starts[at] + counts[at, row] - 1): of_chunks[at, row]
        for at, row in np.ndindex(*counts.shape)
        if counts[at, row]
    } | {(row, READ[row] + step): decoded[step, row] for step, row in np.ndindex(DECODED, ROWS)}
    texts = [
        Texts(logits, *gathered(held, writing, settings.latent), np.asarray(held.lengths))
        for logits, held in ((last, whole[1]), (found, cache))
    ]
    return *texts, cache


def near(got, wanted, tolerance, whole):
    """Assert that numbers are equal up to `tolerance` times themselves, or times the largest of their kind."""
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance * np.abs(whole).max())


def check(case, config, make_mesh, tolerance=1e-5, *, int8=False):
    """Assert that all logits, and a dense model's cache at every position that is read, are those of one device."""
    settings = for_serving(config(**case.config))
    mesh = make_mesh(case.mesh or Layout.load(case.decode).mesh_for(8), case.axis_type)
    _, logits, keys, values = one_device(settings)
    *both, cache = read_and_decode(case, settings, mesh, int8=int8)
    for texts, lengths in zip(both, (READ, READ + DECODED)):
        assert texts.lengths.tolist() == lengths.tolist()
        for at, got in texts.logits.items():
            near(got[: settings.vocabulary], logits[at], tolerance, logits)
            assert np.all(got[settings.vocabulary :] == -1e30)
        read = np.arange(ROOM)[None] < lengths[:, None]
        rings = settings.sliding_window is not None or settings.attention_chunk is not None
        compared = keys is not None and texts.keys is not None and not rings
        for got, wanted in ((texts.keys, keys), (texts.values, values)) if compared else ():
            near(got[:, read][..., : settings.kv_heads, :], wanted[:, read], tolerance, wanted)
    return both, cache


LATENT = LatentConfig(rank=6, query_rank=5, rotary=4, values=7)
HEADS = {"whole": 8, "grouped": 4, "multiquery": 1}
ATTENTION = {
    "heads": {"query": "BLH_xyzD", "key": ["BLK_xyzD", "BLK_xyD", "BLK_xD", "BLKD"]},
    "z": {"query": "B_zLH_xyD", "key": ["B_zLK_xyD", "B_zLK_xD", "B_zLKD"]},
    "yz": {"query": "B_yzLH_xD", "key": ["B_yzLK_xD", "B_yzLKD"]},
    "xyz": {"query": "B_xyzLHD", "key": ["B_xyzLKD"]},
    "length": {"query": "B_zLH_xyD", "key": ["B_zLK_xyD", "B_zLK_xD", "B_zLKD"], "cache": ["B_zT_xyKD"]},
    "mixed": {"query": "B_zLH_xyD", "key": ["B_zLKD"], "cache": ["B_xT_yK_zD", "B_xzT_yKD"]},
}
"""The specs of queries, keys and the cache; of several, the first one that divides is used."""
MESHES = {"8x1x1": {"x": 8, "y": 1, "z": 1}, "2x2x2": {"x": 2, "y": 2, "z": 2}, "4x2x1": {"x": 4, "y": 2, "z": 1}}
LOWERINGS = ("xla", "blocking", "looped")


def placed(name, first=False):
    """The changes to a layout that place attention so; only the `first` of several specs if asked."""
    at = ATTENTION[name]
    specs = {"attention.query": [at["query"]] * len(at["key"]), "attention.key": at["key"]}
    changes = {f"{phase}.{key}": spec for phase in ("prefill", "decode") for key, spec in specs.items()}
    if "cache" in at:
        changes["cache.attention.key"] = at["cache"]
    return {key: spec[0] for key, spec in changes.items()} if first else changes


def product():
    """Every layout of attention, block, kind of heads, mesh and lowering; axis types and other layouts take turns."""
    for number, (name, block, heads, mesh, lowering) in enumerate(
        itertools.product(ATTENTION, ("serial", "parallel"), HEADS, MESHES, LOWERINGS)
    ):
        base = ("weight-stationary-1d", "weight-stationary-2d")[number % 2]
        sizes = dict(zip("zxy" if name == "z" else "xyz", MESHES[mesh].values()))  # or B_z would be whole on 4x2x1
        case = Case(
            {"block": block, "kv_heads": HEADS[heads], "activation": "relu"}, base, chunk=3, changes=placed(name),
            lowering=lowering, mesh=sizes, axis_type=[*AXIS_TYPES][number // 2 % 2],
        )  # fmt: skip
        yield pytest.param(name, case, id=f"{name}-{block}-{heads}-{mesh}-{lowering}")


def check_placed(name, case, config, make_mesh):
    """Assert that the case holds, that the cache lies as the layout says, and that only alternatives admit too few
    heads.
    """
    settings, mesh = config(**case.config), make_mesh(case.mesh)
    sizes = settings.sizes(ROWS, 1) | {"T": ROOM}
    only = Layout.load(case.decode).override(placed(name, first=True)).phase("decode")
    chosen = layouts_of(case, settings, mesh)[1]
    if all(settings.kv_heads % math.prod(case.mesh[axis] for axis in spec.axes_of("K")) == 0 for spec in held(only)):
        assert held(only) == held(chosen)
    else:
        with pytest.raises(LayoutError, match=f"dimension K has size {settings.kv_heads}, which mesh ax.* not divide"):
            only.check(sizes, case.mesh)
    _, cache = check(case, config, make_mesh)
    spec = held(chosen)[1]
    local = spec.local_shape({dim: sizes[dim] for dim in spec.dims}, case.mesh)
    for array in (*cache.keys, *cache.values):
        assert {shard.data.shape[1:] for shard in array.addressable_shards} == {tuple(local)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), [*product()])
def test_attention_lies_in_any_way(name, case, config, make_mesh):
    check_placed(name, case, config, make_mesh)


def held(layout):
    """The specs of keys and of the cache."""
    return layout.spec("attention.key"), cache_spec(layout)


DIAGONAL = [
    Case(
        {"block": "parallel", "kv_heads": 1}, "weight-stationary-2d", "weight-gathered-xyz", chunk=3, lowering="looped"
    ),
    Case(
        {"heads": 6, "kv_heads": 3, "tied": False}, "megatron-1d", lowering="xla", mesh={"x": 2, "y": 4, "z": 1},
        changes={"padding.K": 4, "ffn.residual": "B_xL_yzE", "attention.residual": "B_xL_yzE"},
    ),
    Case({"kv_heads": 2}, "megatron-1d", chunk=3, mesh={"x": 2, "y": 2, "z": 2}),
    Case({"head_size": 16, "latent": LATENT}, "weight-stationary-2d", chunk=3),
    Case(
        {"heads": 6, "kv_heads": 6, "head_size": 10, "latent": replace(LATENT, query_rank=0), "attention_scale": 0.4},
        "megatron-1d", lowering="xla", mesh={"x": 2, "y": 4, "z": 1}, changes={"padding.H": 4},
    ),
    Case(
        {"head_size": 16, "latent": LATENT, "norms": "both", "logit_softcap": 3.0}, "weight-stationary-1d",
        "weight-gathered-x", mesh={"x": 2, "y": 2, "z": 2}, changes={"cache.attention.key": "B_xT_yzKD"},
    ),
    Case(
        {"qk_norm": "all", "norms": "after", "kv_heads": 2, "layer_kinds": ("full", "unrotated"), "logit_softcap": 2.0},
        "megatron-1d", mesh={"x": 2, "y": 2, "z": 2},
    ),
    Case({"sliding_window": 5, "kv_heads": 2}, "megatron-1d", chunk=3, mesh={"x": 2, "y": 2, "z": 2}),
    Case(
        {
            "layer_kinds": ("sliding", "full"), "sliding_window": 3, "local_rope_base": 50.0, "score_softcap": 1.5,
            "sinks": True, "norms": "both",
        },
        "weight-stationary-2d", "weight-gathered-xyz", chunk=4, lowering="looped",
    ),
    Case(
        {"layer_kinds": ("sliding", "unrotated"), "sliding_window": 6, "kv_heads": 1, "block": "parallel"},
        "weight-stationary-1d", chunk=4, mesh={"x": 2, "y": 2, "z": 2}, changes={"cache.attention.key": "B_xT_yzKD"},
        axis_type="auto", lowering="xla",
    ),
    Case(
        {
            "layer_kinds": ("chunked", "unrotated"), "attention_chunk": 5, "kv_heads": 2, "qk_norm": "rotated",
            "query_growth": 0.7, "growth_interval": 4, "rotary_pairs": "neighbours",
        },
        "weight-stationary-2d", "weight-gathered-xyz", chunk=3, lowering="blocking",
    ),
    Case(
        {"attention_chunk": 4, "kv_heads": 1}, "megatron-1d", chunk=7, mesh={"x": 2, "y": 2, "z": 2},
        changes={"cache.attention.key": "B_xT_yKD"}, axis_type="auto", lowering="xla",
    ),
    Case(
        {"attention_chunk": 6, "kv_heads": 2, "score_softcap": 1.5, "sinks": True}, "weight-stationary-1d", chunk=4,
        changes={"cache.attention.key": "B_xT_yKD"}, lowering="looped", mesh={"x": 2, "y": 2, "z": 2},
    ),
    Case({"positions": "learned", "context_length": 32, "norm": "layer"}, "weight-gathered-xy"),
    Case({"positions": "alibi", "heads": 6, "kv_heads": 3, "embedding_norm": True}, "megatron-1d", chunk=3,
         mesh={"x": 1, "y": 4, "z": 2}, changes={"padding.H": 8, "padding.K": 8}),
    Case({"positions": "alibi", "layer_kinds": ("sliding", "full"), "sliding_window": 3, "alibi_scaled": True},
         "weight-stationary-2d", "weight-gathered-xyz", chunk=4, lowering="looped"),
    Case({"positions": "alibi", "kv_heads": 1, "block": "parallel", "qkv_clip": 0.5, "alibi_max": 4.0},
         "weight-stationary-1d", chunk=4, mesh={"x": 2, "y": 2, "z": 2}, axis_type="auto", lowering="xla",
         changes={"cache.attention.key": "B_xT_yzKD"}),
    pytest.param(
        Case(
            {"block": "parallel", "parallel_norms": 2, "norm": "layer", "norm_bias": True}, "weight-stationary-2d",
            "weight-gathered-xyz", chunk=3, lowering="blocking",
        ),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        Case({"heads": 6, "kv_heads": 3}, "megatron-1d", mesh={"x": 2, "y": 2, "z": 1}, axis_type="auto"),
        marks=pytest.mark.slow,
    ),
    Case(
        {"layers": 1, "moe": MoEConfig(every=1, router="gshard")}, "gshard", mesh={"x": 2, "y": 2, "z": 2},
        changes={"cache.attention.key": "B_xyT_zKD"},
    ),
]  # fmt: skip


@pytest.mark.turns(1)
@pytest.mark.parametrize("name", ATTENTION)
def test_some_of_the_product(name, config, make_mesh):
    """One case of every layout of attention, in which blocks, heads, meshes and lowerings take turns."""
    number = [*ATTENTION].index(name)
    block, heads, mesh = ("parallel", "serial")[number % 2], [*HEADS][(number + 1) % 3], [*MESHES][(number + 2) % 3]
    lowering = LOWERINGS[(number + number // 3) % 3]
    wanted = f"{name}-{block}-{heads}-{mesh}-{lowering}"
    [case] = [param.values[1] for param in product() if param.id == wanted]
    check_placed(name, case, config, make_mesh)


@pytest.mark.turns(1)
@pytest.mark.parametrize("case", DIAGONAL, ids=str)
def test_every_position_is_that_of_a_full_pass(case, config, make_mesh):
    check(case, config, make_mesh)


PADDED, WIDER = ({"padding.H": heads, "padding.V": 8} for heads in (16, 32))
GROUPS = [
    Case({"heads": 14, "kv_heads": 2}, "megatron-1d", mesh={"x": 1, "y": 8, "z": 1}, changes=PADDED, lowering="xla"),
    Case({"heads": 28, "kv_heads": 4}, "megatron-1d", mesh={"x": 1, "y": 4, "z": 2}, changes=WIDER),
    Case({"heads": 12, "kv_heads": 2}, "megatron-1d", mesh={"x": 1, "y": 8, "z": 1}, changes=PADDED | {"padding.K": 8}),
    Case(
        {"heads": 12, "kv_heads": 2, "block": "parallel"}, "weight-stationary-2d", "weight-gathered-xyz", chunk=3,
        changes=PADDED, lowering="looped",
    ),
    Case({"heads": 14, "kv_heads": 2, "tied": False}, "megatron-1d", mesh={"x": 1, "y": 2, "z": 4}, changes=PADDED),
]  # fmt: skip


@pytest.mark.turns(1)
@pytest.mark.parametrize("case", GROUPS, ids=str)
def test_heads_that_are_padded_within_their_group_read_and_decode(case, config, make_mesh):
    """14 query heads and 2 key/value heads, 28 and 4, 12 and 2, on 8 devices, with a vocabulary of 257."""
    check(replace(case, config=case.config | {"vocabulary": 257}), config, make_mesh)


@pytest.mark.slow
@pytest.mark.parametrize("preset", presets())
def test_every_preset_reads_and_decodes(preset, config, make_mesh):
    number = presets().index(preset)
    settings = {"moe": MoEConfig(router=("switch", "gshard", "top-k")[number % 3])}
    if preset == "pipeline":
        settings["layers"] = 4  # two stages of a dense layer and one of experts
    case = Case(settings, preset, lowering=LOWERINGS[number % 3], axis_type=[*AXIS_TYPES][number % 2])
    check(case, config, make_mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"kv_heads": 4},
        {"kv_heads": 4, "positions": "alibi", "embedding_norm": True},
        {"kv_heads": 4, "layer_kinds": ("chunked", "unrotated"), "attention_chunk": 5},
        {"head_size": 16, "latent": LATENT},
    ],
    ids=["rotary", "alibi", "chunked", "latent"],
)
def test_an_int8_cache_is_nearly_the_same_and_does_not_depend_on_chunks(changes, config, make_mesh):
    case = Case(changes, "weight-stationary-2d", chunk=3)
    (whole, chunks), _ = check(case, config, make_mesh, tolerance=0.02, int8=True)
    read = np.arange(ROOM)[None] < READ[:, None]
    for one, other in () if whole.keys is None else ((whole.keys, chunks.keys), (whole.values, chunks.values)):
        np.testing.assert_allclose(one[:, read], other[:, read], rtol=1e-4, atol=1e-5)
    for at, logits in whole.logits.items():
        np.testing.assert_allclose(chunks.logits[at], logits, rtol=1e-4, atol=1e-5)
