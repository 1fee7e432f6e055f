"""`gspmd train` on rows of named arrays: packed documents, and the sources and targets of an encoder–decoder."""

import json

import jax
import pytest

from gspmd import host
from gspmd.commands import train
from gspmd.training.reporting import metrics

pytestmark = pytest.mark.slow  # each compiles a step and a validation

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "then", "it", "sleeps"]
SIZES = "vocabulary = 358\nembed = 16\nlayers = 1\nheads = 8\nkv_heads = 8\nhead_size = 8\nfeed_forward = 16"
ENCODER = "encoder_layers = 1\nstart_token = 257"
RUN = ["--batch", "8", "--steps", "3", "--final-validation-batches", "2", "--sample-bytes", "0", "--layout", "zero-3"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with texts, pairs and two models, in which the devices are those of this process."""
    monkeypatch.setattr(host, "start", lambda count, platform, host_devices=8: jax.devices()[: count or host_devices])
    monkeypatch.setenv("GSPMD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    texts = [" ".join(WORDS[at % 7 : at % 7 + 2 + at % 5]) + f" {at}" for at in range(300)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "pairs.tsv").write_text("".join(f"{text}\t{text[::-1]}\n" for text in texts))
    (tmp_path / "decoder.toml").write_text(f"[model]\n{SIZES.replace('358', '256')}\n")
    (tmp_path / "encoder.toml").write_text(f"[model]\n{SIZES}\n{ENCODER}\n")
    return tmp_path


def rows(folder, *flags):
    assert train.run(["--config", *flags, *RUN, "--out", "run"]) == 0
    return metrics.read(folder / "run")


def test_packed_pairs_train_and_go_on(folder):
    flags = ["encoder.toml", "--data", "pairs.tsv", "--objective", "pairs", "--pack"]
    found = rows(folder, *flags, "--source-length", "96", "--length", "96")
    assert all(0.7 < row["fill"] < 1 and row["predicted"] > 400 for row in found[:-1])
    assert found[-1]["val_bits_per_byte"] == pytest.approx(8.5, abs=0.5)  # log2 of the vocabulary
    assert train.run(["--resume", "--out", "run", "--steps", "4"]) == 0
    assert train.run(["--resume", "--out", "run", "--steps", "5", "--no-pack"]) == 2


@pytest.mark.parametrize(
    ("flags", "predicted"),
    [
        (["decoder.toml", "--pack", "--length", "48"], None),
        (["encoder.toml", "--objective", "span-corruption", "--source-length", "64", "--length", "18"], 8 * 14),
        (["encoder.toml", "--objective", "prefix", "--source-length", "32", "--length", "32"], None),
    ],
)
def test_texts_train(folder, flags, predicted):
    found = rows(folder, *flags, "--data", "texts.jsonl")
    assert [row["predicted"] for row in found[:-1]] == [predicted] * 3 or predicted is None
    assert all(0 < row["fill"] <= 1 for row in found[:-1])
    assert found[-1]["val_bits_per_byte"] > 7
    assert train.run(["--config", *flags, *RUN, "--data", "texts.jsonl", "--explain"]) == 0


def losses(folder, out, *flags):
    pairs = ["--config", "encoder.toml", "--objective", "pairs", "--pack", "--source-length", "96", "--length", "96"]
    assert train.run([*pairs, *RUN, "--steps", "4", "--out", out, *flags]) == 0
    found = [row["loss"] for row in metrics.read(folder / out) if "loss" in row]
    assert len(found) == 4
    return found


def test_a_run_of_two_stacks_goes_on_in_another_layout(folder):
    data = ["--data", "pairs.tsv"]
    one = losses(folder, "one", *data)
    other = losses(folder, "other", *data, "--relayout", "2=megatron-1d:x=4,y=2,z=1")
    assert other == pytest.approx(one, rel=1e-5)


def test_pairs_in_parquet_are_those_of_a_table_of_text(folder):
    from pyarrow import Table, parquet

    pairs = [line.split("\t") for line in (folder / "pairs.tsv").read_text().splitlines()]
    columns = dict(zip(("source", "target"), map(list, zip(*pairs))))
    parquet.write_table(Table.from_pydict(columns), folder / "pairs.parquet")
    fields = ["--data-source", "source", "--data-field", "target"]
    found = losses(folder, "parquet", "--data", "pairs.parquet", *fields)
    assert found == losses(folder, "text", "--data", "pairs.tsv")
