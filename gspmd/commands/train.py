"""`gspmd train`: check the settings, read the text, and run the training loop."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from gspmd import host
from gspmd.commands import automatic, own, runner
from gspmd.commands.automatic import FoundLayout
from gspmd.commands.file import File, group_faults
from gspmd.commands.header import in_short, show_run
from gspmd.commands.programs import abstract_state, check_traced, explain, make_program, sample
from gspmd.commands.settings import RunSettings, adapted, facts_of, of_checkpoint, parse
from gspmd.commands.source import bytes_of
from gspmd.display import console as printing
from gspmd.display.progress import Progress
from gspmd.training import ConfigError, TrainingConfig, data, fit, processes
from gspmd.training.arrangement import Arrangement, arrange, check_same_form, start
from gspmd.training.checkpoints import checksums, kept_settings
from gspmd.training.reporting import memory, report
from gspmd.training.reporting.metrics import Metrics
from gspmd.training.reporting.weights_and_biases import check_installed
from gspmd.training.run.folder import check_out, choose_out, released_after
from gspmd.training.state import TrainState
from gspmd.training.step.building import abstract_batch
from gspmd.training.syntax import lines_searched
from gspmd_models import ModelConfig, checkpoints
from gspmd_models.stages import check_lowering_of_stages, check_stages

CALLED = "gspmd train"


def run(argv: Sequence[str], script: str = "", settings: RunSettings | None = None) -> int:
    """Run `gspmd train`; return its exit code.

    The code is 1 for a failed run, 2 for bad input, 130 for an interrupt.

    Args:
        argv: the flags.
        script: if a file in scripts/ was started instead of `gspmd`, its name, for help and advice.
        settings: the settings, if the flags have been parsed already.
    """
    called, errors = "" if script else CALLED, (checkpoints.CheckpointError,)
    return runner.guarded(partial(main, script=script, settings=settings), argv, called, errors)


def main(argv: Sequence[str], script: str = "", settings: RunSettings | None = None) -> int:
    """Parse the flags, unless settings are given, and train."""
    settings = settings or parse(argv, script)
    # This comes before a backend starts, since that fixes the devices that a process sees.
    processes.join(settings.sharding.distributed)
    if not own.is_own(settings):
        settings = adapted(of_checkpoint(settings, argv))
    # Processes with different settings would compile different programs, and deadlock in them.
    processes.compare(partial(facts_of, settings))
    train(settings, "" if script else CALLED, argv)
    return 0


def train(settings: RunSettings, called: str = CALLED, argv: Sequence[str] = ()) -> None:
    """Check the settings, read the text, and run the training loop.

    Args:
        settings: the settings of the run.
        called: the command line of the program, as in `runner.guarded`, for advice on how to resume.
        argv: the flags, for the file of a layout that is found.
    """
    began = time.monotonic()
    console = printing.console(120) if processes.first() else Console(quiet=True)  # only the first process prints
    checked = check(console, settings)
    if settings.explain:
        for arrangement, state in checked.arranged:
            explain(console, checked.settings, arrangement, state)
        return
    arranged = arrange_run(console, checked)
    run_loop(console, checked, arranged, called, argv, began)


@dataclass(frozen=True)
class Checked:
    """A run that has passed every check, before anything is compiled or allocated for it.

    Attributes:
        settings: the settings of the run. For `--layout auto`, they have the mesh that the search chose.
        arranged: the arrangements of the run in order, each with its state as shapes.
        tokenizer: the tokenizer of the text, or None if tokens are bytes.
        found: the layout that the search found, or None without `--layout auto`.
        objective: the objective that makes training rows of the texts; None if rows are windows of the text.
    """

    settings: RunSettings
    arranged: list[tuple[Arrangement, TrainState]]
    tokenizer: checkpoints.Tokenizer | None
    found: FoundLayout | None
    objective: data.Objective | None


def check(console: Console, settings: RunSettings) -> Checked:
    """Check settings, layouts, sizes, memory and programs before anything is compiled.

    Slower checks come later. First the settings are checked. Once the devices are started, the sizes under each layout
    are checked, and last the traced programs. If a run changes its layout, all its layouts are checked here, and not
    hours later when the run changes to them. The header is printed between the checks. With --explain, memory and
    programs are not checked, because the explanation shows why they do not fit.

    Raises:
        ConfigError, LayoutError, PlanError, SpecError, HostError: a check has failed; the message says which.
    """
    training, sharding = settings.training, settings.sharding
    if settings.details and not settings.explain:
        raise ConfigError(
            "cannot use these flags:", ["--details is for --explain; add --explain, or leave --details out."]
        )
    if training.log:
        check_installed()
    if not settings.explain:
        # Texts are read after all checks, since that may take minutes.
        texts = data.matching(training.data) if training.data else []
        if processes.first():
            check_out(training.out, resume=training.resume, step=training.resume_step, reads=texts)
    tokenizer = checkpoints.tokenizer(training.tokenizer) if training.tokenizer else None
    if tokenizer:
        tokenizer.ends = tokenizer.ends or data.usual_ends(tokenizer.backend)
    ids = data.number_of_ids(tokenizer.backend) if tokenizer else None
    if own.is_own(settings):
        own.refuse(settings, "cannot train a custom model:", ids)
        objective = None
    else:
        objective = check_ours(settings, tokenizer, ids)
        settings = with_fitting_sample(console, settings, tokenizer)
        training = settings.training
    subject = own.trainable(settings)
    with Progress(console, "Starting the devices") as progress:
        kept = host.keep_compiled(settings.compile_cache)
        found = None
        if lines_searched(sharding.layout) is not None:
            from gspmd.commands.automatic.searched import for_training  # Only this run needs the search.

            devices = start(sharding)
            asked = File(settings.model, training, settings.lora, settings.optimizer, sharding)
            found = for_training(console, asked, devices)
            sharding = replace(sharding, mesh=found.mesh)
            settings = replace(settings, sharding=sharding)
        sizes = subject.sizes(training.batch, training.length)
        arrangements = arrange(training, sharding, sizes, found.layout if found else None)
        for each in arrangements:
            of_step = training.batch, training.length, training.microbatches
            subject.check(each.layout, each.mesh, *of_step, training.frozen)
            if not own.is_own(settings):
                check_lowering_of_stages(settings.model, each.layout, each.mesh, sharding.schedule)
        if sharding.compiled_with:
            from gspmd.audit import check_compiler_options  # Only these options need the audit.

            check_compiler_options(sharding.compiled_with)
        progress.begin("Reading the settings")
        check_stages(sharding.rounds, sharding.schedule, *(each.layout for each in arrangements))
        states = [abstract_state(settings, each) for each in arrangements]
        check_same_form([*zip(map(str, arrangements), states)])
    show_run(console, settings, arrangements, kept)
    arranged = [*zip(arrangements, states)]
    for arrangement, state in [] if settings.explain else arranged:
        at = arrangement.layout, arrangement.mesh
        tokens = abstract_batch(subject, *at, training.batch, training.length)  # Tracing makes their positions.
        parts = {"parameters": state.params, "optimizer state": state.optimizer}
        devices = arrangement.mesh.local_devices
        remedy = "Use a smaller model, or a layout that shards more; --explain allocates nothing."
        memory.check("cannot hold this model:", parts, devices, remedy)
        remedy = "Use a smaller --batch or --length; --explain allocates nothing."
        memory.check("cannot hold this batch:", parts | {"tokens": tokens}, devices, remedy)
        with Progress(console, f"Checking {arrangement}"):
            check_traced(settings, arrangement, state)
    return Checked(settings, arranged, tokenizer, found, objective)


def check_ours(
    settings: RunSettings, tokenizer: checkpoints.Tokenizer | None, ids: int | None
) -> data.Objective | None:
    """Check that a model that comes with gspmd fits the data, and return the objective.

    Returns:
        The objective that makes training rows of the texts, or None if rows are windows of the text.

    Raises:
        ConfigError: the model does not fit the data.
    """
    training = settings.training
    check_model(training, settings.model, ids)
    vocabulary, start = settings.model.vocabulary, settings.model.start_token
    objective = data.objective(training, vocabulary=vocabulary, start=start, tokenizer=tokenizer)
    automatic.asks_for_search(settings.sharding.layout, "cannot train this model:")
    model = settings.model
    if model.positions == "learned" and training.length > (model.context_length or 0):
        fault = f"a sequence has {training.length} tokens, and this model has {model.context_length} learned positions"
        raise ConfigError("cannot train this model:", [f"{fault}; use a smaller --length."])
    return objective


def with_fitting_sample(
    console: Console, settings: RunSettings, tokenizer: checkpoints.Tokenizer | None
) -> RunSettings:
    """Return the settings with the length of the sample reduced, if needed, to fit the model's context.

    If the length is reduced, the console says so.

    Raises:
        ConfigError: the prompt has no tokens, or leaves no room in the context for a further token.
    """
    training, model = settings.training, settings.model
    if not training.sampled:
        return settings
    doing = "cannot begin the generated text:"
    prompt = (tokenizer or bytes_of(model)).encode(training.prompt)
    if tokenizer and not prompt:
        fault = f"the tokenizer has no token for {training.prompt!r}; give a different --prompt, or --sample-bytes 0."
        raise ConfigError(doing, [fault])
    begins = 1 if model.encoder_layers else len(prompt)  # the generated text does not contain its source
    room = training.sampled if model.context_length is None else model.context_length - begins
    if room >= training.sampled:
        return settings
    if room < 1:
        fault = f"the prompt has {begins} tokens, and the model was made for at most {model.context_length}"
        raise ConfigError(doing, [f"{fault} (context_length); give a shorter --prompt, or --sample-bytes 0."])
    said = f"The text at the end has {room} new tokens, not {training.sampled} (--sample-bytes)"
    why = f"the model was made for {model.context_length}, and the prompt has {begins}"
    console.print(f"{said}: {why}.", soft_wrap=True, highlight=False, markup=False)
    return replace(settings, training=replace(training, sample_bytes=room))


def check_model(training: TrainingConfig, model: ModelConfig, tokens: int | None = None) -> None:
    """Raise an error if a model does not fit the data, or cannot generate the requested sample.

    Args:
        training: the training settings.
        model: the settings of the model.
        tokens: number of ids of the tokenizer, or None if tokens are bytes.

    Raises:
        ConfigError: the model does not fit; the message lists all faults.
    """
    faults = []
    encodes = model.encoder_layers > 0
    if encodes and training.objective == "next-token":
        fault = f"model.encoder_layers is {model.encoder_layers}, but the objective next-token has no source"
        faults.append(f"{fault}; set objective to span-corruption, prefix or pairs.")
    if not encodes and training.objective != "next-token":
        fault = f"the objective {training.objective} has a source, but the model has no encoder"
        faults.append(f"{fault}; set model.encoder_layers, or objective to next-token.")
    # An encoder–decoder has tokens besides those of the text, which `data.objective` checks.
    if tokens is None and model.vocabulary != 256 and not encodes:
        larger = " Give the file of its tokenizer with --tokenizer." if model.vocabulary > 256 else ""
        faults.append(f"model.vocabulary must be 256, since the data is bytes, but is {model.vocabulary}.{larger}")
    if tokens is not None and tokens > model.vocabulary:
        fault = f"the tokenizer {training.tokenizer!r} has {tokens:,} tokens, but model.vocabulary is "
        faults.append(f"{fault}{model.vocabulary:,}; it must be at least as large.")
    faults += group_faults(model, training.batch, training.length, training.source_length)
    if model.int8:
        faults.append("model.int8 is for serving: leave it out; sample with 'gspmd generate --weights int8'.")
    if not model.stacked:
        faults.append("model.stacked is off, which is for serving: leave it out; use 'gspmd generate --unstacked'.")
    if training.sampled and model.moe and not model.moe.causal:
        fault = f"model.moe.router {model.moe.router} cannot generate text, since its experts read later tokens; "
        faults.append(fault + "set sample_bytes to 0, or choose a different router.")
    if faults:
        raise ConfigError("cannot train this model:", faults)


@dataclass(frozen=True)
class Arranged:
    """The training text of a run and the run's folder, which is locked against other runs."""

    corpus: data.Corpus
    out: Path


