"""Settings of sampling that a checkpoint asks for."""

import json

import pytest

from gspmd_models import Sampling
from gspmd_models.checkpoints import CheckpointError, GenerationConfig, sampling


def folder(at, **entries):
    (at / "generation_config.json").write_text(json.dumps(entries))
    return at


def test_settings_are_those_of_the_file(tmp_path):
    assert sampling(tmp_path) == Sampling()  # there is no file
    every = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}
    assert sampling(folder(tmp_path, **every)) == Sampling(**every)
    assert sampling(folder(tmp_path, do_sample=True, temperature=None)) == Sampling()
    assert sampling(folder(tmp_path, do_sample=False, temperature=0.6, top_k=20)) == Sampling(temperature=0)
    assert sampling(folder(tmp_path, eos_token_id=[1, 2], max_length=4096, use_cache=True)) == Sampling()


def test_what_transformers_leaves_as_it_is_asks_for_nothing(transformers, tmp_path):
    """The file of a configuration with transformers' own defaults, written out."""
    defaults = transformers.GenerationConfig._get_default_generation_params()
    transformers.GenerationConfig(**(defaults | {"do_sample": True})).save_pretrained(tmp_path)
    assert GenerationConfig.read(tmp_path).unsupported == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    assert GenerationConfig.read(tmp_path).unsupported == {}
    assert sampling(tmp_path) == Sampling(temperature=0)


@pytest.mark.parametrize(
    "entry",
    [
        {"repetition_penalty": 1.1}, {"no_repeat_ngram_size": 3}, {"suppress_tokens": [1]}, {"forced_eos_token_id": 2},
        {"begin_suppress_tokens": [1]}, {"typical_p": 0.9}, {"bad_words_ids": [[1]]}, {"min_new_tokens": 4},
        {"forced_bos_token_id": 0}, {"guidance_scale": 1.5}, {"stop_strings": ["\n"]}, {"penalty_alpha": 0.6},
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_its_name(entry, tmp_path):
    ((name, value),) = entry.items()
    with pytest.raises(CheckpointError) as caught:
        sampling(folder(tmp_path, temperature=0.5, **entry))
    assert f"generation_config.json sets {name} {value!r}, which is not supported here." in str(caught.value)
    read = GenerationConfig.read(tmp_path)
    assert (read.unsupported, read.sampling) == (entry, Sampling(temperature=0.5))


def test_faulty_settings_are_one_message(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        sampling(folder(tmp_path, temperature="hot", top_k=2.5, do_sample=1, top_p=True))
    assert caught.value.faults == (
        "temperature of generation_config.json is 'hot'; it must be a number.",
        "top_p of generation_config.json is True; it must be a number.",
        "top_k of generation_config.json is 2.5; it must be a whole number.",
        "do_sample of generation_config.json is 1; it must be true or false.",
    )
    with pytest.raises(CheckpointError, match=r"generation_config\.json: top_p is 1\.5; it must be greater"):
        sampling(folder(tmp_path, top_p=1.5))
