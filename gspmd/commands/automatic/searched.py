"""The search for a run's layout, on the given mesh or on every mesh of its devices."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
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
from gspmd.commands.automatic.found import COMMANDS, FoundLayout, line_of_use, own_of
from gspmd.commands.file import File, source_length_of
from gspmd.commands.own import is_own, subject
from gspmd.commands.search.unpriced import remedied, unpriced
from gspmd.display.progress import Progress
from gspmd.display.tables import counted
from gspmd.display.units import amount_of_bytes, amount_of_seconds
from gspmd.hardware.chips import Chip, chip, chip_of_device
from gspmd.layouts import Layout
from gspmd.layouts.rules.keys import ENCODER, keys_of_override
from gspmd.lowerings.program import DEFAULT_CHIP
from gspmd.search.answers import NoneFits, SearchResult, Space, document, factorings, find
from gspmd.search.answers.together import Reading, activations, read_beside, section
from gspmd.search.pricing import forget
from gspmd.training import ConfigError, processes
from gspmd.training.config import parse_mesh
from gspmd.training.model import Own
from gspmd.training.step import Update
from gspmd.training.syntax import lines_searched
from gspmd_models import ModelConfig
from gspmd_models.decoding.batch import checked, coarse, read_sources
from gspmd_models.decoding.cache import CROSS
from gspmd_models.decoding.prefix import most_prompts
from gspmd_models.search.own import OwnProblem, OwnStep
from gspmd_models.search.phases import problem_of, searched
from gspmd_models.search.workload import STEPS, Stored, Workload

Tell = Callable[[str], None]

SHARE = 0.9
"""The fraction of a device's memory that a layout may fill."""
_OWN = "Give a layout of your own in place of auto: --layout NAME or --layout FILE."


