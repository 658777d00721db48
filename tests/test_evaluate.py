"""The loss of a model on a text: what validation during a training takes, and what evaluate.py prints."""

import contextlib
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MICRO

import checkpoint
import corpus
import evaluate
import tokenizer as tokenizers
import train
from config import Config, DataConfig, ModelConfig
from corpus import Source
from dataset import Data, DocumentRows
from model import GPT

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

BYTE, BOS = tokenizers.byte(), 256
# documents within a window and longer, with characters of one to four bytes
DOCUMENTS = ["anna", "zoë", "王芳 🙂", "b", "a longer document, " * 3, "x" * 16, "y" * 17, "abcdefgh"]
TEXT = "To be, or not to be — that is the question:\nwhether 'tis nobler in the mind"


def tiny_model(block_size: int, vocab_size: int = 257) -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(d_model=8, n_heads=2, block_size=block_size, init_std=0.2, dropout=0.5), vocab_size)


def rows_of(documents: list[str] | None, block_size: int, hop: int | None = None) -> DocumentRows:
    """Rows of documents, or of TEXT as one text where there are none, in bytes."""
    if documents is None:
        return DocumentRows(BYTE.encode_array(TEXT), None, block_size, 0, hop)
    return DocumentRows(np.concatenate(([BOS], BYTE.encode_documents(documents))), BOS, block_size, 0, hop)


def contexts(tokens: list[int], block_size: int, hop: int) -> list[tuple[list[int], int]]:
    """(what the model may see, the token that follows) for each token but the first, as when sampling."""
    found, start = [], 0
    for n in range(1, len(tokens)):
        if n - start > block_size:
            start += hop  # the window is full: its oldest tokens are dropped
        found.append((tokens[start:n], tokens[n]))
    return found


@torch.no_grad()
def one_by_one(model: GPT, tokens: list[int], hop: int) -> list[tuple[int, float]]:
    """(position in the window, loss) for each token but the first: no batch, no cache, no padding."""
    model.eval()
    found = []
    for seen, target in contexts(tokens, model.config.block_size, hop):
        logits = model(torch.tensor([seen]))[0, -1].double()
        found.append((len(seen) - 1, -logits.log_softmax(-1)[target].item()))
    return found


def total_loss(model, rows) -> tuple[float, int]:
    return evaluate.total_loss(model, rows, contextlib.nullcontext())


# All figures