def arrange_run(console: Console, checked: Checked) -> Arranged:
    """Read the text, and choose and lock the folder of the run.

    This comes after all checks, because reading the text may take minutes, and a run that is refused must leave no
    folder. The arrays of the state are made later, by the loop, which first looks for a checkpoint to restore.

    Raises:
        ConfigError: the text cannot be read, is too short, or differs between processes; or the folder cannot be
            written, or belongs to another run.
    """
    training = checked.settings.training
    corpus = data.load(
        training.data, fraction=training.validation_fraction, tokenizer=checked.tokenizer, field=training.data_field,
        prompt=training.data_prompt, source=training.data_source, objective=checked.objective, length=training.length,
        cache=training.data_cache, console=console,
    )  # fmt: skip
    data.check_size(corpus, training.batch, training.length)
    text = partial(data.stream, corpus, training)
    processes.compare(text, "cannot train: the processes have read different texts.")
    say = partial(console.print, soft_wrap=True, markup=False, highlight=False)
    choose = partial(choose_out, training.out, resume=training.resume, step=training.resume_step, tell=say)
    out = processes.agreed(choose)
    return Arranged(corpus, out)


def run_loop(
    console: Console, checked: Checked, arranged: Arranged, called: str, argv: Sequence[str], began: float
) -> None:
    """Train; then draw the plots, write a sample, and print the commands that continue the run or sample from it.

    Raises:
        Interrupted, Unwritable, Diverged: the run ended early, as in `fit` and `runner.interrupts`.
    """
    settings, tokenizer, corpus, out = checked.settings, checked.tokenizer, arranged.corpus, arranged.out
    training, last = settings.training, checked.arranged[-1][0]
    with released_after(out), runner.interrupts(out, called):
        console.print(f"Text: {corpus.describe()}.\nOut: {out}", soft_wrap=True, markup=False)
        # The files that a resume and `gspmd generate` read are written before the first checkpoint.
        if checked.found and processes.first():
            checked.found.write(out, runner.program_of(called), argv)
        if tokenizer and processes.first():
            keep_tokenizer(console, out / "tokenizer", tokenizer, settings.checkpoint)
        # Programs are made one at a time, since the devices can hold the state of only one arrangement.
        programs = {each.after: partial(make_program, console, settings, each) for each, _ in checked.arranged}

        def finish(state: TrainState, metrics: Metrics | None) -> None:
            with last.context():
                text = partial(sample, settings, last, state.params, tokenizer) if training.sampled else None
                name = f"{out.resolve().name} · {in_short(settings, last)}"
                if metrics is not None:
                    report.finish(console, out, name, training.prompt, text, metrics)
                elif text:
                    text()  # every process has to run this program

        reached = int(fit(training, programs, corpus, out, console, kept_settings(settings), finish).step)
        if processes.first():
            moe = None if own.is_own(settings) else settings.model.moe
            generates = not own.is_own(settings) and (moe is None or moe.causal)
            prompt = training.prompt if generates else None
            report.closing(console, out, time.monotonic() - began, runner.next_commands(out, reached, prompt, called))


def keep_tokenizer(console: Console, folder: Path, tokenizer: checkpoints.Tokenizer, checkpoint: str) -> None:
    """Save the tokenizer with the run, with checksums; if the run is resumed, replace a damaged copy."""
    if (folder / checksums.FILE).exists() and (fault := checksums.fault_of(folder)):
        console.print(f"{str(folder)!r} is damaged, and written again: {fault}.", soft_wrap=True, markup=False)
        shutil.rmtree(folder)
    checkpoints.keep_tokenizer(folder, tokenizer, checkpoint)
    checksums.write(folder)
