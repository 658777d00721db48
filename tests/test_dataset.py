"""Token files to rows: what a training sees, and what its validation loss is taken over."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import MICRO, REPEATABLE, ROOT, WORDS, refusal, write
from hypothesis import given
from hypothesis import strategies as st

import corpus
import train
from config import DataConfig, ModelConfig
from corpus import Source
from dataset import Data, DocumentRows, Rows, StreamRows
from errors import UsageError

BOS = 9  # of the tokens written by hand here: documents are made of 0 … 8


def open_names(mode: str = "documents", block_size: int = 8, val_fraction: float = 0.3) -> Data:
    return Data(DataConfig(mode=mode, val_fraction=val_fraction), ModelConfig(block_size=block_size), seed=1)


def open_text(path: Path, text: str, mode: str = "stream", block_size: int = 8) -> Data:
    """A plain text, with byte tokens and its last tenth for validation."""
    path.write_text(text, encoding="utf-8")
    corpus.prepare("mine", Source([path]), "byte", 0.1, 0)
    return Data(DataConfig(name="mine", mode=mode), ModelConfig(block_size=block_size), seed=1)


def all_rows(rows: DocumentRows | StreamRows) -> Rows:
    return rows.rows(np.arange(len(rows)))


# Opening a set


def test_the_names_are_29693_documents_of_26_letters(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PREPARED", tmp_path)
    data = Data(DataConfig(), ModelConfig(), seed=1)
    assert data.tokenizer.encode("az") == [0, 25] and data.bos_id == data.tokenizer.bos_id == 26
    assert sum(split["documents"] for split in data.meta["splits"].values()) == 29_693
    assert data.val_characters == data.meta["splits"]["val"]["tokens"] - 1
    assert 0.09 < data.meta["splits"]["val"]["documents"] / 29_693 < 0.11


def test_a_meta_in_which_something_is_missing_or_wrong_is_refused_before_anything_uses_it(prepared):
    meta = corpus.prepare("mine", Source([write(prepared, WORDS)], "lines"), "char", 0.3, 0)
    file = corpus.PREPARED / "mine" / "meta.json"
    damaged = [{key: value for key, value in meta.items() if key != missing} for missing in meta]
    damaged += [meta | {key: value} for key in meta for value in (None, "x", -1, 1e400, [], {}, [[]], {"train": 3})]
    for split in ("train", "val"):
        counts = meta["splits"][split]
        damaged += [meta | {"splits": meta["splits"] | {split: counts | {key: "x"}}} for key in counts]
    opened = 0
    for content in damaged:
        file.write_text(json.dumps(content), encoding="utf-8")
        try:
            data = Data(DataConfig(name="mine", val_fraction=0.3), ModelConfig(), 1)
        except UsageError as error:
            assert str(file.parent) in str(error) and len(str(error).splitlines()) == 1
        else:
            opened += 1
            assert data.describe() and len(data.val) > 0  # what is wrong is not needed
    assert opened < len(damaged) / 2


@pytest.mark.parametrize("damage", ["short", "long", "empty", "missing", "folder"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_token_file_of_the_wrong_length_is_refused_with_its_path(prepared, split, damage):
    write(prepared, [*WORDS, *map(chr, range(0x4E00, 0x4F00))])
    assert open_names().meta["dtype"] == "uint16"
    path = corpus.PREPARED / "names" / f"{split}.bin"
    raw = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes({"short": raw[:-3], "long": raw + raw, "empty": b""}[damage])
    message = refusal(open_names)
    assert str(path) in message and "python data/prepare.py names" in message


@pytest.mark.parametrize("split", ["train", "val"])
def test_tokens_that_are_not_those_of_the_set_are_refused(prepared, split):
    write(prepared, WORDS)
    bos = open_names().tokenizer.bos_id
    path = corpus.PREPARED / "names" / f"{split}.bin"
    raw = path.read_bytes()
    # a token beyond the vocabulary, and documents that do not start or end
    for wrong in (raw[:5] + bytes([bos + 1]) + raw[6:], b"\0" + raw[1:], raw[:-1] + b"\0"):
        path.write_bytes(wrong)
        message = refusal(open_names)
        assert str(path) in message and "does not fit its meta.json" in message


def test_a_set_that_is_prepared_again_does_not_change_under_a_training(prepared):
    write(prepared, WORDS)
    data = open_names()
    before, batch = data.tokens["train"].tolist(), data.train.batch(3, 20)
    corpus.prepare("names", Source([write(prepared, WORDS[:9])], "lines"), "byte", 0.3, 0)
    assert data.tokens["train"].tolist() == before and np.array_equal(data.train.batch(3, 20), batch)
    assert open_names().fingerprint != data.fingerprint


# Documents

DOCUMENTS = [[1], [2, 3], list(range(8)), list(range(9)), [5] * 7, [4] * 40, [8, 7], [*range(9)] * 4, [0]]


def joined(documents: list[list[int]]) -> np.ndarray:
    return np.array([BOS, *(token for document in documents for token in (*document, BOS))], dtype=np.uint8)


TOKENS = joined(DOCUMENTS)


def contexts(tokens: list[int], block_size: int, hop: int) -> Counter:
    """What the model may see before each token but the first, with the token, one after the other as when sampling."""
    seen, start = Counter(), 0
    for n in range(1, len(tokens)):
        if n - start > block_size:
            start += hop  # the window is full: its oldest tokens are dropped
        seen[tuple(tokens[start:n]), tokens[n]] += 1
    return seen


def predictions(rows: Rows) -> Counter:
    """What stands before each target of some rows, with the target."""
    return Counter(
        (tuple(row[: place + 1].tolist()), int(target[place]))
        for row, target in zip(*rows, strict=True)
        for place in np.flatnonzero(target >= 0)
    )


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 16, 100])
def test_every_token_is_a_target_once_with_the_window_of_the_rule_before_it(block_size):
    rows = DocumentRows(TOKENS, BOS, block_size, seed=0)
    inputs, targets = all_rows(rows)
    assert inputs.shape == targets.shape == (len(rows), block_size) and inputs.dtype == targets.dtype == np.int64
    hop = max(1, block_size // 8)
    expected = sum((contexts([BOS, *document, BOS], block_size, hop) for document in DOCUMENTS), Counter())
    assert predictions((inputs, targets)) == expected
    assert (targets >= -1).all() and (targets >= 0).sum() == len(TOKENS) - 1


documents = st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=30), min_size=1, max_size=8)


@REPEATABLE
@given(documents, st.integers(1, 12), st.data())
def test_windows_stay_in_their_document_at_every_distance(documents, block_size, data):
    hop = data.draw(st.integers(1, block_size))
    rows = DocumentRows(joined(documents), BOS, block_size, 0, hop)
    expected = sum((contexts([BOS, *document, BOS], block_size, hop) for document in documents), Counter())
    assert predictions(all_rows(rows)) == expected
    # and of the same tokens as one plain text, no separator is anything special
    rows = DocumentRows(joined(documents), None, block_size, 0, hop)
    assert predictions(all_rows(rows)) == contexts(joined(documents).tolist(), block_size, hop)
    assert (rows.document_of(np.arange(len(rows))) == 0).all()


@REPEATABLE
@given(documents, st.integers(1, 12))
def test_a_row_knows_its_document_and_both_know_their_targets(documents, block_size):
    rows = DocumentRows(joined(documents), BOS, block_size, 0)
    for i, document in enumerate(documents):
        assert rows.predicted(i, False) == [*document, BOS]
        mine = np.flatnonzero(rows.document_of(np.arange(len(rows))) == i)
        assert [token for row in mine.tolist() for token in rows.predicted(row, True)] == [*document, BOS]
    n_longer = len(rows) - len(documents)
    assert rows.continued == pytest.approx(n_longer / len(rows))


@pytest.mark.parametrize("block_size", [2, 8, 16])
def test_a_row_is_filled_up_with_separators(block_size):
    rows = DocumentRows(TOKENS, BOS, block_size, seed=0)
    for row, target in zip(*all_rows(rows), strict=True):
        assert (row[np.flatnonzero(target >= 0)[-1] + 1 :] == BOS).all()


@REPEATABLE
@given(st.lists(st.integers(1, 30), min_size=5, max_size=30), st.integers(1, 12), st.booleans())
def test_a_window_stays_inside_its_split_and_its_document(prepared, lengths, block_size, stream):
    # every document has a letter of its own
    write(prepared, [chr(0x4E00 + i) * length for i, length in enumerate(lengths)])
    try:
        corpus.prepare("names", Source([prepared], "lines"), "char", 0.4, 0)
        data = open_names("stream" if stream else "documents", block_size, 0.4)
    except UsageError as error:
        assert "split is empty" in str(error) or "too long" in str(error)
        return
    letters = {}
    for name, rows in (("train", data.train), ("val", data.val)):
        inputs, targets = all_rows(rows)
        letters[name] = set(targets.ravel().tolist()) - {-1, data.bos_id}
        for row, target in zip(inputs, targets, strict=True):
            last = np.flatnonzero(target >= 0)[-1]
            seen = {*row[: last + 1].tolist(), *target[target >= 0].tolist()} - {data.bos_id}
            assert seen <= letters[name] | {data.bos_id}
            assert len(seen) <= 1 or (stream and name == "train")
    assert not letters["train"] & letters["val"]
    assert len(letters["train"] | letters["val"]) == len(lengths)


# Batches


@pytest.mark.parametrize("size", [1, 4, 7, 50])
def test_every_epoch_has_every_row_once_and_its_own_order(size):
    rows = DocumentRows(TOKENS, BOS, 8, seed=3)
    expected = Counter(map(bytes, np.concatenate(all_rows(rows), axis=1)))
    steps = -(-3 * len(rows) // size)
    seen = [bytes(row) for step in range(steps) for row in np.concatenate(rows.batch(step, size), axis=1)]
    epochs = [seen[e * len(rows) : (e + 1) * len(rows)] for e in range(3)]
    assert [Counter(epoch) for epoch in epochs] == [expected] * 3
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize(
    "make", [lambda seed: DocumentRows(TOKENS, BOS, 8, seed), lambda seed: StreamRows(TOKENS, 8, seed)]
)
def test_a_batch_depends_on_seed_and_step_alone(make):
    steps = [0, 1, 2, 30, 31, 60]
    forward, rows = [make(1).batch(step, 5) for step in steps], make(1)
    backward = [rows.batch(step, 5) for step in reversed(steps)][::-1]
    assert np.array_equal(forward, backward)
    assert not np.array_equal(forward, [make(2).batch(step, 5) for step in steps])
    assert len({np.array(batch).tobytes() for batch in forward}) == len(steps)


# One stream of tokens


def test_a_stream_row_is_a_piece_of_the_stream_with_targets_one_further():
    rows = StreamRows(TOKENS, 8, seed=0)
    pieces = [TOKENS[i : i + 9].tolist() for i in range(len(TOKENS) - 8)]
    inputs, targets = all_rows(rows)
    assert [[*row, target[-1]] for row, target in zip(inputs.tolist(), targets.tolist(), strict=True)] == pieces
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    starts = {bytes(row) for step in range(100) for row in np.concatenate(rows.batch(step, 20), axis=1)}
    assert starts == set(map(bytes, np.concatenate((inputs, targets), axis=1)))


def test_starts_are_drawn_evenly():
    # a hundred starts, each row being its own start; 10,000 draws give each 100 times, with a deviation of 10
    rows = StreamRows(np.arange(108, dtype=np.uint8), 8, seed=0)
    drawn = Counter(start for step in range(100) for start in rows.batch(step, 100)[0][:, 0].tolist())
    assert set(drawn) == set(range(100)) and all(50 < n < 150 for n in drawn.values())


def test_a_block_longer_than_the_stream_is_refused_with_the_longest_there_can_be(prepared):
    write(prepared, WORDS)
    tokens = open_names().meta["splits"]["train"]["tokens"]
    message = refusal(open_names, "stream", tokens)
    assert f"block_size={tokens} " in message and "training split of names" in message
    assert f"has {tokens} tokens" in message and message.endswith(f"at most {tokens - 1}")
    assert len(open_names("stream", tokens - 1).train) == 1
    assert open_names("documents", 10 * tokens).train.continued == 0


def test_a_text_of_one_token_more_than_the_block_trains_and_one_of_the_block_does_not(
    prepared, call, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    text = ("to be, or not to be, " * 5)[:90]
    (tmp_path / "text.txt").write_text(text)  # 81 tokens to train on, 9 for validation: fewer than one window
    args = [MICRO, "data.name=text.txt", "data.mode=stream", "train.max_steps=2", "train.batch_size=4"]
    status, out, err = call(train, *args, "model.block_size=81")
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert "block_size=81" in err and "81 tokens" in err and "at most 80" in err
    assert not Path("runs").exists()
    status, out, err = call(train, *args, "model.block_size=80")
    assert status == 0 and "1 windows of 81 tokens" in out and "val loss" in out


# One plain text


@pytest.mark.parametrize("mode", ["stream", "documents"])
@pytest.mark.parametrize("block_size", [1, 3, 8, 55, 56, 500])
def test_validation_windows_of_a_plain_text_do_not_overlap(prepared, mode, block_size):
    text = "".join(map(chr, range(32, 127))) * 6
    data = open_text(prepared, text, mode, block_size)
    held_out, expected = text[9 * len(text) // 10 :].encode(), Counter()  # 57 tokens
    # each token but the first is predicted, from what stands before it in its window
    for start in range(0, len(held_out) - 1, block_size):
        for n in range(start + 1, min(start + block_size, len(held_out) - 1) + 1):
            expected[tuple(held_out[start:n]), held_out[n]] += 1
    assert predictions(all_rows(data.val)) == expected and sum(expected.values()) == len(held_out) - 1
    assert data.val_characters == len(held_out) - 1 and data.bos_id is None


def test_training_windows_of_a_plain_text_are_all_there_are(prepared):
    text = "".join(map(chr, range(32, 127))) * 2
    train_text = text[: 9 * len(text) // 10].encode()
    inputs, targets = all_rows(open_text(prepared, text).train)
    windows = [[*row, target[-1]] for row, target in zip(inputs.tolist(), targets.tolist(), strict=True)]
    assert windows == [list(train_text[i : i + 9]) for i in range(len(train_text) - 8)]
    # in documents mode the text is a single document
    rows = open_text(prepared, text, "documents", 16).train
    assert predictions(all_rows(rows)) == contexts(list(train_text), 16, 2)


def test_what_was_opened_is_told(prepared):
    write(prepared, [*WORDS, "a long document " * 20])
    told = open_names("documents", 1000).describe()
    assert f"data    {len(open_names('documents', 1000).train):,} rows, 0% of them continue" in told
    assert "windows of 9 tokens" in open_names("stream").describe()
    told = open_text(prepared, "one long text " * 50, "documents").describe()
    assert "data.mode=stream would be cheaper" in told and "one plain text" in told


# Memory

MEASURE = """
import sys, tracemalloc
from pathlib import Path
import corpus
from config import DataConfig, ModelConfig
from dataset import Data