@pytest.mark.parametrize("documents", [DOCUMENTS, DOCUMENTS[:1], None])
@pytest.mark.parametrize(("block_size", "hop"), [(1, 1), (8, 1), (8, 3), (8, 8), (16, 2), (16, 16), (200, 25)])
def test_the_figures_are_those_of_the_tokens_one_by_one(documents, block_size, hop):
    model = tiny_model(block_size)
    units = [[BOS, *text.encode(), BOS] for text in documents] if documents else [list(TEXT.encode())]
    losses = [one_by_one(model, unit, hop) for unit in units]
    found = evaluate.evaluate(model, BYTE, rows_of(documents, block_size, hop), worst=3)

    tokens = sum(map(len, losses))
    total = math.fsum(loss for unit in losses for _, loss in unit)
    # a separator counts as one; nothing predicts the first token of a plain text
    characters = sum(len(text) + 1 for text in documents) if documents else len(TEXT) - 1
    size = sum(len(text.encode()) + 1 for text in documents) if documents else len(TEXT.encode()) - 1
    assert (found["tokens"], found["characters"], found["bytes"]) == (tokens, characters, size)
    assert found["nats_per_token"] == pytest.approx(total / tokens, abs=1e-6)
    assert found["nats_per_character"] == pytest.approx(total / characters, abs=1e-6)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / size, abs=2e-6)
    assert found["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-6)

    by_position = [[loss for unit in losses for place, loss in unit if place == i] for i in range(block_size)]
    expected = [sum(some) / len(some) if some else None for some in by_position]
    assert found["loss_by_position"] == [mean and pytest.approx(mean, rel=1e-6) for mean in expected]

    assert total_loss(model, rows_of(documents, block_size, hop)) == (pytest.approx(total, rel=1e-6), tokens)


@pytest.mark.parametrize("block_size", [8, 200])
def test_the_worst_documents_are_those_of_the_highest_mean(block_size):
    model = tiny_model(block_size)
    means = {}
    for text in DOCUMENTS:
        losses = [loss for _, loss in one_by_one(model, [BOS, *text.encode(), BOS], max(1, block_size // 8))]
        means[text] = sum(losses) / len(losses)
    expected = sorted(DOCUMENTS, key=means.get, reverse=True)
    for n in (0, 1, 3, len(DOCUMENTS), 100):
        worst = evaluate.evaluate(model, BYTE, rows_of(DOCUMENTS, block_size), worst=n)["worst"]
        assert [item["text"] for item in worst] == expected[:n]
        assert [item["nats_per_token"] for item in worst] == pytest.approx([means[text] for text in expected[:n]])


def test_of_a_plain_text_the_worst_windows_are_named():
    model, text = tiny_model(8), TEXT.encode()
    losses = [loss for _, loss in one_by_one(model, list(text), 8)]
    windows = [(sum(losses[i : i + 8]) / len(losses[i : i + 8]), text[i + 1 : i + 9]) for i in range(0, len(losses), 8)]
    worst = evaluate.evaluate(model, BYTE, rows_of(None, 8, 8), worst=4)["worst"]
    expected = sorted(windows, reverse=True)[:4]
    assert [item["nats_per_token"] for item in worst] == pytest.approx([mean for mean, _ in expected])
    assert [item["text"] for item in worst] == [part.decode(errors="replace") for _, part in expected]


class Counts(torch.nn.Module):
    """Predicts the next token from how often it follows in a text, each pair counted once more than it is there."""

    def __init__(self, tokens: np.ndarray, vocab_size: int, block_size: int):
        super().__init__()
        self.config, self.wte = ModelConfig(block_size=block_size), torch.nn.Embedding(vocab_size, 1)
        counts = np.ones((vocab_size, vocab_size))
        np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
        self.losses = torch.from_numpy(-np.log(counts / counts.sum(1, keepdims=True)))

    def forward(self, ids, targets):
        return torch.where(targets >= 0, self.losses[ids, targets], 0.0)


@pytest.mark.parametrize("documents", [DOCUMENTS, None])
@pytest.mark.parametrize(("block_size", "hop"), [(1, None), (8, None), (8, 5), (16, 16), (1000, None)])
def test_counts_of_pairs_score_through_the_same_code_what_they_score_directly(documents, block_size, hop):
    # one token before is all they look at, so the windows make no difference
    rows = rows_of(documents, block_size, hop)
    model = Counts(rows.tokens.astype(int), 257, block_size)
    pairs = list(itertools.pairwise(rows.tokens.tolist()))
    direct = 0.0
    for a, b in pairs:
        follows = [y for x, y in pairs if x == a]
        direct -= math.log((follows.count(b) + 1) / (len(follows) + 257))
    assert total_loss(model, rows) == (pytest.approx(direct, rel=1e-12), len(pairs))
    figures = evaluate.evaluate(model, BYTE, rows)
    assert figures["nats_per_token"] == pytest.approx(direct / len(pairs), rel=1e-12)


@pytest.mark.parametrize("text", ["a" + "é" * 500_002 + "bbbbb", "é" + "abc" * 10, "王" * 10], ids=["long", "é", "王"])
def test_bytes_are_those_of_the_text_wherever_tokens_cut_its_characters(text):
    tokens = BYTE.encode_array(text)
    figures = evaluate.evaluate(Counts(tokens.astype(int), 257, 1024), BYTE, DocumentRows(tokens, None, 1024, 0, 1024))
    assert figures["bytes"] == figures["tokens"] == len(text.encode()) - 1
    if text[0] == "a":
        assert figures["characters"] == len(text) - 1


def test_the_loss_does_not_depend_on_how_many_rows_run_at_once(monkeypatch):
    model, results = tiny_model(8), []
    for positions in (1, 24, 100, 100_000):
        monkeypatch.setattr(evaluate, "POSITIONS_AT_ONCE", positions)
        results.append(evaluate.evaluate(model, BYTE, rows_of(DOCUMENTS, 8), worst=3))
    for other in results[1:]:
        assert other["worst"] == [
            item | {"nats_per_token": pytest.approx(item["nats_per_token"])} for item in results[0]["worst"]
        ]
        for key in ("tokens", "characters", "bytes"):
            assert other[key] == results[0][key]
        for key in ("nats_per_token", "nats_per_character", "bits_per_byte", "perplexity", "loss_by_position"):
            assert other[key] == pytest.approx(results[0][key], rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_an_evaluation_changes_nothing_and_keeps_no_graph(training, fails):
    model, recorded = tiny_model(8).train(training), []

    def record(*_):
        recorded.append((torch.is_grad_enabled(), model.training))
        if fails:
            raise RuntimeError("the model fails")

    model.register_forward_hook(record)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        total_loss(model, rows_of(DOCUMENTS, 8))
    assert model.training is training and all(module.training is training for module in model.modules())
    assert torch.equal(torch_state, torch.get_rng_state()) and (numpy_state == np.random.get_state()[1]).all()
    assert recorded == [(False, False)] and torch.is_grad_enabled()


# The command line


def trained_on(name: str, block_size: int = 8, equally_likely: bool = False, **changed) -> str:
    """A checkpoint of a model (not trained at all) on the prepared set; all tokens equally likely if asked for."""
    data = DataConfig(name=name, mode="documents" if corpus.read_meta(name)["documents"] else "stream")
    opened = Data(data, ModelConfig(block_size=block_size), 1)
    model = tiny_model(block_size, opened.tokenizer.vocab_size)
    for p in model.parameters():
        p.data.mul_(0 if equally_likely else 1)
    content = {
        "config": Config(model.config, data).to_yaml(),
        "tokenizer": opened.tokenizer.to_dict(),
        "documents": opened.meta["documents"],
        "fingerprint": opened.fingerprint,
        "row": {"step": 1234},
        "model": checkpoint.weights_of(model),
    }
    checkpoint.save(Path(f"{name}.pt"), content | changed)
    return f"{name}.pt"


def prepare_set(name: str, documents: list[str], how: str | None = "lines", tokens: str = "byte") -> None:
    Path(f"{name}.txt").write_text("\n".join(documents) + "\n", encoding="utf-8")
    corpus.prepare(name, Source([Path(f"{name}.txt")], how), tokens, 0.1, 0)


LINES = [f"zoë number {i}" for i in range(200)]


def strict(text: str):
    """What JSON says, without Python's own additions to it."""

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_report_has_the_figures_of_the_json(call):
    prepare_set("mine", LINES)
    file = trained_on("mine")
    status, out, err = call(evaluate, "--checkpoint", file, "--json", "--worst", 2)
    assert (status, err) == (0, "")
    figures = strict(out)
    assert (figures["checkpoint"], figures["step"], figures["stride"]) == (file, 1234, 1)
    model, tokenizer, config = checkpoint.load(file)
    data = Data(config.data, config.model, 1)
    assert {key: figures[key] for key in figures.keys() - {"checkpoint", "step", "text", "stride"}} == (
        evaluate.evaluate(model, tokenizer, data.val, 2)
    )
    status, out, err = call(evaluate, "--checkpoint", file, "--worst", 2)
    assert (status, err) == (0, "") and out.startswith(f"{file}, step 1,234, on the val split of mine:\n")
    assert f"{figures['tokens']:,} tokens, {figures['characters']:,} characters, {figures['bytes']:,} bytes" in out
    assert f" {figures['nats_per_token']:.4f} nats per token (perplexity {figures['perplexity']:,.2f})" in out
    assert f" {figures['nats_per_character']:.4f} nats per character" in out
    assert f" {figures['bits_per_byte']:.4f} bits per byte" in out
    for item in figures["worst"]:
        assert f"{item['nats_per_token']:9.4f}  {item['text']!r}" in out and item["text"] in LINES
    for i, loss in enumerate(figures["loss_by_position"]):
        assert f"{i}: {loss:.3f}" in out


@pytest.mark.parametrize(("how", "split"), [("lines", "train"), ("lines", "val"), (None, "train"), (None, "val")])
def test_each_split_is_predicted_whole_and_nothing_else(call, how, split):
    prepare_set("mine", LINES, how)
    file = trained_on("mine", equally_likely=True)
    figures = strict(call(evaluate, "--checkpoint", file, "--split", split, "--json")[1])
    counts = corpus.read_meta("mine")["splits"][split]
    # with 257 tokens that are equally likely, every figure follows from the counts
    assert figures["tokens"] == figures["bytes"] == counts["tokens"] - 1
    assert figures["bytes"] == counts["bytes"] + counts["documents"] - (0 if how else 1)
    assert figures["characters"] == counts["characters"] + counts["documents"] - (0 if how else 1)
    assert figures["nats_per_token"] == pytest.approx(math.log(257))
    assert figures["bits_per_byte"] == pytest.approx(math.log2(257))
    assert figures["perplexity"] == pytest.approx(257)
    assert figures["nats_per_character"] == pytest.approx(math.log(257) * figures["tokens"] / figures["characters"])


@pytest.mark.parametrize("how", ["lines", None])
def test_models_with_different_tokens_are_compared_in_bits_per_byte(call, how):
    Path("text.txt").write_text("\n".join(["zoë", "王", "number", "", "number"]), encoding="utf-8")
    size = len(("zoë\n王\nnumber\nnumber\n" if how else "zoë\n王\nnumber\n\nnumber").encode())
    found = {}
    for tokens in ("char", "byte"):
        prepare_set(tokens, [*LINES, "王"], how, tokens)
        file = trained_on(tokens, equally_likely=True)
        found[tokens] = strict(call(evaluate, "--checkpoint", file, "--text", "text.txt", "--json")[1])
    # the first token of a plain text is not predicted; here it is "z"
    predicted = size - (0 if how else 1)
    assert found["char"]["bytes"] == found["byte"]["bytes"] == found["byte"]["tokens"] == predicted
    assert found["char"]["tokens"] == found["char"]["characters"] == found["byte"]["characters"] == predicted - 3
    assert found["byte"]["bits_per_byte"] == pytest.approx(math.log2(257))
    known = corpus.read_meta("char")["tokenizer"]["characters"]
    assert found["char"]["bits_per_byte"] == pytest.approx(math.log2(len(known) + 1) * (predicted - 3) / predicted)


@pytest.mark.parametrize("how", ["lines", "blocks", "files", None])
def test_a_text_is_cut_into_documents_as_the_training_text_was(call, how):
    Path("folder").mkdir()
    for i in range(40):
        Path(f"folder/{i}.txt").write_text(f"number {i}\n\nof all\n")
    corpus.prepare("mine", Source(corpus.find_files([Path("folder")]), how), "byte", 0.1, 0)
    file = trained_on("mine")
    Path("new").mkdir()
    for name in "ab":
        Path(f"new/{name}").write_text(f"{name} line\nand one\n\n\nmore\n")
    documents = {
        "lines": ["a line", "and one", "more", "b line", "and one", "more"],
        "blocks": ["a line\nand one", "more", "b line\nand one", "more"],
        "files": ["a line\nand one\n\n\nmore\n", "b line\nand one\n\n\nmore\n"],
        None: ["a line\nand one\n\n\nmore\nb line\nand one\n\n\nmore\n"],
    }[how]
    status, out, _ = call(evaluate, "--checkpoint", file, "--text", "new", "--json", "--worst", 9)
    figures = strict(out)
    assert status == 0 and figures["text"] == "new"
    assert figures["tokens"] == sum(map(len, documents)) + (len(documents) if how else -1)
    if how:
        assert sorted(item["text"] for item in figures["worst"]) == sorted(documents)


@pytest.mark.parametrize("how", ["lines", None])
def test_a_stride_chooses_the_windows(call, how):
    prepare_set("mine", LINES[:80], how)
    file, found = trained_on("mine"), {}
    model, _, config = checkpoint.load(file)
    tokens = Data(config.data, config.model, 1).tokens["val"].tolist()
    units = [tokens]
    if how:
        borders = [i for i, token in enumerate(tokens) if token == BOS]
        units = [tokens[a : b + 1] for a, b in itertools.pairwise(borders)]
    for stride in (None, 1, 5, 8):
        args = ["--stride", stride] if stride else []
        figures = found[stride] = strict(call(evaluate, "--checkpoint", file, "--json", *args)[1])
        losses = [loss for unit in units for _, loss in one_by_one(model, unit, stride or 1)]
        assert figures["nats_per_token"] == pytest.approx(sum(losses) / len(losses), abs=1e-6)
        assert figures["stride"] == (stride or 1)
    assert found[None] == found[1] != found[8]


@pytest.mark.parametrize(("how", "stride"), [("lines", 1), (None, 8)])
def test_the_validation_loss_of_a_training_is_that_of_its_checkpoint(call, how, stride):
    prepare_set("mine", LINES, how)
    args = ["data.name=mine", f"data.mode={'documents' if how else 'stream'}", "train.max_steps=3", "train.samples=0"]
    assert call(train, MICRO, *args)[0] == 0
    trained = json.loads(Path("runs/micro/metrics.jsonl").read_text().splitlines()[-1])
    status, out, _ = call(evaluate, "--stride", stride, "--json")  # the newest run
    assert status == 0 and strict(out)["step"] == 3
    assert strict(out)["nats_per_character"] == pytest.approx(trained["val_loss"], abs=1e-6)


def test_data_that_are_not_those_of_the_checkpoint_are_refused(call):
    prepare_set("mine", LINES)
    file = trained_on("mine")
    prepare_set("mine", [line.upper() for line in LINES])
    for split in ("train", "val"):
        status, out, err = call(evaluate, "--checkpoint", file, "--split", split)
        assert (status, out) == (2, "") and len(err.splitlines()) == 1
        assert file in err and "data.name=mine" in err and "--text" in err
    assert call(evaluate, "--checkpoint", file, "--text", "mine.txt")[0] == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--checkpoint", "nothing"], ["nothing", "does not exist"]),
        (["--checkpoint", "empty.txt"], ["empty.txt", "not a checkpoint"]),
        (["--checkpoint", "folder"], ["folder", "no checkpoint"]),
        (["--split", "test"], ["test", "train", "val"]),
        (["--stride", "0"], ["--stride 0"]),
        (["--stride", "9"], ["--stride 9", "block_size of 8"]),
        (["--stride", "some"], ["--stride", "some"]),
        (["--worst", "-1"], ["--worst -1"]),
        (["--device", "tpu"], ["--device", "tpu"]),
        (["--text", "nothing.txt"], ["nothing.txt", "does not exist"]),
        (["--text", "folder"], ["folder", "no text files"]),
        (["--text", "empty.txt"], ["empty.txt", "nothing to predict"]),
        (["--text", "blank.txt"], ["blank.txt", "nothing to predict"]),
        (["--text", "latin1.txt"], ["latin1.txt", "not UTF-8", "offset 2"]),
        (["--text", "binary"], ["binary", "no text"]),
        (["--text", "chinese.txt"], ["'王'", "cannot be encoded"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_cannot_be_evaluated_says_why_in_one_line(call, args, words):
    prepare_set("mine", LINES, tokens="char")
    Path("folder").mkdir()
    for name, raw in (("empty.txt", b""), ("blank.txt", b"\n \n"), ("latin1.txt", b"zo\xeb"), ("binary", b"a\0b")):
        Path(name).write_bytes(raw)
    Path("chinese.txt").write_text("王", encoding="utf-8")
    status, out, err = call(evaluate, *([] if "--checkpoint" in args else ["--checkpoint", trained_on("mine")]), *args)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert all(word in err for word in words), err


def test_evaluating_without_any_run_says_how_to_train_one(call):
    status, out, err = call(evaluate)
    assert (status, out) == (2, "") and "python train.py configs/micro.yaml" in err and len(err.splitlines()) == 1


def test_a_text_of_one_token_has_nothing_to_predict_where_there_are_no_documents(call):
    prepare_set("mine", LINES, None)
    Path("one.txt").write_text("a")
    status, _, err = call(evaluate, "--checkpoint", trained_on("mine"), "--text", "one.txt")
    assert status == 2 and "one.txt has nothing to predict" in err
    Path("two.txt").write_text("ab")
    assert strict(call(evaluate, "--checkpoint", "mine.pt", "--text", "two.txt", "--json")[1])["tokens"] == 1
