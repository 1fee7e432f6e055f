"""`gspmd generate`: check the settings, load the model, and write the texts."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

import gspmd
import gspmd_models as models
from gspmd import host
from gspmd.commands import automatic, hub, overview, own, runner
from gspmd.commands.generate_settings import DOING, GenerateSettings, ServingSharding, parse
from gspmd.commands.settings import RunSettings
from gspmd.commands.source import Source, layout_of, own_run, tokenizer_of
from gspmd.display import console as printing
from gspmd.display.progress import Progress
from gspmd.display.tables import counted
from gspmd.display.units import amount_of_seconds
from gspmd.interruption import number_of
from gspmd.layouts import Layout
from gspmd.reading import ReadError, parse_json, read_json, read_text
from gspmd.training.arrangement import make_mesh, start
from gspmd.training.checkpoints import load_parameters, newest_intact
from gspmd.training.config import ConfigError
from gspmd.training.model import Own
from gspmd.training.reporting import report
from gspmd.training.run.signals import Stop
from gspmd.training.syntax import lines_searched
from gspmd_models import checkpoints, decoding


def run(argv: Sequence[str], script: str = "", settings: GenerateSettings | None = None) -> int:
    """Run `gspmd generate`; return its exit code, which is 2 for bad input and 130 for an interrupt.

    Args:
        argv: the flags.
        script: if a file in scripts/ was started instead of `gspmd`, its name, for the help text.
        settings: the settings, if the flags have been parsed already.
    """
    begin = partial(main, script=script, settings=settings)
    return runner.guarded(begin, argv, called="" if script else "gspmd generate")


def main(argv: Sequence[str], script: str = "", settings: GenerateSettings | None = None) -> int:
    """Parse the flags, unless settings are given; load the model, and write the texts."""
    settings = settings or parse(argv, script)
    try:
        return generate(settings)
    except (checkpoints.CheckpointError, decoding.GenerationError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print("\nInterrupted.", file=sys.stderr)
        return 128 + number_of(stopped)


def generate(settings: GenerateSettings) -> int:
    """Continue the prompts or, with --explain, print the bytes that the programs would send and hold."""
    prompts, sampling = prompts_of(settings), decoding.Sampling(**settings.sampling.given)
    refuse_with_beams(settings)
    folder, console = Path(hub.found(settings.checkpoint)), printing.console(120, stderr=True)
    if run := own_run(folder):
        return generate_own(console, settings, folder, run, prompts, sampling)
    source = Source.at(folder)
    config = decoding.for_serving(source.config)
    sampling = sampling_of(console, settings, folder if source.run is None else folder / "tokenizer")
    if settings.unstacked and config.encoder_layers:
        raise ConfigError(
            DOING, ["--unstacked is for decoder-only models, and this one has an encoder; leave out --unstacked."]
        )
    if settings.chat and config.encoder_layers:
        raise ConfigError(DOING, ["--chat is for decoder-only models, and this one has an encoder; leave out --chat."])
    ids = ids_of(settings, source.tokenizer, prompts, source=bool(config.encoder_layers))
    stops = sorted(source.tokenizer.ends)
    decoding.check_beams(
        settings.beams, settings.length_penalty, settings.samples, False, config.vocabulary, len(stops), settings.n_best
    )
    begins, given = beginnings(settings, source, config, ids)
    sharding, named = arranged(console, settings, config, begins, given)
    config = replace(config, stacked=not settings.unstacked)
    layout = source.layout(settings.decode_layout or named, sharding)
    prefill = source.layout(settings.prefill_layout or named, sharding)
    sizes = {dim: size for dim, size in config.sizes(batch=1, length=1).items() if dim not in "BLTG"}
    with Progress(console, "Starting the devices"):
        kept = host.keep_compiled(settings.compile_cache)
        mesh = make_mesh(sharding, layout.phase("decode"), sizes, host_devices=1)
    dtype = dtype_on([*mesh.devices.flat], settings)
    job: dict[str, Any] = given | {
        name: getattr(settings, name) for name in ("samples", "beams", "cache_length", "source_length")
    }
    burst = min(settings.burst, max(settings.tokens, 1))
    options: dict[str, Any] = {"chunk": settings.chunk, "burst": burst, "int8": settings.cache == "int8"}
    with jax.set_mesh(mesh), gspmd.lowering(layout.lowering or "auto"), Stop("after these tokens") as stop:
        batch = decoding.make_batch(config, layout, prefill, mesh, begins, settings.tokens, chunk=settings.chunk, **job)
        decoding.check_seeds(settings.seed, batch.texts)
        decode = batch.sizes.decode
        shapes = models.abstract(config, decode, mesh, dtype, stored=settings.weights or dtype)
        planned = models.Generator(shapes, layout, prefill, **options)  # Raises the faults of its settings.
        if settings.explain:
            overview.explain(printing.console(120), planned, batch.sizes)
            return 0
        overview.check_memory(planned, batch.sizes, mesh)
        report.header(console, overview.facts(source, batch.sizes, mesh, dtype) | {"programs": kept})
        with Progress(console, "Loading the model"):
            model, taken = source.load(decode, mesh, dtype, int8=settings.weights == "int8")
            model = models.unstack(model, free=True) if settings.unstacked else model
        console.print(f"Loaded: {taken}.", soft_wrap=True, markup=False)
        ended: set[int] = set()
        generator = models.Generator(model, layout, prefill, **options)
        del model  # The generator may move its weights to a different order in memory.
        bursts = generator.stream(
            begins, settings.tokens, sampling=sampling, seed=settings.seed, stop=stops,
            ended=ended, length_penalty=settings.length_penalty, n_best=settings.n_best, **job,
        )  # fmt: skip
        each = settings.samples * settings.n_best  # at least one of the two is 1
        texts = [decoding.Text(source.tokenizer, of, settings.stop) for of in begins for _ in range(each)]
        shown = [settings.target_prompt] * len(ids) if given else prompts_shown(settings, prompts)
        write(console, shown, texts, unless_stopped(bursts, stop), ended)
    return 0


def beginnings(
    settings: GenerateSettings, source: Source, config: models.ModelConfig, ids: list[list[int]]
) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the first tokens of each text, and keyword arguments of programs: `sources` for a model with an encoder.

    Raises:
        ConfigError: --target-prompt or --source-length is given for a decoder-only model.
    """
    if config.encoder_layers:
        target = source.tokenizer.encode(settings.target_prompt, special=False) if settings.target_prompt else []
        return [target] * len(ids), {"sources": ids}
    for flag, given in (("target-prompt", settings.target_prompt), ("source-length", settings.source_length)):
        if given:
            fault = f"--{flag} is for models with an encoder, and this model is decoder-only: it continues --prompt."
            raise ConfigError(DOING, [fault, "Leave it out."])
    return ids, {}


