"""Plain `flax.nnx` modules that compute by a layout, in a handwritten training loop without gspmd.training.

    python examples/plain_nnx.py                                          # examples/plain_nnx.toml on x=4, y=2
    python examples/plain_nnx.py mine.toml x=8,y=1

A student of residual blocks learns to imitate a teacher. The student's modules take a section of a `gspmd.Layout`, and
write their equations with the names of the section's lines. Parameters are `nnx.Param`s, placed by `gspmd.annotate`.
Everything else is ordinary JAX, flax and optax: gradients by `jax.value_and_grad`, updates by `optax.adamw`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    from gspmd import host

    host.use_host_devices(8)  # fake devices on a CPU; must come before JAX starts

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gspmd

HERE = Path(__file__).parent
SIZES = {"B": 64, "I": 16, "E": 32, "F": 64, "O": 8}


def parameter(at, line, key, scale):
    """Return a parameter of normal random numbers, with the shape and placement of a layout's line."""
    spec = at.spec(line)
    values = scale * jax.random.normal(key, [SIZES[dim] for dim in spec.dims])
    return nnx.Param(gspmd.annotate(values, spec))


class Block(nnx.Module):
    """A residual block, [B, E] to [B, E]."""

    def __init__(self, at, keys):
        self.at = at
        self.norm = nnx.Param(gspmd.annotate(jnp.ones(SIZES["E"]), at.spec("norm")))
        self.w_in = parameter(at, "w_in", next(keys), SIZES["E"] ** -0.5)
        self.b_in = nnx.Param(gspmd.annotate(jnp.zeros(SIZES["F"]), at.spec("b_in")))
        self.w_out = parameter(at, "w_out", next(keys), SIZES["F"] ** -0.5)

    def __call__(self, x):
        y = self.at.rms_norm("stream, norm", x, self.norm[...])
        h = self.at.add_bias(
            "hidden, b_in", self.at.einsum("stream, w_in -> hidden", y, self.w_in[...]), self.b_in[...]
        )
        return x + self.at.einsum("hidden, w_out -> stream", jax.nn.gelu(h), self.w_out[...])


class Student(nnx.Module):
    """Two blocks between two matrices, [B, I] to [B, O]."""

    def __init__(self, layout, seed=0):
        self.at = layout.section("student")
        keys = iter(jax.random.split(jax.random.key(seed), 8))
        self.w_first = parameter(self.at, "w_first", next(keys), SIZES["I"] ** -0.5)
        self.blocks = nnx.List([Block(self.at, keys) for _ in range(2)])
        self.w_last = parameter(self.at, "w_last", next(keys), SIZES["E"] ** -0.5)

    def __call__(self, x):
        x = self.at.einsum("inputs, w_first -> stream", x, self.w_first[...])
        for block in self.blocks:
            x = block(x)
        return self.at.einsum("stream, w_last -> outputs", x, self.w_last[...])


def make_step(model, optimizer):
    """Build a step: (parameters, optimizer state, inputs, targets) -> (parameters, optimizer state, loss)."""
    definition, _ = nnx.split(model)
    outputs = model.at.spec("outputs")

    def loss(params, inputs, targets):
        error = (nnx.merge(definition, params)(inputs) - targets) ** 2
        return gspmd.reshard(error, f"{outputs} -> ") / error.size

    def step(params, state, inputs, targets):
        value, gradients = jax.value_and_grad(loss)(params, inputs, targets)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def batch(at, number):
    """Return the placed inputs of one step, and the teacher's outputs for them."""
    key = jax.random.key(1000 + number)
    inputs = jax.random.normal(key, (SIZES["B"], SIZES["I"]))
    teacher = jax.random.normal(jax.random.key(1), (SIZES["I"], SIZES["O"])) / SIZES["I"] ** 0.5
    return gspmd.annotate(inputs, at.spec("inputs")), gspmd.annotate(jnp.tanh(inputs @ teacher), at.spec("outputs"))


def begin(layout):
    """Return the uncompiled step and its first arguments; the mesh must be set when this is called."""
    model, optimizer = Student(layout), optax.adamw(3e-3)
    params = nnx.state(model, nnx.Param)
    return make_step(model, optimizer), (params, jax.jit(optimizer.init)(params), *batch(model.at, 0))


def main(layout=HERE / "plain_nnx.toml", mesh="x=4,y=2", steps=200):
    """Train the student, and print the bytes that a step sends."""
    shape = {axis: int(size) for axis, size in (part.split("=") for part in mesh.split(","))}
    layout = gspmd.Layout.load(layout).check(SIZES, shape)
    with jax.set_mesh(jax.make_mesh(tuple(shape.values()), tuple(shape))):
        step, arguments = begin(layout)
        plan, compiled = gspmd.trace(step, *arguments), jax.jit(step).lower(*arguments).compile()
        print(gspmd.ledger(compiled).compare(plan))
        params, state, *_ = arguments
        for number in range(steps):
            params, state, value = compiled(params, state, *batch(layout.section("student"), number))
            if number % 50 == 0 or number == steps - 1:
                print(f"step {number + 1}: loss {value:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
