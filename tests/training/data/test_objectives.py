"""Rows of named arrays: what is predicted, where documents end, and the same rows everywhere."""

import dataclasses
import itertools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from gspmd.training import data
from gspmd.training.config import TrainingConfig
from gspmd.training.data import packing
from gspmd.training.data.objectives import PackedText, Pairs, Prefix, SpanCorruption
from gspmd.training.toml import ConfigError
from tests.training.data.test_spans import splice

START, END = 257, 256


@pytest.fixture(autouse=True)
def windows(monkeypatch):
    """Few items are packed at a time, so that tests see several windows."""
    monkeypatch.setattr(packing, "WINDOW", 16)


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def texts(tmp_path):
    """Documents of 1 to 60 bytes, and their file."""
    random = np.random.default_rng(0)
    made = [bytes(random.integers(97, 123, size).tolist()).decode() for size in random.integers(1, 61, 120)]
    return made, write(tmp_path / "texts.jsonl", [{"text": text} for text in made])


@pytest.fixture
def pairs(tmp_path):
    """Pairs of a source and its target, which begins with the length of the source; and their file."""
    random = np.random.default_rng(1)
    letters = [bytes(random.integers(97, 123, 20).tolist()).decode() for _ in range(90)]
    made = [(text[: random.integers(1, 15)] + str(number), text[::-1][:9]) for number, text in enumerate(letters)]
    return made, write(tmp_path / "pairs.jsonl", [{"en": source, "de": target} for source, target in made])


def documents(row, side=""):
    """The tokens of each segment of a row, after which only padding stands."""
    tokens, segments = (row["source"], row["source_segments"]) if side else (row["tokens"], row["segments"])
    assert tokens.dtype == segments.dtype == np.int32
    count = segments.max()
    filled = (segments > 0).sum()
    assert (np.diff(segments[:filled]) >= 0).all()
    assert (segments[filled:] == 0).all()
    assert {*segments[:filled]} == {*range(1, count + 1)}
    return [tokens[segments == number].tolist() for number in range(1, count + 1)]


def rows_of(batch):
    return [{name: values[at] for name, values in batch.items()} for at in range(len(batch["tokens"]))]


def epoch(corpus, length, seed=0, batch=1):
    """Return the training rows of the first epoch of a corpus, counted by its segments."""
    batches = corpus.batches(batch, length, seed)
    for _ in itertools.count():
        yield from rows_of(next(batches))


def load(path, objective, length, **how):
    return data.load([path], objective=objective, length=length, fraction=0.2, **how)


def bytes_of(tokens):
    return bytes(tokens).decode()