def sampling_of(console: Console, settings: GenerateSettings, folder: Path) -> decoding.Sampling:
    """Return the sampling settings; those that no flag gives come from generation_config.json.

    The settings that come from the file are printed.

    Raises:
        ConfigError: the file has settings that are not supported, and no flag allows ignoring them.
    """
    given, use = settings.sampling.given, settings.sampling.generation_config
    if use == "ignored":
        return decoding.Sampling(**given)
    found = checkpoints.GenerationConfig.read(folder)
    if found.unsupported and use == "whole":
        which = "it" if len(found.unsupported) == 1 else "them"
        remedy = f"--generation-config supported leaves {which} out, and --generation-config ignored the whole file."
        raise ConfigError(DOING, [found.fault, remedy])
    taken = {} if settings.beams else {name: each for name, each in found.settings.items() if name not in given}
    said = [f"{name} {each:g}" for name, each in taken.items()]
    said += [f"{name} left out" for name in found.unsupported]
    if found.beams > 1 and not settings.beams:
        said.append(f"no search with {found.beams} beams, which --beams {found.beams} asks for")
    if said:
        console.print(f"From generation_config.json: {', '.join(said)}.", soft_wrap=True, highlight=False, markup=False)
    return decoding.Sampling(**(taken | given))


def refuse_with_beams(settings: GenerateSettings) -> None:
    """Raise an error about flags that do not apply to beam search or, without --beams, apply only to beam search.

    Raises:
        ConfigError: such flags are given; the message names them.
    """
    usual = GenerateSettings()
    changed = [*settings.sampling.given]
    changed += [name for name in ("samples", "seed") if getattr(settings, name) != getattr(usual, name)]
    if settings.beams and changed:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise ConfigError(DOING, [f"--beams finds the likeliest text and draws none; leave out {named}."])
    searching = [name for name in ("length_penalty", "n_best") if getattr(settings, name) != getattr(usual, name)]
    if not settings.beams and searching:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in searching)
        verb, pronoun = ("is", "it") if len(searching) == 1 else ("are", "them")
        raise ConfigError(DOING, [f"{named} {verb} for beam search; add --beams, or leave {pronoun} out."])