def anonymous():  # bytes of memory that no file stands behind
    status = Path("/proc/self/status")  # on Linux; elsewhere what Python and NumPy know of is measured
    rows = dict(line.split(":") for line in status.read_text().splitlines()) if status.exists() else {}
    return int(rows["RssAnon"].split()[0]) * 1024 if rows else tracemalloc.get_traced_memory()[1]

tracemalloc.start() if not Path("/proc/self/status").exists() else None
corpus.PREPARED = Path(sys.argv[1])
before = anonymous()
data = Data(DataConfig(name="mine", mode="stream"), ModelConfig(block_size=64), seed=1)
assert len(data.train) > 99_000_000
most = before
for step in range(2000):
    data.train.batch(step, 64)
    most = max(most, anonymous()) if step % 100 == 99 else most
print(most - before)
"""


def test_a_large_token_file_stays_on_the_disk(prepared):
    open_text(prepared, "some text " * 100)
    file = corpus.PREPARED / "mine" / "meta.json"
    meta = json.loads(file.read_text())
    meta["splits"]["train"]["tokens"] = 100_000_000
    file.write_text(json.dumps(meta))
    with open(corpus.PREPARED / "mine" / "train.bin", "wb") as tokens:
        tokens.truncate(100_000_000 * np.dtype(meta["dtype"]).itemsize)
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(corpus.PREPARED)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 30e6
