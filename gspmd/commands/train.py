"""Trains a Mixture-of-Experts language model on text, every tensor placed by a layout.

    gspmd train                                        # five minutes on two cores, 8 fake devices
    gspmd train --layout zero-3 --set ffn.w_in=E_xF_y  # the same losses, other collectives
    gspmd train --resume --out runs/001                # goes on where it stopped; --resume 300, from step 300
    gspmd train --explain                              # what its step will send, and no training
    gspmd train --from DIR --data 'text/*.jsonl'       # a public checkpoint, trained further on other text
    gspmd train --model mixer:Mixer --layout own.toml  # a model of one's own: docs/your-model.md

Figures, events, checkpoints and pictures go to --out.
"""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console

import gspmd
import gspmd_models as models
from gspmd import host
from gspmd.commands import automatic, configs, own
from gspmd.commands.file import File
from gspmd.commands.header import in_short, show_run, show_tensors
from gspmd.display import console as printing
from gspmd.display.progress import Progress
from gspmd.training import (
    ConfigError,
    OptimizerConfig,
    Program,
    ShardingConfig,
    TrainingConfig,
    command,
    data,
    fit,
    processes,
)
from gspmd.training.arrangement import Arrangement, arrange, start
from gspmd.training.checkpoints import checksums, load_settings
from gspmd.training.flags import parse_relayout
from gspmd.training.model import Own, finding
from gspmd.training.reporting import memory, report, speed
from gspmd.training.reporting.metrics import Metrics
from gspmd.training.reporting.weights_and_biases import check_installed
from gspmd.training.run.folder import choose_out, held, newest_run
from gspmd.training.run.relayout import check_same_form
from gspmd.training.state import TrainState, shardings
from gspmd.training.step import Step, Update, building, jit_step
from gspmd.training.toml import to_mapping
from gspmd_models import ModelConfig, checkpoints
from gspmd_models.decoding import GenerationError, check_length
from gspmd_models.finetuning.config import LoraConfig
from gspmd_models.finetuning.merging import merge, with_adapters
from gspmd_models.objective import check_lowering_of_stages, check_stages
from gspmd_models.remat.prediction import show_remat

CALLED = "gspmd train"


