"""References of generation: models with varied texts, and searches that recompute whole sequences, in numpy."""

import functools

import jax
import numpy as np

import gspmd_models as models
from gspmd.layouts import Layout
from gspmd_models.parameters import pad, parameters

TRANSLATOR = models.ModelConfig(
    vocabulary=64, embed=32, layers=2, encoder_layers=3, start_token=2, heads=8, kv_heads=8, head_size=4,
    feed_forward=64, activation="relu", norm="layer", norm_bias=True, norm_epsilon=1e-5, qkv_bias=True, out_bias=True,
    ffn_bias=True, tied=False, positions="sinusoidal", position_offset=2,
)  # fmt: skip
"""An M2M-100 with a separate table for logits: with the embedding's table, small models repeat themselves."""


@functools.cache
def values(config):
    """Return random parameters by path, large enough that texts vary, with scales of norms that are not 1."""
    rows, numbers = parameters(config, Layout.load("replicated")), np.random.default_rng(0)
    spread = {"table": 0.5, "norm": 0.1, "bias": 0.3, "relative": 1.0}

    def drawn(path, shape):
        name = path.rpartition(".")[2]
        width = spread.get(name, 0.25)
        return (numbers.normal(0, width, shape) + (name == "norm")).astype(np.float32)

    found = {path: drawn(path, row.shape) for path, row in rows.items()}
    found["output.table"][1] = 0  # a padding token, whose position M2M-100 in transformers does not count
    return found


def model(config, layout, mesh):
    """Return the model with these parameters, sharded by a layout."""
    rows = parameters(config, layout)
    placed = {
        path: jax.device_put(
            np.asarray(pad(values(config)[path], row.padding)), jax.NamedSharding(mesh, row.spec.partition_spec())
        )
        for path, row in rows.items()
    }
    return models.with_arrays(models.abstract(config, layout, mesh), placed)


class Machine:
    """The model of a config in a layout on some devices, and its generator."""

    def __init__(self, config, preset="replicated", devices=1, prefill=None, changes=None, **options):
        layout = Layout.load(preset).override(changes or {})
        shape = layout.mesh_for(devices)
        self.mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), devices=jax.devices()[:devices])
        self.model = model(config, layout.phase("decode").resolved({}, self.mesh), self.mesh)
        self.generator = models.Generator(self.model, layout, prefill and Layout.load(prefill), **options)

    def texts(self, prompts, tokens, **options):
        """Return the texts; greedy unless something else is asked for."""
        if not {"beams", "sampling"} & {*options}:
            options["sampling"] = models.Sampling(temperature=0)
        with jax.set_mesh(self.mesh):
            return self.generator(prompts, tokens, **options).texts


LENGTH, ROWS = 20, 4
"""The tokens of every sequence, padded behind those that are asked for, and the rows of every pass."""


@functools.cache
def _logits(config):
    """Return a function (beginnings of one length, source) -> logits [b, V] after each, without a cache."""
    layout = Layout.load("replicated")
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
    whole = model(config, layout, mesh)
    run = jax.jit(lambda ids, source: whole(ids, source=source)[0])

    def after(beginnings, source=None):
        ids = np.zeros((ROWS, LENGTH), np.int32)
        ids[: len(beginnings), : len(beginnings[0])] = beginnings
        if source is not None:
            source = np.broadcast_to(np.array(source, np.int32), (len(ids), len(source)))
        with jax.set_mesh(mesh):
            return np.asarray(run(ids, source))[: len(beginnings), len(beginnings[0]) - 1]

    return after


def greedy(config, beginning, tokens, source=None, stop=()):
    """Return the likeliest tokens one after the other, each after a pass over the whole sequence."""
    after, text = _logits(config), []
    for _ in range(tokens):
        token = int(after([[*beginning, *text]], source)[0].argmax())
        if token in stop:
            break
        text.append(token)
    return text


def search(config, beginning, tokens, beams, source=None, stop=(), length_penalty=1.0):
    """Search with beams as transformers with early_stopping=False, written with lists."""
    after = _logits(config)
    going, ends = [(0.0, [])], []
    for length in range(1, tokens + 1):
        found = []
        logits = after([[*beginning, *text] for _, text in going], source)
        for (score, text), row in zip(going, logits.astype(np.float64)):
            row -= np.log(np.exp(row - row.max()).sum()) + row.max()
            found += [(score + row[token], [*text, token]) for token in range(config.vocabulary)]
        found = sorted(found, key=lambda each: -each[0])[: max(2, 1 + len(stop)) * beams]
        over = [text[-1] in stop or length == tokens for _, text in found]
        ends += [(score / length**length_penalty, text) for (score, text), end in zip(found[:beams], over) if end]
        ends = sorted(ends, key=lambda each: -each[0])[:beams]
        going = [each for each, end in zip(found, over) if not end][:beams]
        if not going or (len(ends) == beams and going[0][0] / length**length_penalty <= ends[-1][0]):
            break
    text = ends[0][1]
    return text[:-1] if text[-1] in stop else text
