"""The programs of a run in one of its arrangements: update and evaluation, with the state that they need.

Each program has an abstract form, with shapes, dtypes and shardings instead of arrays. In this form the program is
checked, planned and explained before any array exists.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.stages import Wrapped
from rich.console import Console

import gspmd
import gspmd_models as models
from gspmd.commands import own
from gspmd.commands.header import show_tensors
from gspmd.commands.settings import RunSettings
from gspmd.commands.source import bytes_of
from gspmd.display.progress import Progress
from gspmd.interruption import answering
from gspmd.training import Program, processes
from gspmd.training.arrangement import Arrangement
from gspmd.training.reporting import memory, speed
from gspmd.training.state import TrainState, shardings
from gspmd.training.step import Update, building, jit_step
from gspmd_models import checkpoints
from gspmd_models.finetuning.merging import merge, with_adapters
from gspmd_models.remat.prediction import show_remat

Tree = Any


def make_program(console: Console, settings: RunSettings, arrangement: Arrangement) -> Program:
    """Build the programs of an arrangement, with the initial state if the run begins with this arrangement.

    If the run is resumed or only later changes to this arrangement, the state has shapes instead of arrays, and is
    restored or moved later.
    """
    training, layout, mesh = settings.training, arrangement.layout, arrangement.mesh
    if arrangement.after:
        console.print(f"After step {arrangement.after}: {arrangement}.", markup=False)
    show_tensors(console, settings, layout, mesh)
    with arrangement.context():
        with Progress(console, "Building the model") as progress:
            subject, state = own.trainable(settings), abstract_state(settings, arrangement)
            # If the state is restored or moved, its shapes are enough; arrays would be made to be thrown away.
            if not (arrangement.after or training.resume):
                values = initial_values(console, settings, arrangement)
                state = building.initial_state(subject, layout, values, update_of(settings), mesh)
            update, _, tokens, _ = step_of(settings, arrangement, state)
            batch, key = shardings(subject.batch_spec(layout), mesh), jax.random.key(training.seed + 1)
            vocabulary = None if own.is_own(settings) else settings.model.vocabulary
            place = processes.placer(batch, training.batch, vocabulary)
            part = processes.part_of(batch, training.batch)
            evaluate = jax.jit(evaluation_of(settings, arrangement))
            progress.begin("Planning the training step")
            plan = gspmd.trace(update, state, tokens, key)
        console.print(plan.table())
    flops = training.batch * training.length * flops_per_token(settings, layout)
    gradients, peak = gradients_of(settings, arrangement, state), speed.peak_flops([*mesh.devices.flat], training.dtype)
    return Program(state, update, evaluate, place, key, part, arrangement.context, gradients, flops, peak)


def initial_values(console: Console, settings: RunSettings, arrangement: Arrangement) -> dict[str, jax.Array]:
    """Return the initial parameters of the run."""
    if not own.is_own(settings):
        return models.arrays(begin(console, settings, arrangement))
    key = jax.random.key(settings.training.seed)
    return own.subject(settings).initial(arrangement.layout, arrangement.mesh, key)


def begin(console: Console, settings: RunSettings, arrangement: Arrangement) -> models.Transformer:
    """Return the initial model of the run, with the weights of its checkpoint, or random weights."""
    training, layout, mesh = settings.training, arrangement.layout, arrangement.mesh
    if not settings.checkpoint:
        return models.build(settings.model, layout, mesh, jax.random.key(training.seed), training.dtype)
    loaded, taken = checkpoints.load(settings.checkpoint, layout, mesh, "float32")
    console.print(f"Begun with {settings.checkpoint}: {taken}.", soft_wrap=True, markup=False)
    loaded = with_adapters(loaded, settings.model.lora, jax.random.key(training.seed))
    return models.with_arrays(abstract_model(settings, arrangement), models.arrays(loaded))


def abstract_model(settings: RunSettings, arrangement: Arrangement) -> models.Transformer:
    """Return the model with shapes and shardings instead of weights."""
    return models.abstract(settings.model, arrangement.layout, arrangement.mesh, settings.training.dtype)


def abstract_state(settings: RunSettings, arrangement: Arrangement) -> TrainState:
    """Return the state as shapes, dtypes and shardings."""
    subject, layout, mesh = own.trainable(settings), arrangement.layout, arrangement.mesh
    if own.is_own(settings):
        values = building.abstract_parameters(subject, layout, mesh)
    else:
        values = models.arrays(abstract_model(settings, arrangement))
    with arrangement.context():
        return building.abstract_state(subject, layout, values, update_of(settings), mesh)


def update_of(settings: RunSettings) -> Update:
    """Return those settings of an update that do not depend on the layout."""
    training = settings.training
    return Update(settings.optimizer, training.steps, training.microbatches, training.frozen, training.parameter_dtype)


def step_of(
    settings: RunSettings, arrangement: Arrangement, state: TrainState
) -> tuple[Wrapped, TrainState, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return a jitted update under an arrangement, and its arguments: the state, and an abstract batch and key."""
    training, layout, mesh, subject = settings.training, arrangement.layout, arrangement.mesh, own.trainable(settings)
    step = building.training_step(subject, layout, update_of(settings))
    tokens = building.abstract_batch(subject, layout, mesh, training.batch, training.length)
    return jit_step(step, state, settings.sharding.compiled_with), state, tokens, models.abstract_key(mesh)