def generate_own(
    console: Console,
    settings: GenerateSettings,
    folder: Path,
    run: RunSettings,
    prompts: Sequence[str],
    sampling: decoding.Sampling,
) -> int:
    """Continue prompts with a run's custom model or, with --explain, print the bytes that a step sends and holds."""
    tokenizer = tokenizer_of(folder)
    subject = own.subject(run)
    refuse_for_own(settings, subject)
    vocabulary = subject.fixed_sizes().get("V", 256)
    ids = decoding.read_prompts(
        vocabulary, ids_of(settings, tokenizer, prompts), settings.tokens,
        samples=settings.samples, chunk=settings.chunk, cache_length=settings.cache_length,
    )  # fmt: skip
    texts = settings.samples * len(ids)
    decoding.check_seeds(settings.seed, texts)
    named = layout_of(folder, run, settings.sharding.layout, settings.sharding)
    with Progress(console, "Starting the devices"):
        kept = host.keep_compiled(settings.compile_cache)
        mesh = make_mesh(settings.sharding, named.one_position(), subject.fixed_sizes(), host_devices=1)
    subject = replace(subject, dtype=dtype_on([*mesh.devices.flat], settings))
    room = settings.cache_length or decoding.coarse(max(map(len, ids)) + settings.tokens - 1)
    with jax.set_mesh(mesh), gspmd.lowering(named.lowering or "auto"), Stop("after these tokens") as stop:
        rows, layout = decoding.fewest_rows(subject, named, mesh, texts, room)
        burst = min(settings.burst, max(settings.tokens, 1))
        writer = decoding.Stepwise(subject, layout, rows, room, settings.chunk, burst)
        like = {
            path: jax.ShapeDtypeStruct(
                row.shape,
                jnp.dtype(subject.dtype) if row.is_matrix and not row.float32 else jnp.float32,
                sharding=jax.NamedSharding(mesh, row.spec.partition_spec()),
            )
            for path, row in subject.rows(layout).items()
        }
        if settings.explain:
            overview.explain_own(printing.console(120), writer, like)
            return 0
        facts = overview.facts_of_own(run.model_class, subject, layout, mesh)
        report.header(console, facts | {"programs": kept})
        with Progress(console, "Loading the model"):
            step = newest_intact(folder, partial(print, file=sys.stderr), "cannot load the parameters:")
            params = load_parameters(folder, step, like)
        console.print(f"Loaded: step {step} of the run.", soft_wrap=True, markup=False)
        ended: set[int] = set()
        bursts = writer.stream(
            params, ids, settings.tokens, samples=settings.samples, sampling=sampling, seed=settings.seed,
            stop=sorted(tokenizer.ends), ended=ended,
        )  # fmt: skip
        written = [decoding.Text(tokenizer, of, settings.stop) for of in ids for _ in range(settings.samples)]
        write(console, prompts_shown(settings, prompts), written, unless_stopped(bursts, stop), ended)
    return 0


def refuse_for_own(settings: GenerateSettings, subject: Own) -> None:
    """Raise an error about flags that custom models do not support.

    Raises:
        ConfigError: some flags are not supported; the message lists every fault.
    """
    faults = []
    if not subject.decodes:
        faults.append(
            f"{subject.name}, a custom model, lacks the methods kept and step, which decode token by "
            "token; see gspmd.training.model.Decoder."
        )
    for flag in ("beams", "target-prompt", "source-length"):
        if getattr(settings, flag.replace("-", "_")):
            faults.append(f"--{flag} is for the models that come with gspmd; leave it out.")
    for flag in ("weights", "cache"):
        if getattr(settings, flag):
            faults.append(f"--{flag} int8 is for the models that come with gspmd; leave it out.")
    if settings.unstacked:
        faults.append("--unstacked is for the models that come with gspmd; leave it out.")
    for flag in ("prefill-layout", "decode-layout"):
        if getattr(settings, flag.replace("-", "_")):
            faults.append(f"--{flag}: a custom model has one layout for reading and decoding; give it as --layout.")
    if lines_searched(settings.sharding.layout) is not None:
        faults.append("no layout is searched for it here; leave --layout out to use the run's own, or name a file.")
    if faults:
        raise ConfigError(DOING, faults)


