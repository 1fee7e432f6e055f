"""Trains a Mixture-of-Experts language model on text, every tensor placed by a layout.

    gspmd train                                        # five minutes on two cores, 8 fake devices
    gspmd train --layout zero-3 --set ffn.w_in=E_xF_y  # the same losses, other collectives
    gspmd train --resume --out runs/001                # goes on where it stopped; --resume 300, from step 300
    gspmd train --explain                              # what its step will send, and no training
    gspmd train --from DIR --data 'text/*.jsonl'       # a public checkpoint, trained further on other text

Figures, events, checkpoints and pictures go to --out.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console

import gspmd
import gspmd_models as models
from gspmd import host
from gspmd.audit import check_compiler_options
from gspmd.commands import automatic, configs
from gspmd.commands.compile import File
from gspmd.commands.header import in_short, pipeline_of, rounds_in, show_run, show_tensors
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
from gspmd.training.reporting import memory, report, speed
from gspmd.training.reporting.metrics import Metrics
from gspmd.training.reporting.weights_and_biases import check_installed
from gspmd.training.run.folder import choose_out, held
from gspmd.training.run.relayout import check_same_form
from gspmd.training.state import TrainState, shardings
from gspmd.training.step import Step, jit_step
from gspmd_models import ModelConfig, checkpoints, step
from gspmd_models.finetuning.config import LoraConfig
from gspmd_models.finetuning.merging import merge, with_adapters
from gspmd_models.objective import check_stages
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
    model: ModelConfig = field(default_factory=ModelConfig)
    training: tyro.conf.OmitArgPrefixes[TrainingConfig] = field(default_factory=TrainingConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: tyro.conf.OmitArgPrefixes[OptimizerConfig] = field(default_factory=OptimizerConfig)
    sharding: tyro.conf.OmitArgPrefixes[ShardingConfig] = field(default_factory=ShardingConfig)

    def beside(self, folder: Path) -> "Settings":
        """Return these settings with a relative path of the checkpoint taken from `folder`, that of their file."""
        return replace(self, checkpoint=os.path.join(folder, self.checkpoint)) if self.checkpoint else self


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
    settings = command.parse(Settings, argv, default=default, find=configs.find, prog=prog, description=description)
    processes.join(settings.sharding.distributed)
    train(adapted(of_checkpoint(settings, argv)), "" if script else CALLED)
    return 0


def train(settings: Settings, called: str = CALLED) -> None:
    """Check everything that can be checked without compiling, and train."""
    training, sharding, began = settings.training, settings.sharding, time.monotonic()
    if training.log:
        check_installed()
    tokenizer = checkpoints.tokenizer(training.tokenizer) if training.tokenizer else None
    if tokenizer:
        tokenizer.ends = tokenizer.ends or data.usual_ends(tokenizer.backend)
    command.check_model(training, settings.model, data.number_of_ids(tokenizer.backend) if tokenizer else None)
    if tokenizer and training.sample_bytes and not tokenizer.encode(training.prompt):
        fault = f"the tokenizer has no token for {training.prompt!r}; give another --prompt, or --sample-bytes 0."
        raise ConfigError("cannot begin the generated text:", [fault])
    console = printing.console(120) if processes.first() else Console(quiet=True)
    with Progress(console, "Starting the devices") as progress:
        kept = host.keep_compiled(settings.compile_cache)
        found = None
        if sharding.layout == automatic.NAME:
            devices = start(sharding)
            asked = File(settings.model, training, settings.lora, settings.optimizer, sharding)
            found = automatic.for_training(console, asked, devices)
            sharding = replace(sharding, mesh=found.mesh)
            settings = replace(settings, sharding=sharding)
        sizes = settings.model.sizes(training.batch, training.length)
        arrangements = arrange(training, sharding, sizes, found.layout if found else None)
        for arrangement in arrangements:
            check_microbatch(settings, arrangement)
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
        # What does not fit there is said now, and not after so many steps, or once the text is read.
        if arrangement.after or pipeline_of(settings, arrangement):
            with arrangement.context(), Progress(console, f"Checking {arrangement}"):
                update, *args = step_of(settings, arrangement, state)
                jax.eval_shape(update, *args)
    corpus = data.load(
        training.data, fraction=training.validation_fraction, tokenizer=tokenizer, field=training.data_field,
        cache=training.data_cache, console=console,
    )  # fmt: skip
    data.check_size(corpus, training.batch, training.length)
    out = processes.agreed(lambda: choose_out(training.out, resume=training.resume, step=training.resume_step))
    with held(out), command.interrupts(out, called):
        console.print(f"Text: {corpus.describe()}.\nOut: {out}", soft_wrap=True, markup=False)
        if found and processes.first():
            found.write(out)
        programs = {each.after: partial(make_program, console, settings, each) for each in arrangements}
        if tokenizer and processes.first():
            checkpoints.keep_tokenizer(out / "tokenizer", tokenizer, settings.checkpoint)
        last, kept_settings = arrangements[-1], command.kept_settings(settings)

        def finish(state: TrainState, metrics: Metrics | None) -> None:
            with last.context():
                trained = merge(models.with_arrays(abstract_model(settings, last), state.params))
                text = partial(sample, training, trained, tokenizer) if training.sample_bytes else None
                name = f"{out.resolve().name} · {in_short(settings, last)}"
                if metrics is not None:
                    report.finish(console, out, name, training.prompt, text, metrics)
                elif text:
                    text()  # a program of all processes

        reached = int(fit(training, programs, corpus, out, console, kept_settings, finish).step)
        if processes.first():
            moe = settings.model.moe
            prompt = training.prompt if moe is None or moe.causal else None
            report.closing(console, out, time.monotonic() - began, command.next_commands(out, reached, prompt, called))


def check_microbatch(settings: Settings, arrangement: Arrangement) -> None:
    """Refuse microbatches that are smaller than a layout can shard; what does not divide the batch is refused later.

    Raises:
        LayoutError: with every fault.
    """
    training, count = settings.training, settings.training.microbatches
    if count == 1 or training.batch % count:
        return
    try:
        arrangement.layout.check(settings.model.sizes(training.batch // count, training.length), arrangement.mesh)
    except gspmd.LayoutError as error:
        each = f"These are the sizes of a microbatch, of which --microbatches {count} makes {count} of --batch"
        raise gspmd.LayoutError(f"{error}\n  {each} {training.batch}.") from None


def of_checkpoint(settings: Settings, argv: Sequence[str]) -> Settings:
    """The settings with model and tokenizer of the checkpoint to begin with; a resumed run has them in its own."""
    resumed = settings.training.resume
    named = {flag.split("=")[0].replace("_", "-") for flag in argv}
    fixed = sorted(flag for flag in named if flag.startswith("--model.") and flag != "--model.remat")
    faults = []
    if resumed and "--from" in named:
        faults.append("--from begins a run, and --resume goes on with one; leave one of the two out.")
    if settings.checkpoint and fixed and not resumed:
        faults.append(f"the checkpoint {settings.checkpoint!r} says what model it is; leave out {', '.join(fixed)}.")
    if faults:
        raise ConfigError("cannot begin with this checkpoint:", faults)
    if resumed or not settings.checkpoint:
        return settings
    model = replace(checkpoints.model_config(settings.checkpoint), remat=settings.model.remat)
    training = replace(settings.training, tokenizer=settings.training.tokenizer or settings.checkpoint)
    return replace(settings, model=model, training=training)


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
    model, training = abstract_model(settings, arrangement), settings.training
    with arrangement.context():
        return step.abstract_state(model, settings.optimizer, training.steps, arrangement.mesh, **of_state(training))


def of_state(training: TrainingConfig) -> dict[str, Any]:
    """What [training] says of the state: which parameters stay as they are, and what they are stored in."""
    return {"frozen": training.frozen, "parameter_dtype": training.parameter_dtype}


def make_program(console: Console, settings: Settings, arrangement: Arrangement) -> Program:
    """The model's programs in an arrangement, with the state where a run begins: elsewhere it is restored, or moved."""
    training, layout, mesh = settings.training, arrangement.layout, arrangement.mesh
    if arrangement.after:
        console.print(f"After step {arrangement.after}: {arrangement}.", markup=False)
    show_tensors(console, settings, layout, mesh)
    with arrangement.context():
        with Progress(console, "Building the model") as progress:
            model, state = abstract_model(settings, arrangement), abstract_state(settings, arrangement)
            if not (arrangement.after or training.resume):
                begun = begin(console, settings, arrangement)
                state = step.initial_state(begun, settings.optimizer, training.steps, mesh, **of_state(training))
            update = jit_step(build_step(settings, model), state, settings.sharding.compiled_with)
            batch, key = shardings(models.batch_spec(layout), mesh), jax.random.key(training.seed + 1)
            place, part = processes.placer(batch, training.batch), processes.part_of(batch, training.batch)
            evaluate = jax.jit(step.evaluation_step(model, training.microbatches, rounds_in(settings, layout)))
            tokens = models.abstract_batch(layout, mesh, training.batch, training.length)
            progress.begin("Planning the training step")
            plan = gspmd.trace(update, state, tokens, key)
        console.print(plan.table())
    flops = training.batch * training.length * settings.model.flops_per_token(training.length)
    gradients, peak = gradients_of(settings, model, state, mesh), speed.peak_flops([*mesh.devices.flat], training.dtype)
    return Program(state, update, evaluate, place, key, part, arrangement.context, gradients, flops, peak)