@dataclass(frozen=True)
class LayoutQuestion:
    """Everything on which the result of a search for a layout depends.

    Attributes:
        model: the configuration of the model, or a custom model.
        parameters: number of parameters of the model.
        chip: the chip for which seconds and bytes are predicted.
        meshes: the meshes to be searched.
        sizes: batch, length, dtype and all other settings on which the result depends.
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
        """The bytes that one device may hold."""
        return SHARE * self.chip.hbm_bytes

    @property
    def devices(self) -> str:
        """The devices for which seconds and bytes are predicted, as text."""
        return self.chip.name if self.listed else f"{self.chip.name}, which stands in for devices that are not listed"

    @property
    def key(self) -> str:
        """A hash of the question and of the source code that answers it."""
        asked = [_code(), SHARE, asdict(self.model), asdict(self.chip), self.listed]
        asked += [[*self.meshes], self.sizes]
        return hashlib.sha256(json.dumps(asked, default=str).encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """Return a hash of the source code.

    The cost of a layout depends on the programs that the code builds, so a cached layout is not used after the code has
    changed.
    """
    roots = Path(gspmd.__file__).parent, Path(models.__file__).parent
    files = [file for root in roots for file in sorted(root.rglob("*.[pt][yo]*"))]
    digest = hashlib.sha256(gspmd.__version__.encode())
    for file in files:
        if file.suffix in (".py", ".toml"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def for_training(console: Console, file: File, devices: Sequence[jax.Device]) -> FoundLayout:
    """Return the layout in which a run begins, and report it on the console.

    A resumed run uses the layout that was found when it began, if its folder has this layout. Otherwise the layout
    comes from the cache or from a new search. With several processes, the first one searches.

    Args:
        console: the console for messages.
        file: the model and the training step. If `sharding.mesh` is empty, every mesh of the devices is searched. For a
            custom model, `sharding.layout` names the file of its lines.
        devices: the devices of the run.

    Raises:
        PlanError: the model has parts that are not searched.
        ConfigError: the step has settings that would be priced wrongly, or no layout fits in the devices' memory.
    """
    model, training = file.model, file.training
    if training.resume and (found := own_of(training.out)):
        _say(console, found)
        return replace(found, mesh=file.sharding.mesh)
    names = ("batch", "length", "dtype", "microbatches")
    sizes: dict[str, Any] = {name: getattr(training, name) for name in names}
    frozen, dtype = tuple(training.frozen), training.parameter_dtype
    sizes["update"] = Update(file.optimizer, STEPS, frozen=frozen, parameter_dtype=dtype)
    remedy = "Use more devices, or a smaller model or batch."
    if is_own(file):
        sizes["lines"] = lines_searched(file.sharding.layout)
        count = subject(file).num_parameters(Layout.load(sizes["lines"]))
        return _answered(console, _question(model, count, file.sharding.mesh, devices, sizes), _train_own, remedy)
    if faults := [*unpriced(file, True, ".")]:
        raise ConfigError("cannot search for a layout:", [*faults, _OWN])
    if model.remat != "full":
        remedy = "Use more devices, a smaller model or batch, or --model.remat full."
    if model.encoder_layers:
        sizes["source_length"] = source_length_of(file)
    count = model.num_parameters
    return _answered(console, _question(model, count, file.sharding.mesh, devices, sizes), _train, remedy)


def _train_own(question: LayoutQuestion, tell: Tell) -> FoundLayout:
    sizes = question.sizes
    model, layout = Own(question.model, jnp.dtype(sizes["dtype"])), Layout.load(sizes["lines"])
    step = OwnStep(model, sizes["update"], sizes["batch"], sizes["length"], layout)
    spaces = (Space(partial(OwnProblem, step, mesh, question.chip, sizes["microbatches"])) for mesh in question.meshes)
    return _found(question, _complete(find(spaces, question.limit, tell)))


def _train(question: LayoutQuestion, tell: Tell) -> FoundLayout:
    sizes = question.sizes
    workload = Workload(question.model, question.chip, **sizes)
    spaces = (Space(partial(problem_of, workload, mesh)) for mesh in question.meshes)
    return _found(question, _complete(find(spaces, question.limit, tell)), f", remat {question.model.remat}")


def _found(question: LayoutQuestion, finding: SearchResult, more: str = "") -> FoundLayout:
    """Turn the result of a search for a training step into a `FoundLayout`; `more` ends the description of the step."""
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
    sources: Sequence[Sequence[int]] | None = None,
    samples: int,
    beams: int = 0,
    chunk: int,
    cache_length: int | None,
    source_length: int | None = None,
    weights: Stored = "dtype",
    cache: Stored = "dtype",
) -> FoundLayout:
    """Return the layout for generating text.

    It has the lines for decoding, and the lines that are different while sources and prompts are read.

    Args:
        console, devices: as in `for_training`.
        model: the configuration of the model.
        mesh: as in `--mesh`; empty for every mesh of the devices.
        dtype: the dtype of activations, and of those weights and caches that are not int8.
        prompts, tokens, sources, samples, beams, chunk, cache_length, source_length: as in
            `gspmd_models.decoding.make_batch`.
        weights, cache: as in `gspmd_models.search.workload.Workload`.

    Raises:
        GenerationError: as in `make_batch`.
        PlanError, ConfigError: as in `for_training`.
    """
    begun, read = read_sources(model, prompts, sources, source_length)
    checked(model, begun, tokens, samples=beams or samples, chunk=chunk, cache_length=cache_length)
    longest = max(map(len, begun))
    room = cache_length or coarse(longest + tokens - 1)
    # The last token of a prompt is read by the first step of decoding.
    part = min(chunk, coarse(longest - 1)) if longest > 1 else 0
    source = (source_length or coarse(max(map(len, read)))) if read else 0
    sizes = {
        "prompts": len(begun), "samples": samples, "beams": beams, "room": room, "dtype": dtype, "chunk": part,
        "source": source, "weights": weights, "cache": cache,
    }  # fmt: skip
    remedy = "Use more devices, fewer texts, or a shorter cache."
    return _answered(console, _question(model, model.num_parameters, mesh, devices, sizes), _serve, remedy)


def _serve(question: LayoutQuestion, tell: Tell) -> FoundLayout:
    sizes = question.sizes
    each_prompt = sizes["beams"] or sizes["samples"]
    workload = Workload(
        question.model, question.chip, each_prompt * sizes["prompts"], sizes["room"], sizes["dtype"], phase="decode",
        room=sizes["room"], source_length=sizes["source"], beams=sizes["beams"], weights=sizes["weights"],
        cache=sizes["cache"],
    )  # fmt: skip
    spaces = (Space(partial(problem_of, workload, mesh)) for mesh in question.meshes)
    finding = _complete(find(spaces, question.limit, tell))
    seconds, sections = _read_beside(question, finding, workload, tell)
    step = f"{counted(workload.batch, 'text')} of {counted(sizes['prompts'], 'prompt')}"
    step += f", cache of {workload.room} tokens, {workload.dtype}"
    step += f", sources of {sizes['source']} tokens" if sizes["source"] else ""
    step += "".join(f", int8 {name}" for name in ("weights", "cache") if sizes[name] == "int8")
    text = document(finding.best, finding.answer, header("serving", question, finding, seconds, {"step": step}), {})
    return FoundLayout(text + sections, finding.best.named, seconds, question.devices)


def _read_beside(
    question: LayoutQuestion, finding: SearchResult, workload: Workload, tell: Tell
) -> tuple[dict[str, float], str]:
    """Return the seconds of each phase, and the text of the layout's sections for reading sources and prompts."""
    decode, answer, source, chunk = (
        finding.best.phase,
        finding.answer,
        question.sizes["source"],
        question.sizes["chunk"],
    )
    # Prompts are read on the devices that continue their texts, so every part of the batch has as many rows as the part
    # with the most prompts.
    mesh = decode.case.mesh
    stored = (line for line in decode.lines(answer.picks) if line.section == "cache")
    cache = Spec.parse(next(line.text for line in stored if line.key == "attention.key"))
    parts = prod(mesh[axis] for axis in cache.axes_of("B"))
    each_prompt = workload.batch // question.sizes["prompts"]
    each = most_prompts([text // each_prompt for text in range(workload.batch)], parts)
    workload = replace(workload, batch=each * parts, beams=0)

    def reading(workload: Workload, kept: Mapping[str, str]) -> Reading:
        return read_beside(problem_of(workload, mesh), decode, answer, question.limit, kept)

    # The lines of the encoder and of cross-attention are chosen for encoding sources; the layout for reading prompts
    # must keep those of cross-attention.
    seconds, inner, beside = {"step of decoding": answer.seconds}, dict[str, str](), dict[str, str]()
    if source:
        tell("how sources are encoded")
        encode = reading(replace(workload, phase="encode"), {})
        seconds[f"source of {source} tokens"] = encode.answer.seconds
        of_encoder = keys_of_override(ENCODER)
        inner = {key: text for key, text in encode.lines.items() if key in of_encoder}
        beside = {key: text for key, text in encode.lines.items() if key.partition(".")[0] == CROSS.partition(".")[0]}
    if chunk:
        tell("how prompts are read")
        kept = {CROSS: beside[CROSS]} if source else {}
        prefill = reading(replace(workload, phase="prefill", length=chunk), kept)
        seconds[f"prefill of {chunk} tokens"] = prefill.answer.seconds
        beside = prefill.after(beside)
    before = activations(decode, answer)
    return seconds, section("prefill", beside, before) + section(ENCODER, inner, before | beside)


def _complete(finding: SearchResult) -> SearchResult:
    """Return the result of a search, or raise the interrupt that stopped the search before its proof.

    The interrupt then stops the run.
    """
    if finding.interrupt:
        raise finding.interrupt
    return finding


def header(
    purpose: str,
    question: LayoutQuestion,
    finding: SearchResult,
    seconds: Mapping[str, float],
    facts: Mapping[str, str],
) -> Iterator[str]:
    """Yield the lines of the comment at the top of the layout file; `purpose` is training or serving."""
    best, command = finding.best, COMMANDS[purpose]
    held = f"{amount_of_bytes(finding.answer.bytes)} of {amount_of_bytes(question.chip.hbm_bytes)} on each device"
    lines = {
        "model": f"{question.parameters:,} parameters",
        "mesh": f"{best.named}: {best.devices} devices",
        **facts,
        "predicted": f"{', '.join(f'{amount_of_seconds(each)} for a {what}' for what, each in seconds.items())}",
        "on": question.devices,
        "memory": f"{held}, of which {SHARE:.0%} may be used",
        "proved": finding.proof,
    }
    yield f"A layout for {purpose} on {best.devices} devices, found by {command} --layout auto."
    yield ""
    width = max(map(len, lines))
    yield from (f"{name.ljust(width)}  {text}" for name, text in lines.items())
    yield ""
    yield line_of_use(command, best.named)


def _question(
    model: Any, parameters: int, mesh: str, devices: Sequence[jax.Device], sizes: Mapping[str, Any]
) -> LayoutQuestion:
    listed = chip_of_device(devices[0].device_kind)
    used = listed or chip(DEFAULT_CHIP)
    if mesh:
        given = parse_mesh(mesh)
        tried = [{axis: size for axis, size in given.items() if size > 1} or given]
    else:
        every = factorings(len(devices), used)
        tried = [*searched(every, model)] if isinstance(model, ModelConfig) else every
    return LayoutQuestion(model, parameters, used, tried, sizes, listed is not None)


def _answered(
    console: Console, question: LayoutQuestion, search: Callable[[LayoutQuestion, Tell], FoundLayout], remedy: str
) -> FoundLayout:
    """Return the layout that answers a question, from the cache or else from a new search, and report it.

    The first process looks in the cache and searches, and tells the other processes the layout.

    Args:
        console: the console for messages.
        question: the question, which is passed to `search` and has the layout's key in the cache.
        search: the function that runs the search.
        remedy: advice for the case that no layout fits.
    """

    def searched() -> FoundLayout:
        began = time.monotonic()
        with Progress(console, "Searching for a layout") as progress:
            try:
                with remedied(_OWN):
                    found = search(question, lambda text: progress.begin(f"Searching for a layout: {text}"))
            except NoneFits as fault:
                raise ConfigError("cannot find a layout:", [_nothing_fits(fault, question), remedy]) from None
            finally:
                forget()
        found = replace(found, took=time.monotonic() - began)
        return kept.save(question.key, found) if is_kept else replace(found, place="in the folder of the run")

    # The code of a custom model may change, and the cheapest layout with it; the key covers only our code.
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
        return f"the sizes of model and batch have no layout on {tried}."
    held, over, limit = map(amount_of_bytes, (fault.nearest.bytes, fault.over, question.limit))
    known = "" if fault.nearest.complete else " found"
    where = f"on mesh {fault.candidate.named}"
    fact = f"the smallest{known}, {where}, holds {held} on each device, {over} more than the {limit}"
    return f"{fact} that may be used of a {question.chip.name}."
