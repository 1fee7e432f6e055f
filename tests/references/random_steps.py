"""Random training steps as a user writes them, a settings file and a layout file, compared with the same on one device.

    python -m tests.references.random_steps 17          # print the faults of the step of seed 17
    python -m tests.references.random_steps 17 --show   # print its two files

A seed determines a step. Its layout is based on a preset, or has random specs everywhere; vias, `[gradients]`,
`[optimizer]`, `[lowering]` and the stages of a pipeline are added at random. A few lines are wrong on purpose, and most
of these have to be refused.

A step passes the checks of `gspmd train`. After them, building and running the model has to succeed, with the loss, the
gradients and the parameters that one device computes, and with the planned bytes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from math import prod
from pathlib import Path
from unittest import mock

import numpy as np

from gspmd.annotate import LayoutError, PlanError, Spec, SpecError
from gspmd.layouts import Layout
from gspmd.layouts.layout import presets
from gspmd.layouts.rules.keys import KEYS as ALL_KEYS
from gspmd.training.toml import ConfigError

TOLERANCE = 1e-4
SHAPES = ((1,), (2,), (3,), (4,), (6,), (8,), (2, 2), (4, 2), (2, 4), (3, 2), (2, 3), (2, 2, 2), (4, 1, 2))
LOWERINGS = ("xla", "blocking", "looped", "looped:halves", "looped:paired", "auto")
SCHEDULES = ("gpipe", "1f1b", "zero-bubble")
REMATS = ("none", "full", "dots-except-hidden", "dots", "selective")
ROUTERS = ("noisy-top-k", "gshard", "switch", "st-moe", "top-k", "expert-choice")
NAMED = ("microbatches", "rounds", "schedule", "layers", "groups", "dispatch")
SECONDS = 600  # after which a step hangs
TOGETHER = 8  # the steps that one process runs
# Only the lines of a decoder, so that lines for encoder–decoders do not change the draws.
#: Lines of tensors that the drawn models do not have.
_OTHERS = (
    "attention.relative", "attention.sinks", "attention.q_norm_all", "attention.k_norm_all", "embedding.positions",
    "embedding.norm", "embedding.norm_bias",
    "attention.w_q_down", "attention.latent_query", "attention.q_latent_norm", "attention.w_q_up",
    "attention.w_k_down", "attention.latent", "attention.latent_norm", "attention.w_k_up", "attention.w_v_up",
    "attention.absorbed",
)  # fmt: skip
KEYS = {name: key for name, key in ALL_KEYS.items() if key.section != "cross" and name not in _OTHERS}
REFUSALS = (LayoutError, PlanError, SpecError, ConfigError)

Tables = dict[str, dict[str, object]]


@dataclass(frozen=True)
class Written:
    """The two files of a step: tables of settings, and the layout as its top-level keys and tables."""

    seed: int
    settings: Tables
    layout: dict[str, object]

    @property
    def settings_text(self) -> str:
        """The settings file."""
        return toml(self.settings)

    @property
    def layout_text(self) -> str:
        """The layout file."""
        return toml(self.layout)

    def __str__(self) -> str:
        return f"# step {self.seed}\n{self.settings_text}\n# its layout.toml\n{self.layout_text}"


def toml(document: Mapping[str, object]) -> str:
    """A document of at most two levels as TOML; keys with a dot are quoted."""
    plain = {key: value for key, value in document.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {json.dumps(value)}" for key, value in plain.items()]
    for name, table in document.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]", *(f"{_key(key)} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines).lstrip() + "\n"


def _key(name: str) -> str:
    return json.dumps(name) if "." in name else name


# -- drawing ----------------------------------------------------------------------------------------------------------


class Draw:
    """The random choices of one step."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def one(self, choices: Sequence):
        """Return one of the choices."""
        return choices[self.rng.integers(len(choices))]

    def happens(self, chance: float) -> bool:
        """Return True with this probability."""
        return bool(self.rng.random() < chance)

    def shuffled(self, values: Sequence) -> list:
        """Return all of them, in a random order."""
        return [values[i] for i in self.rng.permutation(len(values))]


