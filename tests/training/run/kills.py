"""Runs that are killed, each in a separate process: `python kills.py FOLDER KILLS SEED`.

The processes are forked from one that has imported everything and has not started JAX, so that a start is fast.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from gspmd import host
from gspmd.annotate import Spec
from gspmd.training import Checkpoints, OptimizerConfig, Program, TrainingConfig, data, fit, jit_step, make_step
from gspmd.training.checkpoints import newest
from gspmd.training.optimizer import adamw, schedule
from gspmd.training.reporting import metrics
from gspmd.training.state import initial, shardings

CONFIG = TrainingConfig(steps=60, batch=4, length=16, validation_every=0, final_validation_batches=1, save_every=3)


def loss(params, tokens, key):
    """Return the loss of a bigram model.

    It has dropout, so that a resume also has to continue with the same random numbers.
    """
    kept = jax.random.bernoulli(key, 0.9, params["table"].shape)
    logits = jnp.take(params["table"] * kept, tokens[:, :-1], axis=0, mode="clip")
    entropy = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1).mean()
    return entropy, {"cross_entropy": entropy}


def corpus() -> data.Corpus:
    rng = np.random.default_rng(0)
    text = (np.cumsum(np.where(rng.random(20_000) < 0.9, 1, 3)) % 8).astype(np.uint8)
    return data.Corpus("counting", text[:18_000], text[18_000:], (9, 1), 2.0)


def program() -> Program:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"table": Spec.parse("VE_x")}
    optimizer = OptimizerConfig(learning_rate=0.1)
    transform = adamw(optimizer, CONFIG.steps)
    state = initial(jax.device_put({"table": jnp.zeros((8, 8))}, shardings(specs, mesh)), transform, mesh, specs)
    step = make_step(loss, transform, schedule(optimizer, CONFIG.steps), limit=1.0)
    whole = jax.NamedSharding(mesh, jax.P())
    place = lambda tokens: jax.device_put(np.asarray(tokens, np.int32), whole)  # noqa: E731
    evaluate = jax.jit(lambda params, tokens: loss(params, tokens, jax.random.key(0))[0])
    return Program(state, jit_step(step, state), evaluate, place, jax.device_put(jax.random.key(1), whole))


def run(out: Path) -> None:
    """Train to the end, from the newest checkpoint if there is one."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(out.parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    out.mkdir(exist_ok=True)
    config = TrainingConfig(**{**vars(CONFIG), "resume": newest(out) is not None})
    fit(config, program(), corpus(), out, Console(quiet=True))


def forked(task: Callable[[Path], None], out: Path, delay: float | None = None) -> bool:
    """Return whether a task in a separate process was killed after a delay, before it was done."""
    child = os.fork()
    if child == 0:
        try:
            task(out)
            os._exit(0)
        finally:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), f"a process failed with exit code {code}"
    return code != 0


def losses(out: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in metrics.read(out) if "loss" in row]


def compare(out: Path) -> None:
    """Compare all files of a run with those of the undisturbed one."""
    whole = out.parent / "whole"
    assert losses(out) == losses(whole)
    assert [step for step, _ in losses(out)] == list(range(1, CONFIG.steps + 1))
    like, states = program().state, []
    for each in (out, whole):
        with Checkpoints(each) as checkpoints:
            state, rest = checkpoints.restore(like, tell=sys.exit)
            rest.pop("figures")  # a digest of lines that have times in them
            states.append(({"rest": rest}, jax.device_get(state)))
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    jax.tree.map(np.testing.assert_array_equal, *states)


def main(folder: Path, kills: int, seed: int) -> None:
    host.use_host_devices(4)
    draw = random.Random(seed)
    forked(run, folder / "whole")  # compiles, and so takes longer than those after it
    began = time.monotonic()
    forked(run, folder / "again")
    takes = time.monotonic() - began
    wanted, done, saving, runs = losses(folder / "whole"), 0, 0, [folder / "again"]
    while done < kills:
        runs.append(out := folder / f"killed-{len(runs)}")
        while forked(run, out, draw.uniform(0, takes) if done < kills else None):
            done += 1
            saving += any(".partial" in path.name for path in (out / "checkpoints").glob("*"))
            assert losses(out) == wanted[: len(losses(out))]
            print(f"killed at step {len(losses(out))} of {out.name}, {newest(out)} is saved", flush=True)
    for out in runs:
        forked(compare, out)
    print(f"{done} kills in {len(runs) - 1} runs, {saving} while saving; undisturbed, a run takes {takes:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