def test_packed_documents_end_in_their_row_and_long_ones_are_cut(texts):
    made, path = texts
    corpus, length = load(path, PackedText(), 32), 32
    held = list(corpus.validation_batches(4, length))
    assert {name: (values.shape, values.dtype) for name, values in held[0].items()} == {
        "tokens": ((4, 33), np.int32),
        "segments": ((4, 33), np.int32),
    }
    found, predicted, cut = [], 0, {}
    total = sum(-(-len(text) // length) for text in made)  # a document has its end too, and its first is not predicted
    held_rows = [row for batch in held for row in rows_of(batch)]
    pieces = [piece for row in held_rows for piece in documents(row)]
    for row in epoch(corpus, length):
        pieces += documents(row)
        if len(pieces) >= total:
            break
    assert len(pieces) == total
    for piece in pieces:
        predicted += len(piece) - 1
        if piece[-1] == 0 and len(piece) <= length + 1:
            found.append(bytes_of(piece[:-1]))
        else:
            assert len(piece) == length + 1
            cut[piece[-1]] = piece
    # All of a document, or its end, whose beginning is a piece that ends with the first token of the rest.
    whole = {text for text in made if len(text) <= length}
    assert whole <= {*found}
    assert sorted(found) == sorted(text if len(text) <= length else text[length:] for text in made)
    assert predicted == sum(map(len, made))  # every byte but the first, and the end
    assert corpus.bytes_per_token == 1.0
    fill = np.mean([batch["segments"] > 0 for batch in held[:-1]])
    assert fill > 0.8


def test_packed_prompts_are_read_and_not_predicted(tmp_path):
    path = write(tmp_path / "chats.jsonl", [{"q": f"ask {n}?", "a": f"answer {n}"} for n in range(40)])
    corpus = load(path, PackedText(), 40, field="a", prompt="q")
    for row in rows_of(next(corpus.batches(4, 40, 0))):
        for document in documents(row):
            text = "".join(chr(~token if token < 0 else token) for token in document)
            assert re.fullmatch(r"ask (\d+)\?answer \1\0", text)
            assert [token < 0 for token in document] == [at <= text.index("?") for at in range(len(text))]


def test_a_document_begins_and_ends_as_its_tokenizer_says(texts, with_begin):
    made, path = texts
    corpus = load(path, PackedText(), 64, tokenizer=with_begin)
    for row in rows_of(next(corpus.batches(8, 64, 0))):
        for document in documents(row):
            assert (document[0], document[-1]) == (with_begin.begin, 0)
            assert with_begin.backend.decode(document) in made
    held = [row for batch in corpus.validation_batches(4, 64) for row in rows_of(batch)]
    texts_there = [document for row in held for document in documents(row)]
    size = sum(len(with_begin.backend.decode(document)) + 1 for document in texts_there)
    assert corpus.bytes_per_token == pytest.approx(size / sum(len(document) - 1 for document in texts_there))


def test_span_corruption_splices_to_the_text(texts):
    _, path = texts
    objective = SpanCorruption(32, START, END, sentinel=357)
    length = objective.noise.lengths(objective.window)[1]
    corpus = load(path, objective, length)
    text = [*np.asarray(corpus.train)]
    sentinels = [*range(300, 358)]
    windows = []
    for row in itertools.islice(epoch(corpus, length, batch=3), len(text) // objective.window):
        ((*source, end),), ((start, *target, last),) = documents(row, "source"), documents(row)
        assert (start, last, end) == (START, END, END)
        assert (len(source) + 1, len(target) + 1) == (row["source"].size, row["tokens"].size - 1) == (32, length)
        windows.append(splice(source, target, sentinels))
    wanted = [text[at : at + objective.window] for at in range(0, len(text) - objective.window + 1, objective.window)]
    assert sorted(windows) == sorted(wanted)
    assert corpus.bytes_per_prediction(length) == 5 / 8  # 5 of 33 tokens in 2 spans, and the end


def test_noise_is_drawn_anew_in_every_epoch_and_the_same_after_a_resume(texts):
    _, path = texts
    objective = SpanCorruption(32, START, END, sentinel=357)
    corpus = load(path, objective, 16)
    count = len(corpus.train) // objective.window
    rows = [row["source"].tobytes() for row in itertools.islice(epoch(corpus, 16, seed=4), 2 * count)]
    assert len({*rows}) > 1.95 * count  # few of them can be drawn twice
    other = {row["source"].tobytes() for row in itertools.islice(epoch(corpus, 16, seed=5), count)}
    assert len(other & {*rows}) < 0.05 * count
    for one, two in zip(corpus.validation_batches(2, 16), corpus.validation_batches(2, 16), strict=True):
        np.testing.assert_array_equal(one["tokens"], two["tokens"])


def test_a_prefix_and_its_rest_are_the_text(texts):
    _, path = texts
    corpus = load(path, Prefix(24, START, END), 20)
    text = bytes_of(np.asarray(corpus.train).tolist())
    splits = set()
    for row in itertools.islice(epoch(corpus, 20), len(text) // 20):
        ((*source, end),), ((start, *target, last),) = documents(row, "source"), documents(row)
        assert (start, last, end) == (START, END, END)
        assert len(source) + len(target) == 20
        assert bytes_of(source + target) in text
        splits.add(len(source))
    assert min(splits) < 5
    assert max(splits) > 15
    assert corpus.bytes_per_prediction(20) == pytest.approx(10 / 11)


@pytest.mark.parametrize("pack", [False, True])
def test_pairs_stay_together(pairs, pack):
    made, path = pairs
    corpus = load(path, Pairs(40, START, END, pack), 30, field="de", source="en")
    found, rows = [], []
    for row in epoch(corpus, 30):
        sources, targets = documents(row, "source"), documents(row)
        rows.append(row)
        for (*source, end), (start, *target, last) in zip(sources, targets, strict=True):
            assert (start, last, end) == (START, END, END)
            found.append((bytes_of(source), bytes_of(target)))
        assert pack or len(sources) == 1
        if len(found) >= corpus.files[0]:
            break
    for batch in corpus.validation_batches(4, 30):
        for row in rows_of(batch):
            sources, targets = documents(row, "source"), documents(row)
            found += [(bytes_of(a[:-1]), bytes_of(b[1:-1])) for a, b in zip(sources, targets, strict=True)]
    assert sorted(found) == sorted(made)
    assert corpus.files[0] + corpus.files[1] == len(made)
    assert "pairs held out" in corpus.describe()
    assert corpus.bytes_per_token == 1.0
    if pack:
        assert len(rows) < corpus.files[0] / 1.5


def test_pairs_of_a_tokenizer_count_the_bytes_of_targets(pairs, tokenizer):
    made, path = pairs
    corpus = load(path, Pairs(40, 1, 0), 30, field="de", source="en", tokenizer=tokenizer)
    ids = [tokenizer.backend.encode(target, add_special_tokens=False).ids for _, target in made]
    held = [
        document for batch in corpus.validation_batches(4, 30) for row in rows_of(batch) for document in documents(row)
    ]
    assert all(document[1:-1] in ids for document in held)
    size = sum(len(tokenizer.backend.decode(document[1:-1])) + 1 for document in held)
    assert corpus.bytes_per_token == pytest.approx(size / sum(len(document) - 1 for document in held))


def test_pairs_of_lines_with_tabs(pairs, tmp_path):
    made, path = pairs
    lines = "".join(f"{source}\t{target}\n" for source, target in made)
    (tmp_path / "pairs.tsv").write_text(lines)
    objective = Pairs(40, START, END)
    of_json = load(path, objective, 30, field="de", source="en")
    np.testing.assert_array_equal(load(str(tmp_path / "pairs.tsv"), objective, 30).train, of_json.train)


def test_faults_of_pairs_name_file_and_line(tmp_path):
    tabs = tmp_path / "a.tsv"
    tabs.write_text("one\tzwei\nno tab\n\ttarget\nsource\t\na\tb\tc\n")
    records = write(tmp_path / "b.jsonl", [{"en": "x", "de": ""}, {"en": "x"}, {"en": 3, "de": "y"}])
    with pytest.raises(ConfigError) as error:
        data.load([str(tabs), records], objective=Pairs(9, START, END), length=9, field="de", source="en")
    first, second = repr(str(tabs)), repr(records)
    assert sorted(error.value.faults) == sorted(
        [
            f"{first}: line 2 has no tab; a pair is SOURCE, one tab, TARGET.",
            f"{first}: line 3 has no source; both sides of a pair need text.",
            f"{first}: line 4 has no target; both sides of a pair need text.",
            f"{first}: line 5 has 2 tabs; a pair is SOURCE, one tab, TARGET.",
            f"{second}: line 1 has no target; both sides of a pair need text.",
            f"{second}: line 2 has no field 'de'; it has 'en'. See --data-field.",
            f"{second}: line 3: 'en' is a number, not a string.",
        ]
    )


@pytest.mark.parametrize("lines", ["one\tzwei\n", "one\tzwei\none\tdrei\n"])
def test_pairs_of_one_source_cannot_be_held_out(lines, tmp_path):
    (tmp_path / "a.tsv").write_text(lines)
    with pytest.raises(ConfigError) as error:
        load(str(tmp_path / "a.tsv"), Pairs(9, START, END), 8)
    assert error.value.faults == (
        "there is one pair, or all have the same source, so none can be held out; give more pairs.",
    )


def test_a_side_that_is_too_long_is_named(tmp_path):
    (tmp_path / "a.tsv").write_text("ab\tc\nabcdefghi\tx\nac\tabcdefgh\nad\tabcdefg\n")
    where, objective = repr(str(tmp_path / "a.tsv")), Pairs(9, START, END)
    with pytest.raises(ConfigError) as error:
        load(str(tmp_path / "a.tsv"), objective, 8)
    wrong, remedy = "and one for its end, but", "leave the pair out, or raise"
    assert sorted(error.value.faults) == [
        f"{where}: line 2: the source has 9 tokens, {wrong} --source-length is 9; {remedy} --source-length.",
        f"{where}: line 3: the target has 8 tokens, {wrong} --length is 8; {remedy} --length.",
    ]
    assert load(str(tmp_path / "a.tsv"), dataclasses.replace(objective, source_length=10), 9).files


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("a.txt", {}, "holds no pairs: they are read from .jsonl, .parquet and .tsv."),
        ("a.jsonl", {}, "records need a field with the source of a pair; name it with --data-source."),
        ("a.jsonl", {"source": "text"}, "source and target are both in the field 'text'"),
        ("a.tsv", {"source": "text"}, "lines with tabs have no fields; leave out --data-source and --data-field."),
    ],
)
def test_data_without_pairs_is_refused(tmp_path, name, how, said):
    (tmp_path / name).write_text("x")
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(str(tmp_path / name), Pairs(9, START, END), 9, **how)


def test_pairs_need_files():
    with pytest.raises(ConfigError, match="needs files of pairs; name them with --data"):
        data.load([], objective=Pairs(9, START, END), length=9)


OBJECTIVES = {
    "packed": PackedText(),
    "spans": SpanCorruption(32, START, END, 357),
    "prefix": Prefix(24, START, END),
    "pairs": Pairs(40, START, END),
    "packed pairs": Pairs(40, START, END, pack=True),
}


@pytest.fixture(params=OBJECTIVES)
def corpus(request, texts, pairs):
    of_pairs = "pairs" in request.param
    how = {"field": "de", "source": "en"} if of_pairs else {}
    return load(pairs[1] if of_pairs else texts[1], OBJECTIVES[request.param], 24, **how)


def equal(one, two):
    assert one.keys() == two.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, two[name])


def test_rows_are_those_of_any_number_of_processes_and_of_a_resume(corpus):
    whole = corpus.batches(6, 24, 2)
    parts = [corpus.batches(6, 24, 2, process, 3) for process in range(3)]
    batches, states = [], []
    for _ in range(40):  # more than an epoch
        states.append(json.loads(json.dumps(whole.get_state())))
        batches.append(next(whole))
        each = [next(part) for part in parts]
        equal({name: np.concatenate([part[name] for part in each]) for name in each[0]}, batches[-1])
        assert all(part.get_state() == whole.get_state() for part in parts)
    again = corpus.batches(6, 24, 2, 1, 2)
    again.set_state(states[23])
    for batch in batches[23:]:
        equal(next(again), {name: values[3:] for name, values in batch.items()})
    held = list(corpus.validation_batches(6, 24))
    assert len(held) == corpus.validation_count(6, 24)
    for rows in zip(held, *(corpus.validation_batches(6, 24, 0, process, 3) for process in range(3)), strict=True):
        equal({name: np.concatenate([part[name] for part in rows[1:]]) for name in rows[0]}, rows[0])
    assert len(list(corpus.validation_batches(2, 24, limit=2))) == 2


def test_kept_tokens_are_read_again(corpus, texts, pairs):
    of_pairs = isinstance(corpus.objective, Pairs)
    how = {"field": "de", "source": "en"} if of_pairs else {}
    again = load(pairs[1] if of_pairs else texts[1], corpus.objective, 24, **how)
    assert again.identity() == corpus.identity() == dataclasses.replace(corpus, digest="").identity()
    equal(next(again.batches(6, 24, 0)), next(corpus.batches(6, 24, 0)))


def test_a_resume_with_other_rows_is_refused(corpus):
    config = TrainingConfig(batch=6, length=24)
    saved = json.loads(json.dumps(data.stream(corpus, config)))
    data.check_stream(saved, data.stream(corpus, config))
    plain = data.stream(dataclasses.replace(corpus, objective=None), config)
    for one, two in ((saved, plain), (plain, saved)):
        with pytest.raises(ConfigError, match=r"but is not set\.|was not set, but is"):
            data.check_stream(one, two)


def test_kept_tokens_of_windows_serve_span_corruption(texts, cache):
    """Borders are kept only where they are needed, so other objectives go on with what earlier runs have kept."""
    _, path = texts
    load(path, None, 24)
    load(path, OBJECTIVES["spans"], 24)
    assert len([*cache.glob("*/index.json")]) == 1
    load(path, OBJECTIVES["packed"], 24)
    assert len([*cache.glob("*/index.json")]) == 2


def test_too_little_text_is_refused(corpus):
    with pytest.raises(ConfigError, match=r"the training text is [\d,]+ sequences?, but a batch needs 500\."):
        data.check_size(corpus, 500, 24)
    data.check_size(corpus, 6, 24)


def config(**settings):
    return TrainingConfig(**{"objective": "span-corruption", "source_length": 512, "length": 114, **settings})


def test_bytes_have_ids_of_their_own_and_then_the_end_start_and_sentinels():
    made = data.objective(config(), vocabulary=358, start=257)
    assert made == SpanCorruption(512, 257, 256, 357)
    assert made.window == 568
    assert data.objective(config(), vocabulary=286, start=257) == SpanCorruption(512, 257, 256, 285)
    pairs = config(objective="pairs", pack=True)
    assert data.objective(pairs, vocabulary=257, start=0) == Pairs(512, 0, 256, pack=True)
    assert data.objective(config(objective="prefix"), vocabulary=257, start=0) == Prefix(512, 0, 256)
    assert data.objective(TrainingConfig(pack=True), vocabulary=256, start=0) == PackedText()
    assert data.objective(TrainingConfig(), vocabulary=256, start=0) is None


@pytest.mark.parametrize(
    ("settings", "vocabulary", "said"),
    [
        (
            {},
            285,
            "model.vocabulary is 285, but must be at least 286: tokens up to 257, with start token 257 and end 256, "
            "and 28 sentinels.",
        ),
        ({"length": 113}, 358, "sources of 512 tokens have targets of 114, but length is 113; set length to 114"),
        ({"objective": "prefix"}, 257, "model.vocabulary is 257, but must be at least 258: tokens up to 257"),
        (
            {"source_length": 2},
            358,
            "source_length is 2, and length is 114; both must be at least 3.",
        ),
    ],
)
def test_a_model_without_room_is_refused(settings, vocabulary, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        data.objective(config(**settings), vocabulary=vocabulary, start=257)


def test_sentinels_of_the_tokenizer_are_taken(backend):
    count = backend.get_vocab_size()
    own = Tokenizer.from_str(backend.to_str())
    own.add_special_tokens([f"<extra_id_{number}>" for number in reversed(range(20))])
    own.add_tokens(["after", "</s>"])
    end = own.token_to_id("</s>")
    own.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", end)])
    tokenizer = SimpleNamespace(backend=own, ends=frozenset({0}))
    short = config(source_length=64, length=32)
    wanted = SpanCorruption(64, 0, end, count + 19)
    assert data.objective(short, vocabulary=1000, start=0, tokenizer=tokenizer) == wanted
    with pytest.raises(ConfigError, match="has 28 spans, but the tokenizer lacks <extra_id_0> to <extra_id_27> with"):
        data.objective(config(), vocabulary=1000, start=0, tokenizer=tokenizer)
    without = SimpleNamespace(backend=backend, ends=frozenset({0}))
    assert data.objective(short, vocabulary=1000, start=0, tokenizer=without).sentinel == 999


def test_a_tokenizer_without_an_end_is_refused(backend):
    plain = json.loads(backend.to_str())
    plain["added_tokens"] = []
    tokenizer = SimpleNamespace(backend=Tokenizer.from_str(json.dumps(plain)), ends=frozenset())
    with pytest.raises(ConfigError, match="the tokenizer has no token that ends a text"):
        data.objective(config(), vocabulary=1000, start=0, tokenizer=tokenizer)


def test_refuses_a_tokenizer_that_begins_texts(with_begin):
    """Generation would read such a token before a source, which no row of training has."""
    training = TrainingConfig(objective="prefix", sample_bytes=0)
    with pytest.raises(ConfigError) as error:
        data.objective(training, vocabulary=1000, start=0, tokenizer=with_begin)
    assert f"the tokenizer puts [{with_begin.begin}] before every text, and [0] after" in str(error.value)