def draw(seed: int) -> Written:
    """Return the step of a seed."""
    d = Draw(seed)
    preset = d.one(presets()) if d.happens(0.6) else ""
    staged = preset == "pipeline" or d.happens(0.15)
    shape = d.one(SHAPES)
    names = list("xyz")
    if staged:
        shape, names = (2, *d.one([(1,), (2,), (3,), (4,), (2, 2)])), ["p", *names]
    mesh = dict(zip(names, shape))
    microbatches = d.one((1, 2, 2, 4, 3)) if staged or d.happens(0.3) else 1
    rounds = 2 if staged and microbatches > 1 and d.happens(0.25) else 1
    model, sizes = _model(d, mesh, rounds if staged else 0, microbatches)
    batch, length = sizes["B"], sizes["L"]
    layout = _from_preset(d, preset, mesh, staged, sizes) if preset else _from_nothing(d, mesh, staged, sizes, model)
    training = {"batch": batch, "length": length, "microbatches": microbatches, "steps": 2, "sample_bytes": 0}
    sharding = {"layout": "layout.toml", "mesh": ",".join(f"{axis}={size}" for axis, size in mesh.items())}
    sharding |= {"axis_types": d.one(("explicit", "explicit", "auto"))}
    if staged:
        sharding |= {"schedule": d.one(SCHEDULES), "rounds": rounds}
    # Updates that are smooth in the gradients, so that rounding on either side is not magnified.
    optimizer = {"learning_rate": 0.01, "warmup": 0.0, "epsilon": 1e-3, "clip": d.one((0.0, 0.1, 1.0))}
    settings = {"model": model, "training": training, "optimizer": optimizer, "sharding": sharding}
    if moe := model.pop("moe"):
        settings["model.moe"] = moe
    return Written(seed, settings, layout)


