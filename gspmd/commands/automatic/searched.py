"""The search for the layout of a run, on the given mesh or on every mesh of its devices."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import permutations
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

import gspmd
import gspmd_models as models
from gspmd.annotate import Spec
from gspmd.commands.automatic import kept
from gspmd.commands.automatic.found import FoundLayout, own_of
from gspmd.commands.file import File
from gspmd.commands.own import is_own
from gspmd.commands.search.unpriced import remedied, unpriced
from gspmd.display.progress import Progress
from gspmd.display.units import amount_of_bytes, amount_of_seconds
from gspmd.hardware.chips import Chip, chip, chip_of_device
from gspmd.layouts import Layout
from gspmd.lowerings.program import DEFAULT_CHIP
from gspmd.search.answers import NoneFits, SearchResult, Space, document, find
from gspmd.search.answers.together import read_beside
from gspmd.search.pricing import forget
from gspmd.training import ConfigError, processes
from gspmd.training.config import parse_mesh
from gspmd.training.model import Own
from gspmd.training.step import Update
from gspmd.training.syntax import lines_searched
from gspmd_models import ModelConfig
from gspmd_models.decoding.batch import checked, coarse
from gspmd_models.decoding.prefix import most_prompts
from gspmd_models.search.own import OwnProblem, OwnStep
from gspmd_models.search.phases import problem_of, searched
from gspmd_models.search.workload import STEPS, Stored, Workload

Tell = Callable[[str], None]

SHARE = 0.9
"""The share of a device's memory that a layout may fill."""
_AXES = "xyz"
_OWN = "Give a layout of your own in place of auto: --layout NAME or --layout FILE."