def build_step(settings: Settings, model: models.Transformer) -> Step:
    """One update, as the settings ask for it."""
    training, sharding = settings.training, settings.sharding
    pipeline = training.microbatches, sharding.schedule, rounds_in(settings, model.layout)
    return step.training_step(model, settings.optimizer, training.steps, *pipeline, **of_state(training))


def step_of(settings: Settings, arrangement: Arrangement, state: TrainState) -> tuple[Any, TrainState, Any, Any]:
    """One update in an arrangement, jitted, and its abstract arguments."""
    training, layout, mesh = settings.training, arrangement.layout, arrangement.mesh
    made = build_step(settings, abstract_model(settings, arrangement))
    update = jit_step(made, state, settings.sharding.compiled_with)
    tokens = models.abstract_batch(layout, mesh, training.batch, training.length)
    return update, state, tokens, models.abstract_key(mesh)


def gradients_of(settings: Settings, model: models.Transformer, state: TrainState, mesh: Any) -> Any:
    """Shapes, dtypes and shardings of the gradients, for the table of bytes."""
    return step.abstract_gradients(model, state.params, mesh, settings.training.frozen)


def explain(console: Console, settings: Settings, arrangement: Arrangement, state: TrainState) -> None:
    """What one training step really sends, and what was planned; nothing is allocated and nothing runs."""
    training, layout, mesh = settings.training, arrangement.layout, arrangement.mesh
    with arrangement.context():
        update, *args = step_of(settings, arrangement, state)
        show_tensors(console, settings, layout, mesh)
        with Progress(console, "Planning the training step") as progress:
            plan = gspmd.trace(update, *args)
            progress.begin("Compiling the training step")
            compiled = update.lower(*args).compile()
            ledger = gspmd.ledger(compiled)
        gradients = gradients_of(settings, abstract_model(settings, arrangement), state, mesh)
        held = memory.table(state, gradients, compiled)
    comparison = ledger.compare(plan)
    console.print(held, ledger.table(), "", comparison.table(), sep="\n")
    show_remat(console, settings.model, layout, mesh, training.batch, training.length, training.dtype)
    if comparison.differing:
        console.print(comparison.steps_table())


def sample(training: TrainingConfig, model: models.Transformer, tokenizer: checkpoints.Tokenizer | None = None) -> str:
    """Text that the model continues the prompt with."""
    tokenizer = tokenizer or checkpoints.byte_tokenizer()
    prompt, how = tokenizer.encode(training.prompt), models.Sampling(temperature=0.8)
    generate, ends = models.Generator(model), sorted(tokenizer.ends)
    texts = generate([prompt], training.sample_bytes, sampling=how, seed=training.seed, stop=ends).texts
    return tokenizer.decode([*prompt, *texts[0]])