def arranged(
    console: Console,
    settings: GenerateSettings,
    config: models.ModelConfig,
    begins: Sequence[Sequence[int]],
    given: dict[str, Any],
) -> tuple[ServingSharding, str | Layout]:
    """Return the sharding and the layout of --layout; for `auto`, a search chooses the mesh and the layout."""
    sharding = settings.sharding
    if not automatic.asks_for_search(sharding.layout, DOING):
        return sharding, sharding.layout
    if settings.prefill_layout or settings.decode_layout:
        fault = "--layout auto finds the layout of both phases; leave out --prefill-layout and --decode-layout."
        raise ConfigError(DOING, [fault])
    from gspmd.commands.automatic.searched import for_serving  # Only this layout needs the search.

    with Progress(console, "Starting the devices"):
        devices = start(sharding, host_devices=1)
    found = for_serving(
        console, config, sharding.mesh, devices, dtype_on(devices, settings), begins, settings.tokens, **given,
        samples=settings.samples, beams=settings.beams, chunk=settings.chunk, cache_length=settings.cache_length,
        source_length=settings.source_length,
        weights=settings.weights or "dtype", cache=settings.cache or "dtype",
    )  # fmt: skip
    return replace(sharding, mesh=found.mesh), found.layout


def dtype_on(devices: Sequence[jax.Device], settings: GenerateSettings) -> str:
    """Return the dtype in which the model computes on these devices."""
    return settings.dtype or ("float32" if devices[0].platform == "cpu" else "bfloat16")


def unless_stopped(bursts: Iterator[decoding.Burst], stop: Stop) -> Iterator[decoding.Burst]:
    """Yield the bursts of tokens until an interrupt.

    Interrupts are polled, because JAX would lose an exception that is raised while it computes.
    """
    while not stop.asked:
        burst = next(bursts, None)
        if burst is None:
            return
        yield burst
    stop.interrupt()


def ids_of(
    settings: GenerateSettings, tokenizer: checkpoints.Tokenizer, prompts: Sequence[str], *, source: bool = False
) -> list[list[int]]:
    """Return the token ids of each prompt, encoded as a text, as the source of an encoder, or as a chat turn.

    Raises:
        ConfigError: the file of messages cannot be read.
        CheckpointError: the chat template is missing or faulty, or refuses the messages.
    """
    if not settings.chat:
        return [*map(tokenizer.source if source else tokenizer.encode, prompts)]
    before = [{"role": "system", "content": settings.system}] if settings.system else []
    before += messages_of(settings.messages) if settings.messages else []
    if settings.system and any(turn["role"] == "system" for turn in before[1:]):
        raise ConfigError(DOING, [f"{settings.messages!r} already has a system message; leave out --system."])
    chats = [[*before, {"role": "user", "content": prompt}] for prompt in prompts] or [before]
    variables = dict(map(variable_of, settings.chat_variable))
    return [tokenizer.chat(turns, template=settings.chat_template, **variables) for turns in chats]


def variable_of(given: str) -> tuple[str, Any]:
    """Parse a variable of a chat template; return its name and value.

    >>> variable_of("enable_thinking=false"), variable_of("date=1 May")
    (('enable_thinking', False), ('date', '1 May'))

    Raises:
        ConfigError: the text is not NAME=VALUE, or NAME is an argument that every template gets.
    """
    name, equals, value = given.partition("=")
    taken = ("self", "messages", "template", "prompt", "add_generation_prompt")
    if not equals or not name.isidentifier() or name in taken:
        fault = f"--chat-variable {given!r} is not NAME=VALUE, with the name of a variable that the template reads."
        raise ConfigError(DOING, [fault])
    try:
        return name, parse_json(value)
    except ReadError:
        return name, value


def messages_of(name: str) -> list[dict[str, Any]]:
    """Return the messages of a chat in a file.

    Raises:
        ConfigError: the file cannot be read, or does not contain a list of messages.
    """
    try:
        found = read_json(name)
    except ReadError as error:
        raise ConfigError(DOING, [f"the messages in {name!r} cannot be read: {error}."]) from None
    turns = found if isinstance(found, list) else []
    if not turns or not all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in turns):
        fault = f'{name!r} must be a list of messages, [{{"role": "user", "content": "..."}}, ...].'
        raise ConfigError(DOING, [fault])
    return turns