@dataclass(frozen=True)
class LayoutQuestion:
    """The question that a search for a layout answers.

    Attributes:
        model: its configuration; for a user's own model, the model.
        parameters: number of its parameters.
        chip: the chip whose seconds and bytes are assumed.
        meshes: the meshes that are tried.
        sizes: batch, length, dtype and everything else that the answer depends on.
        listed: whether the devices are in the table of chips; if not, `chip` stands in for them.
    """

    model: Any
    parameters: int
    chip: Chip
    meshes: Sequence[Mapping[str, int]]
    sizes: Mapping[str, Any]
    listed: bool = True

    @property
    def limit(self) -> float:
        """The bytes that a device may hold."""
        return SHARE * self.chip.hbm_bytes

    @property
    def devices(self) -> str:
        """The devices that the seconds and bytes are for."""
        return self.chip.name if self.listed else f"{self.chip.name}, which stands in for devices that are not listed"

    @property
    def key(self) -> str:
        """A digest of the question, and of the code that answers it."""
        asked = [_code(), SHARE, asdict(self.model), asdict(self.chip), self.listed]
        asked += [[*self.meshes], self.sizes]
        return hashlib.sha256(json.dumps(asked, default=str).encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """Return a digest of the sources: costs are read from programs too, so any change of the code drops kept
    layouts."""
    roots = Path(gspmd.__file__).parent, Path(models.__file__).parent
    files = [file for root in roots for file in sorted(root.rglob("*.[pt][yo]*"))]
    digest = hashlib.sha256(gspmd.__version__.encode())
    for file in files:
        if file.suffix in (".py", ".toml"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def for_training(console: Console, file: File, devices: Sequence[jax.Device]) -> FoundLayout:
    """Return the layout in which a run begins: its own if it is resumed, otherwise a kept or newly found one.

    The console reports it. If there are several processes, the first one searches.

    Args:
        console: the console for messages.
        file: the model and the step; of its sharding only the mesh is used: if it is empty, every mesh of the devices.
        devices: the devices of the run.

    Raises:
        PlanError: the model has parts that are not searched.
        ConfigError: the step has settings that would be priced wrong, or nothing fits in the devices' memory.
    """
    model, training = file.model, file.training
    if training.resume and (found := own_of(training.out)):
        _say(console, found)
        return replace(found, mesh=file.sharding.mesh)
    names = ("batch", "length", "dtype", "microbatches")
    sizes: dict[str, Any] = {name: getattr(training, name) for name in names}
    frozen, dtype = tuple(training.frozen), training.parameter_dtype
    sizes["update"] = Update(file.optimizer, STEPS, frozen=frozen, parameter_dtype=dtype)
    remedy = "Take more devices, or a smaller batch."
    if is_own(file):
        sizes["lines"] = lines_searched(file.sharding.layout)
        count = Own(model).num_parameters(Layout.load(sizes["lines"]))
        return _answered(console, _question(model, count, file.sharding.mesh, devices, sizes), _train_own, remedy)
    if faults := [*unpriced(file, True, ".")]:
        raise ConfigError("cannot search for a layout:", [*faults, _OWN])
    if model.remat != "full":
        remedy = "Take more devices, a smaller batch, or --model.remat full."
    count = model.num_parameters
    return _answered(console, _question(model, count, file.sharding.mesh, devices, sizes), _train, remedy)


def _train_own(question: LayoutQuestion, tell: Tell) -> FoundLayout:
    sizes = question.sizes
    subject, layout = Own(question.model, jnp.dtype(sizes["dtype"])), Layout.load(sizes["lines"])
    step = OwnStep(subject, sizes["update"], sizes["batch"], sizes["length"], layout)
    spaces = (Space(partial(OwnProblem, step, mesh, question.chip, sizes["microbatches"])) for mesh in question.meshes)
    return _found(question, _complete(find(spaces, question.limit, tell)))


def _train(question: LayoutQuestion, tell: Tell) -> FoundLayout:
    sizes = question.sizes
    workload = Workload(question.model, question.chip, **sizes)
    spaces = (Space(partial(problem_of, workload, mesh)) for mesh in question.meshes)
    return _found(question, _complete(find(spaces, question.limit, tell)), f", remat {question.model.remat}")


def _found(question: LayoutQuestion, finding: SearchResult, more: str = "") -> FoundLayout:
    """Return the layout found for a training step; `more` is added to the description of the step."""
    sizes = question.sizes
    parts = f" in {sizes['microbatches']} microbatches" if sizes["microbatches"] > 1 else ""
    step = f"batch {sizes['batch']}, length {sizes['length']}{parts}, {sizes['dtype']}{more}"
    seconds = {"training step": finding.answer.seconds}
    text = document(finding.best, finding.answer, header("training", question, finding, seconds, {"step": step}), {})
    return FoundLayout(text, finding.best.named, seconds, question.devices)


def for_serving(
    console: Console,
    model: ModelConfig,
    mesh: str,
    devices: Sequence[jax.Device],
    dtype: str,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    samples: int,
    chunk: int,
    cache_length: int | None,
    weights: Stored = "dtype",
    cache: Stored = "dtype",
) -> FoundLayout:
    """Return the layout to continue prompts in: to decode, with what differs while prompts are read.

    Args:
        console, devices: as in `for_training`.
        model: the model, whose weights exist.
        mesh: as in `--mesh`; empty for every mesh of the devices.
        dtype: the dtype of activations, and of weights and cache that are not int8.
        prompts, tokens, samples, chunk, cache_length: as in `gspmd_models.decoding.make_batch`.
        weights, cache: as in `gspmd_models.search.workload.Workload`.

    Raises:
        GenerationError: as in `make_batch`.
        PlanError, ConfigError: as in `for_training`.
    """
    checked(model, prompts, tokens, samples=samples, chunk=chunk, cache_length=cache_length)
    longest = max(map(len, prompts))
    room = cache_length or coarse(longest + tokens - 1)
    sizes = {
        "prompts": len(prompts), "samples": samples, "room": room, "dtype": dtype,
        "chunk": min(chunk, coarse(longest - 1)), "weights": weights, "cache": cache,
    }  # fmt: skip
    remedy = "Take more devices, fewer texts, or a shorter cache."
    return _answered(console, _question(model, model.num_parameters, mesh, devices, sizes), _serve, remedy)


def _serve(question: LayoutQuestion, tell: Tell) -> FoundLayout:
    prompts, samples, room, dtype, chunk, *rest = question.sizes.values()
    rows, kinds = prompts * samples, dict(zip(("weights", "cache"), rest))
    workload = Workload(question.model, question.chip, rows, room, dtype, phase="decode", room=room, **kinds)
    spaces = (Space(partial(problem_of, workload, mesh)) for mesh in question.meshes)
    finding = _complete(find(spaces, question.limit, tell))
    decode, answer = finding.best.phase, finding.answer
    tell("how prompts are read")
    # Each part of the cache has the rows of the prompts of its texts.
    mesh = decode.case.mesh
    stored = (line for line in decode.lines(answer.picks) if line.section == "cache")
    cache = Spec.parse(next(line.text for line in stored if line.key == "attention.key"))
    parts = prod(mesh[axis] for axis in cache.axes_of("B"))
    each = most_prompts([text // samples for text in range(rows)], parts)
    prompt = replace(workload, phase="prefill", batch=each * parts, length=chunk)
    prefill = read_beside(problem_of(prompt, mesh), decode, answer, question.limit)
    seconds = {"step of decoding": answer.seconds, f"prefill of {chunk} tokens": prefill.answer.seconds}
    step = f"{rows} texts of {prompts} prompts, cache of {room} tokens, {dtype}"
    step += "".join(f", int8 {name}" for name, kind in kinds.items() if kind == "int8")
    text = document(finding.best, answer, header("serving", question, finding, seconds, {"step": step}), {})
    return FoundLayout(text + prefill.text, finding.best.named, seconds, question.devices)


def _complete(finding: SearchResult) -> SearchResult:
    """Return the result, unless an interrupt came before it was proved: then the interrupt was meant for the run."""
    if not finding.complete:
        raise KeyboardInterrupt
    return finding


def header(
    purpose: str,
    question: LayoutQuestion,
    finding: SearchResult,
    seconds: Mapping[str, float],
    facts: Mapping[str, str],
) -> Iterator[str]:
    """Yield the lines of the comment at the top of the file."""
    best = finding.best
    held = f"{amount_of_bytes(finding.answer.bytes)} of {amount_of_bytes(question.chip.hbm_bytes)} on each device"
    lines = {
        "model": f"{question.parameters:,} parameters",
        "mesh": f"{best.named}: {best.devices} devices",
        **facts,
        "predicted": f"{', '.join(f'{amount_of_seconds(each)} for a {what}' for what, each in seconds.items())}",
        "on": question.devices,
        "memory": f"{held}, of which {SHARE:.0%} may be used",
        "found": finding.proof,
    }
    yield f"A layout for {purpose} on {best.devices} devices, found by --layout auto."
    yield ""
    width = max(map(len, lines))
    yield from (f"{name.ljust(width)}  {text}" for name, text in lines.items())
    yield ""
    yield f"To be used with --layout FILE --mesh {best.named}"


def _question(
    model: Any, parameters: int, mesh: str, devices: Sequence[jax.Device], sizes: Mapping[str, Any]
) -> LayoutQuestion:
    listed = chip_of_device(devices[0].device_kind)
    used = listed or chip(DEFAULT_CHIP)
    if mesh:
        given = parse_mesh(mesh)
        tried = [{axis: size for axis, size in given.items() if size > 1} or given]
    else:
        every = meshes(len(devices), used)
        tried = [*searched(every, model)] if isinstance(model, ModelConfig) else every
    return LayoutQuestion(model, parameters, used, tried, sizes, listed is not None)


def meshes(devices: int, of: Chip) -> list[dict[str, int]]:
    """List every factorization of a number of devices into at most three mesh axes.

    The order of axes only matters if the last ones are within a node and the first ones between nodes.

    Example:
        >>> meshes(8, chip("tpu-v4"))
        [{'x': 8}, {'x': 2, 'y': 4}, {'x': 2, 'y': 2, 'z': 2}]
        >>> meshes(16, chip("h100"))[1:4]
        [{'x': 2, 'y': 8}, {'x': 4, 'y': 4}, {'x': 8, 'y': 2}]
    """
    shapes = {*_factors(devices, 2, len(_AXES))} or {(1,)}
    if of.nodes({"x": devices}) > 1:
        shapes = {order for shape in shapes for order in permutations(shape)}
    return [dict(zip(_AXES, shape)) for shape in sorted(shapes, key=lambda shape: (len(shape), shape))]


def _factors(number: int, least: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a number as a product of at most `most` factors of `least` or more, the smallest
    first."""
    if number >= least:
        yield (number,)
    for first in range(least, number if most > 1 else least):
        if first * first > number:
            return
        if number % first == 0:
            yield from ((first, *rest) for rest in _factors(number // first, first, most - 1))


def _answered(
    console: Console, question: LayoutQuestion, search: Callable[[LayoutQuestion, Tell], FoundLayout], remedy: str
) -> FoundLayout:
    """Return the kept answer, or that of a search; the same in all processes, and report it.

    Args:
        console: the console for messages.
        question: the question.
        search: the function that answers it.
        remedy: advice for the case that nothing fits.
    """

    def searched() -> FoundLayout:
        began = time.monotonic()
        with Progress(console, "Searching the layout") as progress:
            try:
                with remedied(_OWN):
                    found = search(question, lambda text: progress.begin(f"Searching the layout: {text}"))
            except NoneFits as fault:
                raise ConfigError("cannot find a layout:", [_nothing_fits(fault, question), remedy]) from None
            finally:
                forget()
        found = replace(found, took=time.monotonic() - began)
        return kept.save(question.key, found) if is_kept else replace(found, place="in the folder of the run")

    # The code of a user's own model may change, and the cheapest layout with it; the key covers only our code.
    is_kept = isinstance(question.model, ModelConfig)
    told = processes.told(lambda: json.dumps(asdict((kept.load(question.key) if is_kept else None) or searched())))
    found = FoundLayout(**json.loads(told))
    _say(console, found)
    return found


def _say(console: Console, found: FoundLayout) -> None:
    console.print(str(found), soft_wrap=True, markup=False, highlight=False)


def _nothing_fits(fault: NoneFits, question: LayoutQuestion) -> str:
    if fault.candidate is None or fault.nearest is None or fault.over is None:
        tried = "the mesh" if len(question.meshes) == 1 else "any mesh of the devices"
        return f"the sizes of model and batch have none on {tried}."
    held, over, limit = map(amount_of_bytes, (fault.nearest.bytes, fault.over, question.limit))
    fact = f"the smallest, on mesh {fault.candidate.named}, holds {held} on each device, {over} more than the {limit}"
    return f"{fact} that may be used of a {question.chip.name}."
