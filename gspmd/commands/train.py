"""Trains a Mixture-of-Experts language model on text, every tensor placed by a layout.

    gspmd train                                        # five minutes on two cores, 8 fake devices
    gspmd train --layout zero-3 --set ffn.w_in=E_xF_y  # the same losses, other collectives
    gspmd train --resume --out runs/001                # goes on where it stopped; --resume 300, from step 300
    gspmd train --explain                              # what its step will send, and no training
    gspmd train --from DIR --data 'text/*.jsonl'       # a public checkpoint, trained further on other text
    gspmd train --model mixer:Mixer --layout own.toml  # a model of one's own: docs/your-model.md

Figures, events, checkpoints and pictures go to --out.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from gspmd import host
from gspmd.commands import automatic, configs, flags, own, runner
from gspmd.commands.automatic import FoundLayout
from gspmd.commands.file import File, group_faults
from gspmd.commands.header import in_short, show_run
from gspmd.commands.programs import abstract_state, check_traced, explain, make_program, sample
from gspmd.commands.settings import RunSettings, adapted, facts_of, of_checkpoint
from gspmd.display import console as printing
from gspmd.display.progress import Progress
from gspmd.training import ConfigError, TrainingConfig, data, fit, processes
from gspmd.training.arrangement import Arrangement, arrange, check_same_form, start
from gspmd.training.checkpoints import checksums, kept_settings
from gspmd.training.reporting import memory, report
from gspmd.training.reporting.metrics import Metrics
from gspmd.training.reporting.weights_and_biases import check_installed
from gspmd.training.run.folder import choose_out, held
from gspmd.training.state import TrainState
from gspmd.training.syntax import lines_searched
from gspmd_models import ModelConfig, checkpoints
from gspmd_models.decoding import GenerationError, check_length
from gspmd_models.objective import check_lowering_of_stages, check_stages

CALLED = "gspmd train"


def run(argv: Sequence[str], script: str = "") -> int:
    """Run `gspmd train`; return its exit code: 1 for a failed run, 2 for bad input, 130 for an interrupt.

    Args:
        argv: the flags.
        script: the file in scripts/ that runs it instead, for the help and for what resumes a run.
    """
    called, errors = "" if script else CALLED, (checkpoints.CheckpointError,)
    return runner.guarded(partial(main, script=script), argv, called, errors)


def main(argv: Sequence[str], script: str = "") -> int:
    """Read the settings, and train."""
    prog, description = configs.called(__doc__, "gspmd train", script)
    # A checkpoint is trained further at other rates than random weights.
    default = "default" if flags.EarlyFlags.of(argv).checkpoint is None else "finetune"
    # Before the flags are read: the others wait for this process, and are told what is wrong with its flags.
    processes.expect(flags.distributed(argv))
    settings = flags.parse(RunSettings, argv, default=default, find=configs.find, prog=prog, description=description)
    # Before anything starts a backend, which fixes the devices that a process sees.
    processes.join(settings.sharding.distributed)
    if not own.is_own(settings):
        settings = adapted(of_checkpoint(settings, argv))
    # Processes that were told different things would compile different programs, and wait in them for one another.
    processes.compare(partial(facts_of, settings))
    train(settings, "" if script else CALLED)
    return 0


def train(settings: RunSettings, called: str = CALLED) -> None:
    """Check all that can be refused, arrange what the loop needs, and run it.

    Args:
        settings: of the run.
        called: the command line of the program, for what resumes the run; as of `runner.guarded`.
    """
    began = time.monotonic()
    console = printing.console(120) if processes.first() else Console(quiet=True)  # one process speaks for all
    checked = check(console, settings)
    if settings.explain:
        for arrangement, state in checked.arranged:
            explain(console, checked.settings, arrangement, state)
        return
    arranged = arrange_run(console, checked)
    run_loop(console, checked, arranged, called, began)


@dataclass(frozen=True)
class Checked:
    """A run against which nothing is known, before anything is compiled and before any array is made.

    Attributes:
        settings: with the mesh, where that was searched.
        arranged: every layout and mesh of the run in their order, with the shapes of the state in it.
        tokenizer: of the text; None if tokens are bytes.
        found: the layout of `--layout auto`; None for any other.
    """

    settings: RunSettings
    arranged: list[tuple[Arrangement, TrainState]]
    tokenizer: checkpoints.Tokenizer | None
    found: FoundLayout | None


def check(console: Console, settings: RunSettings) -> Checked:
    """Refuse all that can be refused before anything is compiled: settings, layouts, sizes, memory, and the programs.

    What takes longer comes later: first what the settings alone say, then what layouts say of their sizes, once the
    devices are started, and last, by tracing, what only the program itself knows. Of a run that changes its layout all
    of them are checked here, not when a change comes, hours later. The header is shown on the way; of a run that is
    only explained, memory and programs are left to the explanation, which is there to show why they do not fit.

    Raises:
        ConfigError, LayoutError, PlanError, SpecError, HostError: with what is wrong.
    """
    training, sharding = settings.training, settings.sharding
    if training.log:
        check_installed()
    tokenizer = checkpoints.tokenizer(training.tokenizer) if training.tokenizer else None
    if tokenizer:
        tokenizer.ends = tokenizer.ends or data.usual_ends(tokenizer.backend)
    ids = data.number_of_ids(tokenizer.backend) if tokenizer else None
    if own.is_own(settings):
        own.refuse(settings, "cannot train a model of one's own:", ids)
    else:
        check_ours(settings, tokenizer, ids)
    subject = own.trainable(settings)
    with Progress(console, "Starting the devices") as progress:
        kept = host.keep_compiled(settings.compile_cache)
        found = None
        if lines_searched(sharding.layout) is not None:
            from gspmd.commands.automatic.searched import for_training  # the search, which no other run needs

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
            from gspmd.audit import check_compiler_options  # the audit, which only these options need here

            check_compiler_options(sharding.compiled_with)
        progress.begin("Reading the settings")
        check_stages(sharding.rounds, sharding.schedule, *(each.layout for each in arrangements))
        states = [abstract_state(settings, each) for each in arrangements]
        check_same_form([*zip(map(str, arrangements), states)])
    show_run(console, settings, arrangements, kept)
    arranged = [*zip(arrangements, states)]
    for arrangement, state in [] if settings.explain else arranged:
        parts = {"parameters": state.params, "optimizer state": state.optimizer}
        remedy = "Take a smaller model, or a layout that shards more; --explain allocates nothing."
        memory.check("cannot hold this model:", parts, arrangement.mesh.local_devices, remedy)
        with Progress(console, f"Checking {arrangement}"):
            check_traced(settings, arrangement, state)
    return Checked(settings, arranged, tokenizer, found)


def check_ours(settings: RunSettings, tokenizer: checkpoints.Tokenizer | None, ids: int | None) -> None:
    """Refuse one of our models that does not fit the data, or the text that is asked for.

    Raises:
        ConfigError: so.
    """
    training = settings.training
    check_model(training, settings.model, ids)
    automatic.asks_for_search(settings.sharding.layout, "cannot train this model:")
    if fault := settings.model.length_fault(training.length):
        raise ConfigError("cannot train this model:", [f"{fault}; take a smaller --length."])
    if not training.sample_bytes:
        return
    doing = "cannot begin the generated text:"
    prompt = (tokenizer or checkpoints.byte_tokenizer()).encode(training.prompt)
    if tokenizer and not prompt:
        fault = f"the tokenizer has no token for {training.prompt!r}; give another --prompt, or --sample-bytes 0."
        raise ConfigError(doing, [fault])
    try:
        check_length(settings.model, len(prompt), training.sample_bytes)
    except GenerationError as error:
        raise ConfigError(doing, [f"{error}, with a smaller --sample-bytes."]) from None


def check_model(training: TrainingConfig, model: ModelConfig, tokens: int | None = None) -> None:
    """Refuse a model that does not fit the data, or that cannot generate the requested sample.

    Args:
        training: the settings of training.
        model: a model's settings, with `vocabulary`, `int8`, and `moe`: None, or with `groups`, `causal` and `router`.
        tokens: number of ids of the tokenizer; None if tokens are bytes.

    Raises:
        ConfigError: with every fault.
    """
    faults = []
    if tokens is None and model.vocabulary != 256:
        larger = " Give the file of its tokenizer with --tokenizer." if model.vocabulary > 256 else ""
        faults.append(f"model.vocabulary must be 256, since the data is bytes, but is {model.vocabulary}.{larger}")
    if tokens is not None and tokens > model.vocabulary:
        fault = f"the tokenizer {training.tokenizer!r} has {tokens:,} tokens, but model.vocabulary is "
        faults.append(f"{fault}{model.vocabulary:,}; it must be at least as large.")
    faults += group_faults(model, training.batch, training.length)
    if model.int8:
        faults.append("model.int8 is to serve: leave it out, and sample with 'gspmd generate --weights int8'.")
    if training.sample_bytes and model.moe and not model.moe.causal:
        fault = f"model.moe.router {model.moe.router} cannot generate text, since its experts read later tokens; "
        faults.append(fault + "set sample_bytes to 0, or take another router.")
    if faults:
        raise ConfigError("cannot train this model:", faults)


@dataclass(frozen=True)
class Arranged:
    """The text that a run learns from, and its folder, which is held against other runs."""

    corpus: data.Corpus
    out: Path


def arrange_run(console: Console, checked: Checked) -> Arranged:
    """Read the text, and choose and hold the folder.

    Only now: text may take minutes to read, and a run that is refused leaves no folder behind. The arrays of the state
    come later still, in the loop: it first looks for the checkpoint that they may be restored from.

    Raises:
        ConfigError: the text cannot be read, is too short, or another one in another process; the folder cannot be
            written, or is another run's.
    """
    training = checked.settings.training
    corpus = data.load(
        training.data, fraction=training.validation_fraction, tokenizer=checked.tokenizer, field=training.data_field,
        prompt=training.data_prompt,
        cache=training.data_cache, console=console,
    )  # fmt: skip
    data.check_size(corpus, training.batch, training.length)
    text = partial(data.stream, corpus, training)
    processes.compare(text, "cannot train: the processes have read different texts.")
    out = processes.agreed(lambda: choose_out(training.out, resume=training.resume, step=training.resume_step))
    return Arranged(corpus, out)


def run_loop(console: Console, checked: Checked, arranged: Arranged, called: str, began: float) -> None:
    """Train, draw and sample at the end, and say how to go on.

    Raises:
        Interrupted, Unwritable, Diverged: as of `fit`, and as of `runner.interrupts` outside of it.
    """
    settings, tokenizer, corpus, out = checked.settings, checked.tokenizer, arranged.corpus, arranged.out
    training, last = settings.training, checked.arranged[-1][0]
    with held(out), runner.interrupts(out, called):
        console.print(f"Text: {corpus.describe()}.\nOut: {out}", soft_wrap=True, markup=False)
        # What a resume, and `gspmd generate`, read beside the checkpoints is there before the first checkpoint is.
        if checked.found and processes.first():
            checked.found.write(out)
        if tokenizer and processes.first():
            keep_tokenizer(console, out / "tokenizer", tokenizer, settings.checkpoint)
        # Functions that make them: devices hold the state of one arrangement at a time.
        programs = {each.after: partial(make_program, console, settings, each) for each, _ in checked.arranged}

        def finish(state: TrainState, metrics: Metrics | None) -> None:
            with last.context():
                text = partial(sample, settings, last, state.params, tokenizer) if training.sample_bytes else None
                name = f"{out.resolve().name} · {in_short(settings, last)}"
                if metrics is not None:
                    report.finish(console, out, name, training.prompt, text, metrics)
                elif text:
                    text()  # a program of all processes

        reached = int(fit(training, programs, corpus, out, console, kept_settings(settings), finish).step)
        if processes.first():
            moe = None if own.is_own(settings) else settings.model.moe
            generates = not own.is_own(settings) and (moe is None or moe.causal)
            prompt = training.prompt if generates else None
            report.closing(console, out, time.monotonic() - began, runner.next_commands(out, reached, prompt, called))


def keep_tokenizer(console: Console, folder: Path, tokenizer: checkpoints.Tokenizer, checkpoint: str) -> None:
    """Keep the tokenizer with the run, with checksums; on a resume anew, and what was kept is not what was written."""
    if (folder / checksums.FILE).exists() and (fault := checksums.fault_of(folder)):
        console.print(f"{str(folder)!r} is damaged, and written anew: {fault}.", soft_wrap=True, markup=False)
        shutil.rmtree(folder)
    checkpoints.keep_tokenizer(folder, tokenizer, checkpoint)
    checksums.write(folder)