@dataclass(frozen=True)
class Settings:
    """Everything a run is told, by file and by flag."""

    config: str = ""
    """TOML file with tables [model], [training], [optimizer] and [sharding]; configs/default.toml if not given, or
    configs/finetune.toml with --from."""
    explain: bool = False
    """Compile the training step, print what it sends beside what was planned, and stop."""
    compile_cache: bool = True
    """Whether compiled programs are kept on disk, where the next start finds them."""
    checkpoint: Annotated[str, tyro.conf.arg(name="from")] = ""
    """Folder of a public checkpoint, whose model, weights and tokenizer the run begins with; of [model] only remat
    counts."""
    model_class: Annotated[str, tyro.conf.arg(name="model", metavar="MODULE:NAME")] = ""
    """A model of one's own, such as mixer:Mixer for the class Mixer of mixer.py, whose fields the flags of [model] then
    are; in a file, class in [model]. docs/your-model.md builds one."""
    model: ModelConfig = field(default_factory=ModelConfig)
    training: tyro.conf.OmitArgPrefixes[TrainingConfig] = field(default_factory=TrainingConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: tyro.conf.OmitArgPrefixes[OptimizerConfig] = field(default_factory=OptimizerConfig)
    sharding: tyro.conf.OmitArgPrefixes[ShardingConfig] = field(default_factory=ShardingConfig)

    def beside(self, folder: Path) -> "Settings":
        """Return these settings with what they name relatively taken from `folder`, that of their file."""
        checkpoint = os.path.join(folder, self.checkpoint) if self.checkpoint else ""
        return replace(self, checkpoint=checkpoint, model_class=finding.beside(self.model_class, folder))


def run(argv: Sequence[str], script: str = "") -> int:
    """Run `gspmd train`; return its exit code: 1 for a failed run, 2 for bad input, 130 for an interrupt.

    Args:
        argv: the flags.
        script: the file in scripts/ that runs it instead, for the help and for what resumes a run.
    """
    called, errors = "" if script else CALLED, (checkpoints.CheckpointError,)
    return command.guarded(partial(main, script=script), argv, called, errors)


def main(argv: Sequence[str], script: str = "") -> int:
    """Read the settings, and train."""
    prog, description = configs.called(__doc__, "gspmd train", script)
    # A checkpoint is trained further at other rates than random weights.
    default = "finetune" if any(flag.split("=")[0] == "--from" for flag in argv) else "default"
    processes.expect(command.distributed(argv))
    settings = command.parse(Settings, argv, default=default, find=configs.find, prog=prog, description=description)
    processes.join(settings.sharding.distributed)
    if not own.is_own(settings):
        settings = adapted(of_checkpoint(settings, argv))
    processes.compare(partial(facts_of, settings))
    train(settings, "" if script else CALLED)
    return 0


def facts_of(settings: Settings) -> dict[str, Any]:
    """Return what the processes of a run must agree about before they start their devices, by name."""
    facts = to_mapping(settings)
    del facts["config"], facts["sharding"]["distributed"]  # which file the settings are from, and which process this is
    named = {"layout": settings.sharding.layout}
    named |= {
        f"layout after {change.after}": change.layout for change in map(parse_relayout, settings.training.relayout)
    }
    # A file of one name may have other lines on another machine.
    layouts = {at: gspmd.Layout.load(name) for at, name in named.items() if name != automatic.NAME}
    tables = {at: {each.name: getattr(layout, each.name) for each in fields(layout)} for at, layout in layouts.items()}
    lines = {at: parts.pop("table") | parts for at, parts in tables.items()}
    return facts | lines | processes.environment(models, *own.module_of(settings))


def train(settings: Settings, called: str = CALLED) -> None:
    """Check everything that can be checked without compiling, and train."""
    training, sharding, began = settings.training, settings.sharding, time.monotonic()
    if training.log:
        check_installed()
    tokenizer = checkpoints.tokenizer(training.tokenizer) if training.tokenizer else None
    if tokenizer:
        tokenizer.ends = tokenizer.ends or data.usual_ends(tokenizer.backend)
    ids = data.number_of_ids(tokenizer.backend) if tokenizer else None
    if own.is_own(settings):
        own.refuse(settings, "cannot train a model of one's own:", ids, automatic.NAME)
    else:
        check_ours(settings, tokenizer, ids)
    subject = own.trainable(settings)
    console = printing.console(120) if processes.first() else Console(quiet=True)
    with Progress(console, "Starting the devices") as progress:
        kept = host.keep_compiled(settings.compile_cache)
        found = None
        if sharding.layout == automatic.NAME:
            from gspmd.commands.automatic.searched import for_training  # the search, which no other run needs

            devices = start(sharding)
            asked = File(settings.model, training, settings.lora, settings.optimizer, sharding)
            found = for_training(console, asked, devices)
            sharding = replace(sharding, mesh=found.mesh)
            settings = replace(settings, sharding=sharding)
        sizes = subject.sizes(training.batch, training.length)
        arrangements = arrange(training, sharding, sizes, found.layout if found else None)
        for arrangement in arrangements:
            at = arrangement.layout, arrangement.mesh
            sizes_of_step = training.batch, training.length, training.microbatches
            subject.check(*at, *sizes_of_step, training.frozen)
            if not own.is_own(settings):
                check_lowering_of_stages(settings.model, *at, sharding.schedule)
        if sharding.compiled_with:
            from gspmd.audit import check_compiler_options

            check_compiler_options(sharding.compiled_with)
        progress.begin("Reading the settings")
        check_stages(sharding.rounds, sharding.schedule, *(arrangement.layout for arrangement in arrangements))
        states = [abstract_state(settings, arrangement) for arrangement in arrangements]
        check_same_form([*zip(map(str, arrangements), states)])
    show_run(console, settings, arrangements, kept)
    if settings.explain:
        for arrangement, state in zip(arrangements, states):
            explain(console, settings, arrangement, state)
        return
    for arrangement, state in zip(arrangements, states):
        parts = {"parameters": state.params, "optimizer state": state.optimizer}
        remedy = "Take a smaller model, or a layout that shards more; --explain allocates nothing."
        memory.check("cannot hold this model:", parts, arrangement.mesh.local_devices, remedy)
        with Progress(console, f"Checking {arrangement}"):
            check_traced(settings, arrangement, state)
    corpus = data.load(
        training.data, fraction=training.validation_fraction, tokenizer=tokenizer, field=training.data_field,
        cache=training.data_cache, console=console,
    )  # fmt: skip
    data.check_size(corpus, training.batch, training.length)
    text = partial(data.stream, corpus, training)
    processes.compare(text, "cannot train: the processes have read different texts.")
    out = processes.agreed(lambda: choose_out(training.out, resume=training.resume, step=training.resume_step))
    with held(out), command.interrupts(out, called):
        console.print(f"Text: {corpus.describe()}.\nOut: {out}", soft_wrap=True, markup=False)
        if found and processes.first():
            found.write(out)
        programs = {each.after: partial(make_program, console, settings, each) for each in arrangements}
        if tokenizer and processes.first():
            keep_tokenizer(console, out / "tokenizer", tokenizer, settings.checkpoint)
        last, kept_settings = arrangements[-1], command.kept_settings(settings)

        def finish(state: TrainState, metrics: Metrics | None) -> None:
            with last.context():
                text = partial(sample, settings, last, state.params, tokenizer) if training.sample_bytes else None
                name = f"{out.resolve().name} · {in_short(settings, last)}"
                if metrics is not None:
                    report.finish(console, out, name, training.prompt, text, metrics)
                elif text:
                    text()  # a program of all processes

        reached = int(fit(training, programs, corpus, out, console, kept_settings, finish).step)
        if processes.first():
            moe = None if own.is_own(settings) else settings.model.moe
            generates = not own.is_own(settings) and (moe is None or moe.causal)
            prompt = training.prompt if generates else None
            report.closing(console, out, time.monotonic() - began, command.next_commands(out, reached, prompt, called))


def keep_tokenizer(console: Console, folder: Path, tokenizer: checkpoints.Tokenizer, checkpoint: str) -> None:
    """Keep the tokenizer with the run, with checksums; on a resume anew, and what was kept is not what was written."""
    if (folder / checksums.FILE).exists() and (fault := checksums.fault_of(folder)):
        console.print(f"{str(folder)!r} is damaged, and written anew: {fault}.", soft_wrap=True, markup=False)
        shutil.rmtree(folder)
    checkpoints.keep_tokenizer(folder, tokenizer, checkpoint)
    checksums.write(folder)


def check_ours(settings: Settings, tokenizer: checkpoints.Tokenizer | None, ids: int | None) -> None:
    """Refuse one of our models that does not fit the data, or the text that is asked for.

    Raises:
        ConfigError: so.
    """
    training = settings.training
    command.check_model(training, settings.model, ids)
    if fault := settings.model.length_fault(training.length):
        raise ConfigError("cannot train this model:", [f"{fault}; take a smaller --length."])
    if training.sample_bytes:
        check_sample(training, settings.model, tokenizer)


def check_sample(training: TrainingConfig, model: models.ModelConfig, tokenizer: checkpoints.Tokenizer | None) -> None:
    """Refuse a text that cannot be generated behind the last step.

    Raises:
        ConfigError: the prompt has no token, or the text is longer than the model was made for.
    """
    doing, ids = "cannot begin the generated text:", (tokenizer or checkpoints.byte_tokenizer()).encode(training.prompt)
    if tokenizer and not ids:
        fault = f"the tokenizer has no token for {training.prompt!r}; give another --prompt, or --sample-bytes 0."
        raise ConfigError(doing, [fault])
    try:
        check_length(model, len(ids), training.sample_bytes)
    except GenerationError as error:
        raise ConfigError(doing, [f"{error}, with a smaller --sample-bytes."]) from None


def check_traced(settings: Settings, arrangement: Arrangement, state: TrainState) -> None:
    """Trace one update and one evaluation, which raises what no other check knows.

    It is said before the text is read and the model is built, and not at the step from which on an arrangement is in
    force. It takes about a second, and a third of that on top of a run, which finds what is planned here.
    """
    with arrangement.context():
        update, *args = step_of(settings, arrangement, state)
        jax.eval_shape(update, *args)
        jax.eval_shape(evaluation_of(settings, arrangement), state.params, args[1])


def of_checkpoint(settings: Settings, argv: Sequence[str]) -> Settings:
    """Return the settings with model and tokenizer of the checkpoint that a run begins with, or has begun with.

    A resume by folder has both in the settings of the run. One with the flags that began it, `--from` among them, is
    the same run, unless it names another checkpoint.

    Raises:
        ConfigError: flags say what model it is, which the checkpoint does; or the run began with something else.
        CheckpointError: the checkpoint cannot be read.
    """
    resumed, named = settings.training.resume, {flag.split("=")[0].replace("_", "-") for flag in argv}
    if not settings.checkpoint:
        return settings
    if resumed and (fault := _another_beginning(settings)):
        raise ConfigError("cannot resume:", [fault])
    if resumed and "--config" not in named:
        return settings
    fixed = sorted(flag for flag in named if flag.startswith("--model.") and flag != "--model.remat")
    if fixed:
        fault = f"the checkpoint {settings.checkpoint!r} says what model it is; leave out {', '.join(fixed)}."
        raise ConfigError("cannot begin with this checkpoint:", [fault])
    model = replace(checkpoints.model_config(settings.checkpoint), remat=settings.model.remat)
    if model.context_length is not None:  # trained at longer sequences, it writes as long ones
        model = replace(model, context_length=max(model.context_length, settings.training.length))
    training = replace(settings.training, tokenizer=settings.training.tokenizer or settings.checkpoint)
    return replace(settings, model=model, training=training)


def _another_beginning(settings: Settings) -> str:
    """Say that a run did not begin with the checkpoint that its resume names; empty if it did, or cannot be asked."""
    out = Path(settings.training.out) if settings.training.out else newest_run()
    try:
        begun = str(load_settings(out).get("checkpoint") or "")
    except ConfigError:  # the remedy for a config.json that is lost is to give all settings again, as here
        return ""
    if begun and os.path.realpath(begun) == os.path.realpath(settings.checkpoint):
        return ""
    kept = f"with the checkpoint {begun!r}" if begun else "with random weights"
    remedy = "Leave --from out, or begin another run in another --out."
    return f"the run in {str(out)!r} began {kept}, and not with {settings.checkpoint!r}. {remedy}"


def adapted(settings: Settings) -> Settings:
    """The settings with the adapters of [lora] in the model, or with none; a resumed run's model still has its own."""
    lora = settings.lora if settings.lora.rank else None
    if settings.model.lora not in (None, lora) and not settings.training.resume:
        fault = "adapters stand in a table of their own: write [lora] in place of [model.lora]."
        raise ConfigError("cannot train this model:", [fault])
    return replace(settings, model=replace(settings.model, lora=lora))


def begin(console: Console, settings: Settings, arrangement: Arrangement) -> models.Transformer:
    """The model as training begins: with the weights of the checkpoint, or with random ones."""
    training, layout, mesh = settings.training, arrangement.layout, arrangement.mesh
    if not settings.checkpoint:
        return models.build(settings.model, layout, mesh, jax.random.key(training.seed), training.dtype)
    loaded, taken = checkpoints.load(settings.checkpoint, layout, mesh, "float32")
    console.print(f"Begun with {settings.checkpoint}: {taken}.", soft_wrap=True, markup=False)
    loaded = with_adapters(loaded, settings.model.lora, jax.random.key(training.seed))
    return models.with_arrays(abstract_model(settings, arrangement), models.arrays(loaded))


def abstract_model(settings: Settings, arrangement: Arrangement) -> models.Transformer:
    """The model with shapes in place of weights."""
    return models.abstract(settings.model, arrangement.layout, arrangement.mesh, settings.training.dtype)


def abstract_state(settings: Settings, arrangement: Arrangement) -> TrainState:
    """Shapes, dtypes and shardings of the state."""
    subject, layout, mesh = own.trainable(settings), arrangement.layout, arrangement.mesh
    if own.is_own(settings):
        values = building.abstract_parameters(subject, layout, mesh)
    else:
        values = models.arrays(abstract_model(settings, arrangement))
    with arrangement.context():
        return building.abstract_state(subject, layout, values, update_of(settings), mesh)


def update_of(settings: Settings) -> Update:
    """Return the update of a step, whatever the layout."""
    training = settings.training
    return Update(settings.optimizer, training.steps, training.microbatches, **of_state(training))


def of_state(training: TrainingConfig) -> dict[str, Any]:
    """Return what [training] says of the state: which parameters are frozen, and the dtype they are stored in."""
    return {"frozen": training.frozen, "parameter_dtype": training.parameter_dtype}


def initial_values(console: Console, settings: Settings, arrangement: Arrangement) -> dict[str, jax.Array]:
    """The parameters as training begins."""
    if not own.is_own(settings):
        return models.arrays(begin(console, settings, arrangement))
    key = jax.random.key(settings.training.seed)
    return Own(settings.model).initial(arrangement.layout, arrangement.mesh, key)


def evaluation_of(settings: Settings, arrangement: Arrangement) -> Callable:
    """(parameters, tokens) -> mean cross-entropy, not compiled."""
    return building.evaluation_step(own.trainable(settings), arrangement.layout, settings.training.microbatches)


def make_program(console: Console, settings: Settings, arrangement: Arrangement) -> Program:
    """The model's programs in an arrangement, with the state where a run begins: elsewhere it is restored, or moved."""
    training, layout, mesh = settings.training, arrangement.layout, arrangement.mesh
    if arrangement.after:
        console.print(f"After step {arrangement.after}: {arrangement}.", markup=False)
    show_tensors(console, settings, layout, mesh)
    with arrangement.context():
        with Progress(console, "Building the model") as progress:
            subject, state = own.trainable(settings), abstract_state(settings, arrangement)
            if not (arrangement.after or training.resume):
                values = initial_values(console, settings, arrangement)
                state = building.initial_state(subject, layout, values, update_of(settings), mesh)
            update = jit_step(build_step(settings, layout), state, settings.sharding.compiled_with)
            batch, key = shardings(subject.batch_spec(layout), mesh), jax.random.key(training.seed + 1)
            place, part = processes.placer(batch, training.batch), processes.part_of(batch, training.batch)
            evaluate = jax.jit(evaluation_of(settings, arrangement))
            tokens = building.abstract_batch(subject, layout, mesh, training.batch, training.length)
            progress.begin("Planning the training step")
            plan = gspmd.trace(update, state, tokens, key)
        console.print(plan.table())
    flops = training.batch * training.length * flops_per_token(settings, layout)
    gradients, peak = gradients_of(settings, arrangement, state), speed.peak_flops([*mesh.devices.flat], training.dtype)
    return Program(state, update, evaluate, place, key, part, arrangement.context, gradients, flops, peak)


def flops_per_token(settings: Settings, layout: gspmd.Layout) -> float:
    """FLOPs of forward and backward pass for one token."""
    length = settings.training.length
    own_model = own.is_own(settings)
    return Own(settings.model).flops_per_token(layout, length) if own_model else settings.model.flops_per_token(length)


def build_step(settings: Settings, layout: gspmd.Layout) -> Step:
    """One update, as the settings ask for it."""
    return building.training_step(own.trainable(settings), layout, update_of(settings))


def step_of(settings: Settings, arrangement: Arrangement, state: TrainState) -> tuple[Any, TrainState, Any, Any]:
    """One update in an arrangement, jitted, and its abstract arguments."""
    training, layout, mesh, subject = settings.training, arrangement.layout, arrangement.mesh, own.trainable(settings)
    update = jit_step(build_step(settings, layout), state, settings.sharding.compiled_with)
    tokens = building.abstract_batch(subject, layout, mesh, training.batch, training.length)
    return update, state, tokens, models.abstract_key(mesh)


def gradients_of(settings: Settings, arrangement: Arrangement, state: TrainState) -> Any:
    """Shapes, dtypes and shardings of the gradients, for the table of bytes."""
    layout, mesh, frozen = arrangement.layout, arrangement.mesh, settings.training.frozen
    return building.abstract_gradients(own.trainable(settings), layout, state.params, mesh, frozen)


def explain(console: Console, settings: Settings, arrangement: Arrangement, state: TrainState) -> None:
    """Show what one training step really sends, and what was planned; nothing is allocated and nothing runs."""
    training, layout, mesh = settings.training, arrangement.layout, arrangement.mesh
    with arrangement.context():
        update, *args = step_of(settings, arrangement, state)
        show_tensors(console, settings, layout, mesh)
        with Progress(console, "Planning the training step") as progress:
            plan = gspmd.trace(update, *args)
            progress.begin("Compiling the training step")
            compiled = update.lower(*args).compile()
            ledger = gspmd.ledger(compiled)
        gradients = gradients_of(settings, arrangement, state)
        held = memory.table(state, gradients, compiled)
    comparison = ledger.compare(plan)
    console.print(held, ledger.table(), "", comparison.table(), sep="\n")
    if not own.is_own(settings):
        show_remat(console, settings.model, layout, mesh, training.batch, training.length, training.dtype)
    if comparison.differing:
        console.print(comparison.steps_table())


def sample(
    settings: Settings, arrangement: Arrangement, params: Any, tokenizer: checkpoints.Tokenizer | None = None
) -> str:
    """Text that the trained model continues the prompt with."""
    training, tokenizer = settings.training, tokenizer or checkpoints.byte_tokenizer()
    model = merge(models.with_arrays(abstract_model(settings, arrangement), params))
    prompt, how = tokenizer.encode(training.prompt), models.Sampling(temperature=0.8)
    together = partial(processes.meet, "generating text")
    generate, ends = models.Generator(model, compiled=together), sorted(tokenizer.ends)
    texts = generate([prompt], training.sample_bytes, sampling=how, seed=training.seed, stop=ends).texts
    return tokenizer.decode([*prompt, *texts[0]])
