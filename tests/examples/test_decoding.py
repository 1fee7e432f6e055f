"""Models of one's own that decode: token after token as at once, and the same text in every layout."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import gspmd
from gspmd.layouts import Layout
from gspmd.ops import cached_attention, embed, write_cache
from gspmd.training import ConfigError
from gspmd.training.model import Constant, Kept, Normal, Own, Parameter
from gspmd_models import decoding
from tests.examples.test_examples import EXAMPLES, MODELS

RECURRENCE = Own(replace(MODELS["recurrence"], vocabulary=64))
PROMPTS = [np.array(ids, np.int32) for ids in ([5, 6, 7, 8, 9, 3, 2], [1, 2, 60], [9, 8, 7, 6, 5])]
LAYOUTS = {
    "as-the-file": ({"x": 4, "y": 2}, {}, "explicit"),
    "auto": ({"x": 2, "y": 2}, {}, "auto"),
    "state-elsewhere": ({"x": 2, "y": 2}, {"recurrence.state": "BF_xy"}, "explicit"),
    "spread": (
        {"x": 2, "y": 2},
        {
            "embedding.tokens": "BL", "recurrence.stream": "BLE_x", "recurrence.norm": "E_x",
            "recurrence.w_candidate": "E_xF_y", "recurrence.w_forget": "E_xF_y", "recurrence.w_gate": "E_xF_y",
            "recurrence.hidden": "BLF_y", "recurrence.state": "BF_y", "recurrence.w_out": "F_yE_x",
            "output.norm": "E_x", "output.logits": "BLV_y", "embedding.table": "V_yE_x",
        },
        "explicit",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Attention:
    """One layer of causal attention, with a cache of keys and values."""

    def sizes(self, batch, length):
        return {"B": batch, "L": length, "V": 64, "E": 16, "H": 4, "K": 4, "D": 8}

    def parameters(self, layout):
        drawn = Normal(0.3)
        return {
            "table": Parameter("embedding.table", "VE", drawn),
            "norm": Parameter("mixer.norm", "E", Constant(1.0)),
            "w_q": Parameter("mixer.w_q", "EHD", drawn),
            "w_k": Parameter("mixer.w_k", "EKD", drawn),
            "w_v": Parameter("mixer.w_v", "EKD", drawn),
            "w_o": Parameter("mixer.w_o", "HDE", drawn),
        }

    def kept(self):
        return {name: Kept("mixer.cache", "BKTD", layers=1) for name in ("keys", "values")}

    def step(self, layout, params, tokens, position, kept):
        at = layout.section("mixer")
        x = embed(tokens, params["table"], layout.section("embedding").equation("tokens, table -> mixer.stream"))
        y = at.rms_norm("stream, norm", x, params["norm"])
        q, k, v = (
            at.einsum(f"stream, w_{name} -> {lies}", y, params[f"w_{name}"])
            for name, lies in (("q", "query"), ("k", "key"), ("v", "key"))
        )
        q = q / 8**0.5
        lengths = jnp.full(tokens.shape[0], position)
        specs = [at.spec(name) for name in ("query", "key", "cache")]
        new = {"keys": k[None], "values": v[None]}
        kept = {name: write_cache(kept[name], new[name], specs[2], specs[1], lengths=lengths) for name in kept}
        held = (kept[name][0] for name in ("keys", "values"))
        heads = cached_attention(q, k, v, *held, *specs, lengths=lengths)
        x = x + at.einsum("query, w_o -> stream", heads, params["w_o"])
        to_logits = "mixer.stream, embedding.table -> logits"
        return layout.section("output").einsum(to_logits, x, params["table"]), kept

    def loss(self, layout, params, tokens, key, train):
        raise NotImplementedError


ATTENTION = {
    "embedding.tokens": "B_xL", "embedding.table": "V_yE", "mixer.stream": "B_xLE", "mixer.norm": "E",
    "mixer.w_q": "EH_yD", "mixer.w_k": "EK_yD", "mixer.w_v": "EK_yD", "mixer.w_o": "H_yDE", "mixer.query": "B_xLH_yD",
    "mixer.key": "B_xLK_yD", "mixer.cache": "B_xK_yTD", "output.logits": "B_xLV_y",
}  # fmt: skip


def layout_of(lines, tmp_path):
    sections: dict[str, list[str]] = {"mesh": ['axes = ["x", "y"]', 'factor = ["x", "y"]']}
    for key, spec in lines.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f'{name} = "{spec}"')
    text = "".join("\n".join([f"[{name}]", *rows, ""]) for name, rows in sections.items())
    (tmp_path / "own.toml").write_text(text)
    return Layout.load(tmp_path / "own.toml")


def written(subject, layout, mesh, prompts, tokens=6, samples=1, chunk=2, burst=4, **options):
    """The texts of a model with random parameters."""
    with jax.set_mesh(mesh):
        rows, one = decoding.fewest_rows(subject, layout, mesh, samples * len(prompts), 32)
        params = subject.initial(one, mesh, jax.random.key(0))
        bursts = decoding.Stepwise(subject, one, rows, 32, chunk, burst).stream(
            params, prompts, tokens, samples=samples, **options
        )
        texts = [[] for _ in range(samples * len(prompts))]
        for each in bursts:
            for text, new in zip(texts, each.tokens):
                text += new
    return texts


ALONE = jax.make_mesh((1, 1), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])


def zeros(subject, layout, rows):
    """Return the state that a decoder keeps before its first token."""
    return {name: jnp.zeros(shape, dtype) for name, (_, shape, dtype) in subject.kept(layout, rows, 32).items()}


def one_by_one(subject, layout, prompts, tokens):
    """The likeliest texts, each computed whole for every one of its tokens, on one device."""
    texts = []
    with jax.set_mesh(ALONE):
        params = subject.initial(layout, ALONE, jax.random.key(0))
        for ids in prompts:
            text = [*ids]
            for _ in range(tokens):
                zeros = {
                    name: jnp.zeros(shape, dtype) for name, (_, shape, dtype) in subject.kept(layout, 1, 32).items()
                }
                logits, _ = subject.step(layout, params, jnp.array([text]), jnp.int32(0), zeros)
                text.append(int(logits[0, -1].argmax()))
            texts.append(text[len(ids) :])
    return texts


@pytest.fixture(scope="module")
def likeliest():
    return one_by_one(RECURRENCE, Layout.load(EXAMPLES / "recurrence.toml"), PROMPTS, 6)


def test_token_after_token_is_as_at_once():
    layout = Layout.load(EXAMPLES / "recurrence.toml")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 9)), jnp.int32)
    with jax.set_mesh(ALONE):
        params = RECURRENCE.initial(layout, ALONE, jax.random.key(0))
        nested = {"table": params["table"], "norm": params["norm"]}
        nested["layers"] = {path[7:]: value for path, value in params.items() if path.startswith("layers.")}
        whole, _ = RECURRENCE.model.logits(layout, nested, tokens)  # as the loss has them
        kept, found, at = zeros(RECURRENCE, layout, 2), [], 0
        for count in (4, 1, 1, 3):
            logits, kept = RECURRENCE.step(layout, params, tokens[:, at : at + count], jnp.int32(at), kept)
            found, at = [*found, logits], at + count
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), whole, rtol=2e-5, atol=2e-5)


@pytest.mark.turns(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_likeliest_text_is_that_of_one_device(name, likeliest, make_mesh):
    shape, lines, kind = LAYOUTS[name]
    layout = Layout.load(EXAMPLES / "recurrence.toml").override(lines)
    found = written(RECURRENCE, layout, make_mesh(shape, kind), PROMPTS, sampling=decoding.Sampling(temperature=0))
    assert found == likeliest


def test_a_text_does_not_depend_on_what_is_written_beside_it(make_mesh):
    layout = Layout.load(EXAMPLES / "recurrence.toml")
    together = written(RECURRENCE, layout, make_mesh({"x": 2, "y": 2}), PROMPTS[:2], samples=2, seed=5)
    mesh = make_mesh({"x": 1, "y": 1})
    for number, ids in enumerate((PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1])):
        assert written(RECURRENCE, layout, mesh, [ids], seed=5 + number, chunk=100, burst=1) == [together[number]]
    assert together[0] != together[1]


@pytest.mark.turns(1)
@pytest.mark.parametrize(("shape", "lines"), [({"x": 2, "y": 2}, {}), ({"x": 1, "y": 4}, {"mixer.cache": "BKT_yD"})])
def test_a_cache_is_kept_by_its_line(shape, lines, make_mesh, tmp_path):
    subject, layout = Own(Attention()), layout_of(ATTENTION | lines, tmp_path)
    wanted = one_by_one(subject, layout_of(ATTENTION, tmp_path), PROMPTS, 5)
    found = written(subject, layout, make_mesh(shape), PROMPTS, 5, sampling=decoding.Sampling(temperature=0))
    assert found == wanted


def test_it_ends_where_it_should(make_mesh):
    layout, mesh = Layout.load(EXAMPLES / "recurrence.toml"), make_mesh({"x": 1, "y": 1})
    (text,) = written(RECURRENCE, layout, mesh, PROMPTS[:1], seed=3)
    assert len(text) == 6
    stop = next(token for token in text if text.index(token) > 1)
    assert written(RECURRENCE, layout, mesh, PROMPTS[:1], seed=3, stop=[stop]) == [text[: text.index(stop)]]
    assert written(RECURRENCE, layout, mesh, PROMPTS[:1], 1, seed=3) == [text[:1]]
    assert written(RECURRENCE, layout, mesh, PROMPTS[:1], 9, burst=3, ended={0}) == [[]]


@dataclass(frozen=True)
class Wrong(type(RECURRENCE.model)):
    """Mistakes of a class, by name."""

    how: str = ""

    def kept(self):
        return [1] if self.how == "kept" else super().kept()

    def step(self, layout, params, tokens, position, kept):
        logits, kept = super().step(layout, params, tokens, position, kept)
        return {
            "logits": (logits[:, -1], kept),
            "dtype": (logits, {"state": kept["state"].astype("bfloat16")}),
            "lost": (logits, {"other": kept["state"]}),
            "one": logits,
            "kept": (logits, kept),
        }[self.how]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("kept", "kept must return a mapping of names to gspmd.training.model.Kept, but returned [1]"),
        ("logits", "step must return logits [3, 1, 256], but returned an array float32[3, 256]"),
        ("dtype", "step must return 'state' as it was, an array float32[4, 3, 256], but returned an array bfloat16"),
        ("lost", "step must return the arrays of kept, but lost 'state'"),
        ("one", "step must return logits and a mapping of what is kept, but returned an array"),
    ],
)
def test_a_wrong_answer_is_named(how, told, make_mesh):
    layout = Layout.load(EXAMPLES / "recurrence.toml")
    with pytest.raises(ConfigError) as fault:
        written(Own(Wrong(how=how)), layout, make_mesh({"x": 1, "y": 1}), PROMPTS, chunk=100)
    assert told in str(fault.value)


def test_logits_that_are_no_numbers_end_with_the_text_that_has_them(make_mesh):
    layout, mesh = Layout.load(EXAMPLES / "recurrence.toml"), make_mesh({"x": 1, "y": 1})
    with jax.set_mesh(mesh):
        rows, one = decoding.fewest_rows(RECURRENCE, layout, mesh, 1, 32)
        params = RECURRENCE.initial(one, mesh, jax.random.key(0))
        params["norm"] = params["norm"] * np.nan
        with pytest.raises(decoding.GenerationError, match="cannot continue text 1 after 0 new tokens"):
            list(decoding.Stepwise(RECURRENCE, one, rows, 32).stream(params, PROMPTS[:1], 4))


def test_a_step_is_planned_as_it_is_compiled(make_mesh):
    layout, mesh = Layout.load(EXAMPLES / "recurrence.toml"), make_mesh({"x": 2, "y": 2})
    with jax.set_mesh(mesh):
        rows, one = decoding.fewest_rows(RECURRENCE, layout, mesh, 4, 32)
        writer = decoding.Stepwise(RECURRENCE, one, rows, 32)
        params = {path: jax.typeof(value) for path, value in RECURRENCE.initial(one, mesh, jax.random.key(0)).items()}
        params = {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, x.sharding.spec))
            for path, x in params.items()
        }
        tokens, position = (
            jax.ShapeDtypeStruct(shape, "int32", sharding=jax.NamedSharding(mesh, jax.P())) for shape in ((rows, 1), ())
        )
        arguments = params, writer.abstract_kept, tokens, position
        compiled = jax.jit(writer.step).lower(*arguments).compile()
        assert gspmd.ledger(compiled).compare(gspmd.trace(writer.step, *arguments)).agrees