def prompts_shown(settings: GenerateSettings, prompts: Sequence[str]) -> Sequence[str]:
    """Return the text printed before each generated text: its prompt, or nothing in a chat."""
    return [""] * max(1, len(prompts)) if settings.chat else prompts


def prompts_of(settings: GenerateSettings) -> list[str]:
    """Return the prompts of the flags, then the prompt of the file; a chat may have messages but no prompt.

    Raises:
        ConfigError: there is no prompt, or it cannot be read; or flags for chats are given without --chat.
    """
    prompts, name = list(settings.prompt), settings.prompt_file
    names = ("system", "messages", "chat-template", "chat-variable")
    flags = [flag for flag in names if getattr(settings, flag.replace("-", "_"))]
    if flags and not settings.chat:
        raise ConfigError(DOING, [f"--{flags[0]} is for a chat; add --chat, or leave it out."])
    if name:
        try:
            prompts.append(sys.stdin.read() if name == "-" else read_text(name))
        except (OSError, UnicodeDecodeError, ReadError) as error:
            reason = error if isinstance(error, ReadError) else getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(DOING, [f"the prompt in {name!r} cannot be read: {reason}."]) from None
    given = (*prompts, settings.system)
    if any("\ud800" <= letter <= "\udfff" for prompt in given for letter in prompt):  # Bytes that Python escaped.
        raise ConfigError(DOING, ["a prompt is not UTF-8."])
    if not prompts and not settings.messages:
        raise ConfigError(DOING, ["there is no prompt; give --prompt TEXT, or --prompt-file FILE (- for stdin)."])
    return prompts


def write(
    console: Console,
    prompts: Sequence[str],
    texts: Sequence[decoding.Text],
    bursts: Iterator[decoding.Burst],
    ended: set[int],
) -> None:
    """Print the texts in order; each text is printed while it is generated, once the text before it has ended.

    Args:
        console: the console for messages that are not part of a text.
        prompts: the prompts; the same number of texts begins with each prompt.
        texts: the texts, still empty.
        bursts: the generated tokens of the texts, in bursts.
        ended: a set; the function adds to it the index of every text that ends with a stop string, or with an id that
            has no token.
    """
    each, at, count, first, seconds = len(texts) // len(prompts), 0, 0, 0.0, 0.0
    waiting: list[str] = []
    with ExitStack() as waiting_for:
        waiting_for.enter_context(Progress(console, "Compiling"))
        for burst in bursts:
            waiting_for.close()
            count += sum(map(len, burst.tokens))
            if not (count or all(burst.ended)):  # A beam search is still running.
                continue
            if not waiting:
                first, scores = burst.seconds, burst.scores if each > 1 else ()
                waiting = [_title(n, len(texts), scores) + prompts[n // each] for n in range(len(texts))]
            seconds = burst.seconds
            for number, (text, tokens) in enumerate(zip(texts, burst.tokens)):
                waiting[number] += text.add(tokens)
                if text.ended:
                    ended.add(number)
                elif burst.ended[number]:
                    waiting[number] += text.end()
            while at < len(texts):
                over = texts[at].ended or burst.ended[at]
                print(waiting[at], end="\n" if over else "", flush=True)
                waiting[at] = ""
                if not over:
                    break
                at += 1
            if at == len(texts):
                break
    later = count - len(texts)
    speed = f", then {later / (seconds - first):,.1f} tokens per second" if later > 0 and seconds > first else ""
    when = "the first" if speed or count <= len(texts) else "all"  # A beam search yields all tokens together.
    console.print(f"{counted(count, 'token')}: {when} after {amount_of_seconds(first)}{speed}.", highlight=False)
    for number, text in enumerate(texts, 1):
        if text.unknown is not None:
            which = f"Text {number}" if len(texts) > 1 else "The text"
            said = f"{which} ended at id {text.unknown:,}, for which the model has a row but the tokenizer no token."
            console.print(said, soft_wrap=True, highlight=False)


def _title(number: int, count: int, scores: Sequence[float]) -> str:
    """Return the line that is printed above a text, or "" if there is only one text.

    The line shows the text's score in a beam search (`beam_loop`), if `scores` has any.
    """
    if count == 1:
        return ""
    return f"=== text {number + 1} of {count}{f', score {scores[number]:.4f}' if scores else ''} ===\n"
