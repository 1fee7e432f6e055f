"""A model as it is published, SmolLM2-135M-Instruct: its tokens, its greedy text in any layout, and in int8."""

import jax
import numpy as np
import pytest

import gspmd_models as models
from gspmd_models.checkpoints import load, tokenizer
from tests.models.checkpoints.conftest import divergence, logits_of

PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time"]
COUNT = 48

#: Of 9 query and 3 key/value heads, neither of which four devices divide.
LAYOUTS = {
    "replicated": {},
    "weight-stationary-2d": {"K": 4},
    "weight-gathered-xy": {"K": 4},
    "megatron-1d": {"K": 4},
}


@pytest.fixture(scope="module")
def continued(smollm) -> list[list[int]]:
    """The ids of each prompt with 48 more, as transformers continues it greedily; an end of text does not end it."""
    import torch

    folder, model = smollm
    model.generation_config.eos_token_id, texts = None, []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(folder).encode(prompt)])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": COUNT, "do_sample": False}
        texts.append(model.generate(ids, **options)[0].tolist())
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("preset", LAYOUTS)
def test_greedy_text_is_that_of_transformers(preset, smollm, continued, placing):
    layout, mesh = placing(preset, LAYOUTS[preset])
    model, _ = load(smollm[0], layout, mesh, "float32")
    prompts, greedy = [text[:-COUNT] for text in continued], models.Sampling(temperature=0)
    with jax.set_mesh(mesh):
        texts = models.Generator(model)(prompts, COUNT, sampling=greedy).texts
    assert [prompt + text for prompt, text in zip(prompts, texts)] == continued


@pytest.mark.slow
def test_text_is_encoded_and_decoded_as_by_transformers(smollm, continued, transformers):
    folder, _ = smollm
    ours, theirs = tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.ends == {theirs.eos_token_id}
    for text in [*PROMPTS, "naïve café  日本語\n\t👩‍👩‍👧<|im_end|>", "<|im_start|>user\nHi 42!<|im_end|>\n"]:
        assert ours.encode(text) == theirs(text).input_ids
    for ids in continued:
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.slow
def test_a_chat_has_the_ids_of_transformers(smollm, transformers):
    """Render the template of the file, which adds a system message where the chat has none."""
    folder, _ = smollm
    ours, theirs = tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    user, answer = {"role": "user", "content": "Hi 42!"}, {"role": "assistant", "content": " Hello."}
    for messages in ([user], [user, answer, user], [{"role": "system", "content": "Be brief."}, user]):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.chat_text(messages) == text
        assert ours.chat(messages) == theirs(text, add_special_tokens=False).input_ids
        assert "<|im_start|>assistant" in text


@pytest.mark.slow
def test_int8_is_as_near_as_the_pages_say(smollm, continued, placing):
    """The text is the one that transformers wrote; docs/sampling.md has the figures, which are rounded up here."""
    layout, mesh = placing("replicated")
    model, _ = load(smollm[0], layout, mesh, "float32", int8=True)
    program, exact, near = jax.jit(lambda weights, ids: models.with_arrays(model, weights)(ids)[0]), [], []
    for text in continued:
        ids = np.array([text], np.int32)
        exact.append(logits_of(smollm[1], ids)[0])
        with jax.set_mesh(mesh):
            near.append(np.asarray(program(models.arrays(model), ids))[0])
    exact, near = np.concatenate(exact), np.concatenate(near)
    assert np.linalg.norm(near - exact) < 0.04 * np.linalg.norm(exact)
    assert divergence(exact, near).mean() < 0.006
    assert (exact.argmax(-1) == near.argmax(-1)).mean() > 0.97