def _model(
    d: Draw, mesh: Mapping[str, int], rounds: int, microbatches: int
) -> tuple[dict[str, object], dict[str, int]]:
    """Return a model's settings, and the sizes of its dimensions, which most specs over the mesh divide."""
    whole = prod(size for axis, size in mesh.items() if axis != "p")
    devices = whole * d.one((1, 2)) if whole < 4 else whole
    heads = devices * (2 if devices < 4 else 1)
    model: dict[str, object] = {
        "vocabulary": 256, "embed": 4 * devices, "heads": heads, "kv_heads": d.one((heads, heads, heads // 2, 1)),
        "head_size": d.one((4, 8)), "feed_forward": 4 * devices, "remat": d.one(REMATS),
        "activation": d.one(("swiglu", "swiglu_clamped", "geglu", "gelu", "relu", "silu")),
        "block": d.one(("serial", "serial", "parallel")),
        "tied": d.happens(0.5), "qk_norm": d.happens(0.2), "moe": None,
    }  # fmt: skip
    if whole % 3 == 0:
        model["vocabulary_multiple"] = 3 * 64
    if model["block"] == "parallel" and d.happens(0.3):
        model["parallel_norms"] = 2
    for bias in ("qkv_bias", "out_bias", "output_bias"):
        model[bias] = d.happens(0.2)
    if d.happens(0.25):
        model |= {"norm": "layer", "norm_bias": d.happens(0.5)}
    every = 1
    if d.happens(0.5):
        every = d.one((1, 2))
        model["moe"] = _experts(d, devices, every, microbatches)
    if d.happens(0.2):
        model["ffn_bias"] = True
    model["layers"] = every * (mesh.get("p", 1) * rounds if rounds else d.one((1, 2)))
    batch = whole * (microbatches if microbatches > 1 and d.happens(0.9) else 1) * (2 if whole < 3 else 1)
    length = 2 * devices if devices > 2 else 8
    rows = -(-256 // int(model.get("vocabulary_multiple", 1))) * int(model.get("vocabulary_multiple", 1))
    sizes = {
        "B": batch, "L": length, "T": length, "E": 4 * devices, "F": 4 * devices, "V": rows, "H": heads,
        "K": int(model["kv_heads"]), "D": int(model["head_size"]), "N": int(model["layers"]) // every,
    }  # fmt: skip
    if moe := model["moe"]:
        sizes |= {"X": moe["experts"], "G": moe.get("groups", batch)}
    return model, sizes


def _experts(d: Draw, devices: int, every: int, microbatches: int) -> dict[str, object]:
    """Return the settings of experts, without random draws for several microbatches, whose draws would differ."""
    router = d.one(ROUTERS)
    if microbatches > 1:
        router = d.one(("switch", "st-moe", "top-k", "expert-choice"))
    moe: dict[str, object] = {"experts": max(4, devices), "every": every, "router": router}
    moe |= {"capacity_factor": d.one((1.0, 1.25, 2.0)), "dispatch": d.one(("sort", "onehot", "dropless"))}
    moe |= {"router_scale": 1.0}  # routing that is far from even has no ties
    if router == "expert-choice" and moe["dispatch"] == "dropless":
        moe["dispatch"] = "sort"
    if router in ("noisy-top-k", "top-k") and d.happens(0.4):
        moe["k"] = d.one((1, 2, 3))
    if router != "expert-choice" and d.happens(0.2):
        moe["priority"] = True
    if router == "top-k" and d.happens(0.3):
        moe["renormalize"] = False
    if router == "top-k" and d.happens(0.5):
        moe["scores"] = d.one(("softmax", "sigmoid"))
        moe |= d.one(({}, {"expert_groups": 2}, {"expert_groups": 2, "kept_groups": 1, "k": 1, "group_best": 1}))
        moe["router_bias"] = d.happens(0.5)
        moe["gate_factor"] = d.one((1.0, 2.5))
    if microbatches > 1:
        moe["jitter"] = 0.0
    elif d.happens(0.2):
        moe["groups"] = devices
    if d.happens(0.2):
        moe["shared"] = d.one((1, 2))
        moe["shared_mix"] = d.happens(0.5)
    if d.happens(0.1) and microbatches == 1:
        moe["dropout"] = 0.25
    return moe


def _from_preset(d: Draw, preset: str, mesh: Mapping[str, int], staged: bool, sizes: Mapping) -> dict[str, object]:
    """Return a preset with a few other lines."""
    layout: dict[str, object] = {"base": preset}
    axes = ["p", *"xyz"] if staged else [*"xyz"]
    layout["mesh"] = {"axes": axes}
    if staged and preset != "pipeline":
        layout["pipeline"] = {"layers": "N_p"}
    base, free = Layout.load(preset), [axis for axis in mesh if axis != "p"]
    known = [key for name, key in KEYS.items() if name in base.table and key.kind != "stack"]
    known = [key for key in known if key.section != "moe" or "X" in sizes]
    for _ in range(d.one((0, 0, 1, 2, 3))):
        key, axes = d.one(known), [*mesh] if d.happens(0.1) else free
        if key.kind == "via":
            text = _via(d, axes, mesh, sizes, key.dims)
        else:
            text = str(_spec(d, key.dims, axes, mesh, sizes, "" if d.happens(0.1) else key.local))
        section, name = key.name.split(".")
        layout.setdefault(section, {})[name] = text
    _overrides(d, layout, free, mesh, sizes)
    return layout


def _from_nothing(d: Draw, mesh: Mapping[str, int], staged: bool, sizes: Mapping, model: Mapping) -> dict[str, object]:
    """Return random specs for all lines, which agree where they must; sometimes one line more, which may disagree."""
    free = [axis for axis in mesh if axis != "p"]
    layout: dict[str, object] = {"mesh": {"axes": [*mesh], "factor": [*mesh]}}
    if staged:
        layout["pipeline"] = {"layers": "N_p"}
    alike: dict[str, Spec] = {}
    for key in KEYS.values():
        if key.kind not in ("parameter", "activation") or (key.section == "moe" and not model["moe"]):
            continue
        if key.default is not None and d.happens(0.7):
            continue
        spec = _spec(d, key.dims, free, mesh, sizes, key.local)
        if key.name == "ffn.residual":
            spec = alike["attention.residual"]
        if key.name == "attention.key":
            spec = _keys(d, alike["attention.query"], mesh, sizes)
        if key.name == "moe.dispatched":
            spec = Spec(("G", "X", "C", "E"), (alike["moe.groups"].axes_of("G"), (), (), ()))
        alike[key.name] = spec
        section, name = key.name.split(".")
        layout.setdefault(section, {})[name] = str(spec)
    for key in (key for key in KEYS.values() if key.kind == "via" and key.section in layout):
        if key.name != "attention.key_via" and d.happens(0.25):
            layout[key.section][key.name.split(".")[1]] = _via(d, free, mesh, sizes, key.dims)
    _overrides(d, layout, free, mesh, sizes)
    if d.happens(0.1):
        key = d.one([key for key in KEYS.values() if key.section in layout and key.kind in ("parameter", "activation")])
        layout[key.section][key.name.split(".")[1]] = str(_spec(d, key.dims, [*mesh], mesh, {}, ""))
    return layout


def _keys(d: Draw, query: Spec, mesh: Mapping[str, int], sizes: Mapping[str, int]) -> Spec:
    """Draw the spec of keys for these queries: heads over the first of their axes, the length alike or whole."""
    heads = query.axes_of("H")
    heads = heads[: d.one(range(len(heads) + 1))] if d.happens(0.3) else heads
    while sizes["K"] % prod(mesh[axis] for axis in heads):
        heads = heads[:-1]
    length = query.axes_of("L") if d.happens(0.7) else ()
    return Spec(("B", "L", "K", "D"), (query.axes_of("B"), length, heads, ()))


def _overrides(
    d: Draw, layout: dict[str, object], free: Sequence[str], mesh: Mapping[str, int], sizes: Mapping[str, int]
) -> None:
    """Return [gradients], [optimizer] and [lowering] of a layout."""
    parameters = [key for key in KEYS.values() if key.kind == "parameter"]
    parameters = [key for key in parameters if key.section != "moe" or "X" in sizes]
    for section, most in (("gradients", 3), ("optimizer", 4)):
        lines = {}
        for key in d.shuffled(parameters)[: d.one(range(most + 1)) if d.happens(0.4) else 0]:
            spec = _spec(d, key.dims, free, mesh, sizes, "")
            left = [axis for axis in free if axis not in spec.used]
            if section == "gradients" and left and d.happens(0.5):
                spec = replace(spec, partial=tuple(left[: d.one(range(1, len(left) + 1))]))
            lines[key.name] = str(spec)
        if lines:
            layout[section] = lines
    lowering = {"default": d.one(LOWERINGS)} if d.happens(0.9) else {}
    if d.happens(0.2):
        lowering[d.one(("embedding", "attention", "ffn", "output"))] = d.one(LOWERINGS)
    if lowering:
        layout["lowering"] = lowering


def _spec(
    d: Draw, dims: str, axes: Sequence[str], mesh: Mapping[str, int], sizes: Mapping[str, int], local: str
) -> Spec:
    """Return a random spec: every mesh axis on one of the dimensions that it divides, or on none."""
    held: dict[str, tuple[str, ...]] = dict.fromkeys(dims, ())
    for axis in d.shuffled(axes):
        dim = d.one(dims)
        there = (*held[dim], axis)
        if dim not in local and d.happens(0.7) and sizes.get(dim, 0) % prod(mesh[each] for each in there) == 0:
            held[dim] = there
    return Spec(tuple(dims), tuple(held.values()))


def _via(d: Draw, axes: Sequence[str], mesh: Mapping[str, int], sizes: Mapping[str, int], keys: Sequence[str]) -> str:
    """Return two random specs that can be multiplied without moves."""
    left, right = (KEYS[key].dims for key in keys)
    product = "".join(dict.fromkeys(left + right))
    whole = _spec(d, product, axes, mesh, sizes, "")
    return ", ".join(str(Spec(tuple(dims), tuple(whole.axes_of(dim) for dim in dims))) for dims in (left, right))


# -- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The result of a step: `"trained"`, `"refused"`, or its fault."""

    seed: int
    outcome: str
    text: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether the step breaks the property."""
        return self.outcome not in ("trained", "refused")

    def __str__(self) -> str:
        return f"step {self.seed} {self.outcome}: {self.text}\n{draw(self.seed)}"


class Compiled(Exception):
    """An error after the checks."""


def check(written: Written) -> Verdict:
    """Train two steps on the mesh and on one device, and compare."""
    import jax

    from gspmd import host
    from gspmd.commands import train
    from gspmd.commands.flags import parse
    from gspmd.commands.programs import check_traced
    from gspmd.commands.settings import RunSettings, adapted

    results: dict[str, object] = {}

    def measured(console, settings, arrangement, state) -> None:
        """Replace the report of `--explain`, which is printed once all checks have passed."""
        check_traced(settings, arrangement, state)  # as training does before it builds a model
        try:
            results.update(_on_mesh(settings, arrangement, state))
        except Exception as error:
            raise Compiled(f"{type(error).__name__}: {error}\n{_where(error)}") from error

    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("settings", written.settings_text), ("layout", written.layout_text)):
            Path(folder, f"{name}.toml").write_text(text)
        try:
            flags = ["--config", str(Path(folder, "settings.toml")), "--explain", "--no-compile-cache"]
            settings = parse(RunSettings, flags)
            # The backend is started once for all steps.
            start = mock.patch.object(host, "start", lambda count, *_, **__: jax.devices()[:count])
            explain = mock.patch.object(train, "explain", measured)
            with start, explain, redirect_stdout(StringIO()):
                train.train(adapted(settings))
        except REFUSALS as error:
            return _refusal(written, error)
        except Compiled as error:
            return Verdict(written.seed, "raises behind the checks", str(error)[:3000])
        except Exception as error:
            return Verdict(written.seed, "raises", f"{type(error).__name__}: {str(error)[:2000]}\n{_where(error)}")
    if not results["agrees"]:
        return Verdict(written.seed, "sends what is not planned", str(results["comparison"]))
    wanted = _alone(settings)
    wrong = list(_differences(results["values"], wanted))
    jax.clear_caches()
    return Verdict(written.seed, "differs", "; ".join(wrong[:8])) if wrong else Verdict(written.seed, "trained")


def _refusal(written: Written, error: Exception) -> Verdict:
    """Return the verdict on a refusal, which has to name a line of the layout or a setting that a layout depends on."""
    text = str(error)
    if not any(key in text for key in (*KEYS, *NAMED)):
        return Verdict(written.seed, "refused without a line", text)
    return Verdict(written.seed, "refused", text)


def _where(error: BaseException) -> str:
    """Return the innermost frames of an error."""
    return "".join(traceback.format_tb(error.__traceback__)[-3:])


def _on_mesh(settings, arrangement, state) -> dict[str, object]:
    """Return the comparison of the compiled step with the plan, and the results of two steps."""
    import jax

    import gspmd
    from gspmd.commands.programs import begin, step_of
    from gspmd.training.state import shardings
    from gspmd_models import batch_spec, step

    training, mesh = settings.training, arrangement.mesh
    with arrangement.context():
        update, *arguments = step_of(settings, arrangement, state)
        plan = gspmd.trace(update, *arguments)
        compiled = update.lower(*arguments).compile()
        comparison = gspmd.ledger(compiled).compare(plan)
        begun = begin(None, settings, arrangement)
        stored = {"frozen": training.frozen, "parameter_dtype": training.parameter_dtype}
        start = step.initial_state(begun, settings.optimizer, training.steps, mesh, **stored)
        tokens = jax.device_put(_text(training), shardings(batch_spec(arrangement.layout), mesh))
        key = jax.device_put(jax.random.key(training.seed + 1), jax.NamedSharding(mesh, jax.P()))
        values = _two_steps(compiled, start, tokens, key)
    # Equations for which the compiler chooses have no plan to compare with.
    chosen = "xla" in {arrangement.layout.lowering, *arrangement.layout.lowerings.values()}
    return {"agrees": chosen or comparison.agrees, "comparison": comparison, "values": values}


def _text(training) -> np.ndarray:
    """Return [B, L+1] tokens, each its predecessor plus 1 or 5."""
    steps = np.random.default_rng(0).choice([1, 5], size=(training.batch, training.length + 1))
    return (np.cumsum(steps, axis=1) % 256).astype(np.int32)


def _two_steps(update, state, tokens, key) -> dict[str, np.ndarray]:
    """Return the figures of two steps, and the gradients and parameters after the first."""
    import optax

    state, first = update(state, tokens, key)
    found = {f"parameter {path}": np.asarray(value) for path, value in state.params.items()}
    moments = optax.tree.get(state.optimizer, "mu")
    found |= {f"gradient of {path}": np.asarray(value) for path, value in moments.items()}
    state, second = update(state, tokens, key)
    for number, figures in ((1, first), (2, second)):
        found |= {f"{name} of step {number}": np.asarray(figures[name]) for name in ("loss", "gradient_norm")}
    return found


def _alone(settings) -> dict[str, np.ndarray]:
    """Return the results of the same settings on one device, under the replicated layout."""
    import jax

    import gspmd
    import gspmd_models as models
    from gspmd_models import step

    training, layout = settings.training, Layout.load("replicated")
    types = (jax.sharding.AxisType.Explicit,) * 3
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), axis_types=types, devices=jax.devices()[:1])
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        model = models.build(settings.model, layout, mesh, jax.random.key(training.seed), training.dtype)
        state = step.initial_state(model, settings.optimizer, training.steps, mesh)
        update = step.training_step(model, settings.optimizer, training.steps, training.microbatches)
        return _two_steps(jax.jit(update), state, _text(training), jax.random.key(training.seed + 1))


def _differences(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> Iterator[str]:
    if found.keys() != wanted.keys():
        yield f"{sorted(found.keys() ^ wanted.keys())} are on one side only"
    for name in found.keys() & wanted.keys():
        have, want = found[name], wanted[name]
        if have.shape != want.shape:
            yield f"{name} has shape {have.shape}, not {want.shape}"
            continue
        scale = 1.0 if name.startswith("parameter") else float(np.max(np.abs(want), initial=0.0)) + 1e-6
        off = float(np.max(np.abs(have - want), initial=0.0))
        if not off <= TOLERANCE * scale:
            yield f"{name} is off by {off:.2g}, where the largest is {np.max(np.abs(want), initial=0.0):.2g}"


# -- in processes of their own ----------------------------------------------------------------------------------------


def verdicts(seeds: Sequence[int], seconds: float = SECONDS) -> Iterator[Verdict]:
    """Yield the verdicts on the steps of these seeds, each from a process that may abort or hang."""
    left = list(seeds)
    while left:
        now = left[:TOGETHER]
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder, "told")
            told.touch()
            command = [sys.executable, "-m", __name__, *map(str, now), "--to", str(told)]
            with open(Path(folder, "said"), "w+") as said:
                ended = _ended(command, said, told, seconds)
                said.seek(0)
                last = said.read()[:2000]
            done = [Verdict(**json.loads(line)) for line in told.read_text().splitlines()]
        if len(done) < len(now):
            done.append(Verdict(now[len(done)], ended, last))
        yield from done
        left = left[len(done) :]


def _ended(command: Sequence[str], said, told: Path, seconds: float) -> str:
    """Return how a process ends; one without output for so many seconds is killed."""
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=said, stderr=said, cwd=root) as process:
        size = -1
        while told.stat().st_size != size:
            size = told.stat().st_size
            try:
                return f"ends its process with {process.wait(seconds)}"
            except subprocess.TimeoutExpired:
                continue
        process.kill()
        return f"hangs for {seconds} seconds"


def main() -> None:
    """Check the steps of the given seeds; write a line of JSON for each to a file, or print the faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--to", type=Path, help="the file for the verdicts")
    parser.add_argument("--show", action="store_true", help="print the files of the steps alone")
    options = parser.parse_args()
    if not options.show:
        import tests.conftest  # noqa: F401  eight devices, and programs that are compiled in haste
    for seed in options.seeds:
        if options.show:
            print(draw(seed))
            continue
        verdict = check(draw(seed))
        if options.to:
            with options.to.open("a") as told:
                told.write(json.dumps(vars(verdict)) + "\n")
        else:
            print(verdict if verdict.is_fault else f"step {seed} {verdict.outcome}: {verdict.text}", flush=True)


if __name__ == "__main__":
    main()