def evaluation_of(settings: RunSettings, arrangement: Arrangement) -> Callable[[Tree, jax.Array], jax.Array]:
    """Return an uncompiled evaluation function, (parameters, tokens) -> mean cross-entropy."""
    return building.evaluation_step(own.trainable(settings), arrangement.layout, settings.training.microbatches)


def gradients_of(settings: RunSettings, arrangement: Arrangement, state: TrainState) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes, dtypes and shardings of the gradients, for the table of memory in the run's header."""
    layout, mesh, frozen = arrangement.layout, arrangement.mesh, settings.training.frozen
    return building.abstract_gradients(own.trainable(settings), layout, state.params, mesh, frozen)


def flops_per_token(settings: RunSettings, layout: gspmd.Layout) -> float:
    """Return the FLOPs per token of forward and backward pass."""
    training = settings.training
    if own.is_own(settings):
        return own.subject(settings).flops_per_token(layout, training.length)
    return settings.model.flops_per_token(training.length, training.source_length)


def check_traced(settings: RunSettings, arrangement: Arrangement, state: TrainState) -> None:
    """Trace one update and one evaluation, to find the faults that no other check finds.

    So a fault is reported before the text is read and the model is built, and not only when the arrangement begins. The
    check takes about a second. It makes a run only a third of a second longer, because the run then finds its plans in
    the cache.
    """
    with arrangement.context():
        update, *args = step_of(settings, arrangement, state)
        jax.eval_shape(update, *args)
        jax.eval_shape(evaluation_of(settings, arrangement), state.params, args[1])


def explain(console: Console, settings: RunSettings, arrangement: Arrangement, state: TrainState) -> None:
    """Print the bytes that a training step really sends beside the planned bytes; nothing is allocated or run."""
    training, layout, mesh = settings.training, arrangement.layout, arrangement.mesh
    with arrangement.context():
        update, *args = step_of(settings, arrangement, state)
        show_tensors(console, settings, layout, mesh)
        with Progress(console, "Planning the training step") as progress:
            plan = gspmd.trace(update, *args)
            progress.begin("Compiling the training step")
            compiled = answering(update.lower(*args).compile)
            ledger = gspmd.ledger(compiled)
        held = memory.table(state, gradients_of(settings, arrangement, state), compiled)
    comparison = ledger.compare(plan)
    together = not settings.details
    console.print(held, ledger.table(together), "", comparison.table(), sep="\n")
    if not own.is_own(settings):
        step = training.batch, training.length, training.dtype, training.microbatches
        show_remat(console, settings.model, layout, mesh, *step)
    if comparison.differing:
        console.print(comparison.steps_table(together=together))


def sample(
    settings: RunSettings, arrangement: Arrangement, params: Tree, tokenizer: checkpoints.Tokenizer | None = None
) -> str:
    """Return the prompt with its continuation by the trained model.

    An encoder–decoder reads the prompt as its source; the result is then the prompt and the model's output, on two
    lines.
    """
    training, tokenizer = settings.training, tokenizer or bytes_of(settings.model)
    model = merge(models.with_arrays(abstract_model(settings, arrangement), params))
    encode = tokenizer.source if settings.model.encoder_layers else tokenizer.encode
    prompt, how = encode(training.prompt), models.Sampling(temperature=0.8)
    together = partial(processes.meet, "generating text")
    generate, ends = models.Generator(model, compiled=together), sorted(tokenizer.ends)
    options: dict[str, Any] = {"sampling": how, "seed": training.seed, "stop": ends}
    if settings.model.encoder_layers:
        texts = generate(None, training.sampled, sources=[prompt], **options).texts
        return f"{training.prompt}\n=> {tokenizer.decode(texts[0])}"
    texts = generate([prompt], training.sampled, **options).texts
    return tokenizer.decode([*prompt, *texts[0]])
