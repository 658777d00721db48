import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import corpus
import device
import evaluate
import tokenizer
from config import DataConfig, ModelConfig, window_start
from dataset import Data, DocumentRows, StreamRows
from errors import UsageError
from model import GPT

ROOT = Path(__file__).resolve().parent.parent
REPEATABLE = settings(deadline=None, derandomize=True, max_examples=100)
BOS = 9  # of the token files written by hand here: documents are made of 0 … 8


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """An empty place for prepared sets, where the text of `names` is tmp_path/names.txt; returns that file."""
    monkeypatch.setattr(corpus, "PREPARED", tmp_path / "prepared")
    monkeypatch.setattr(corpus, "EMBEDDED", {"names": tmp_path / "names.txt"})
    return tmp_path / "names.txt"


def write(path: Path, documents: list[str]) -> None:
    path.write_bytes("".join(f"{document}\n" for document in documents).encode())


def refusal(function, *args) -> str:
    with pytest.raises(UsageError) as error:
        function(*args)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stored(split: str, dtype: str) -> list[int]:
    return np.fromfile(corpus.PREPARED / "names" / f"{split}.bin", dtype=dtype).tolist()


def open_names(mode: str = "documents", block_size: int = 8, val_fraction: float = 0.3) -> Data:
    return Data(DataConfig(mode=mode, val_fraction=val_fraction), ModelConfig(block_size=block_size), seed=1)


WORDS = [f"{a}{b}{c}" for a in "klm" for b in "aeiou" for c in "nrst"]


# Text to documents

READINGS = [
    ("anna\n\n   \nbob\n\n", ["anna", "bob"], 3),
    ("anna\nbob", ["anna", "bob"], 0),
    ("anna\r\nbob\r\n\r\n", ["anna", "bob"], 1),
    ("\ufeffanna\nbob\n", ["anna", "bob"], 0),
    ("an\u2028na\nb\u0085ob\nc\x0bd\x0ce\rf\n", ["an\u2028na", "b\u0085ob", "c\x0bd\x0ce\rf"], 0),
    ("zoë \n 王\n", ["zoë ", " 王"], 0),
]


@pytest.mark.parametrize(("text", "documents", "blank"), READINGS)
def test_a_document_is_a_line_and_blank_ones_are_counted(tmp_path, text, documents, blank):
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert corpus.read_documents(tmp_path / "a.txt") == (documents, blank)


@pytest.mark.parametrize("raw", [b"", b"\n\n\n", b"\xef\xbb\xbf \t\r\n"])
def test_a_file_of_blank_lines_is_refused(tmp_path, raw):
    (tmp_path / "a.txt").write_bytes(raw)
    message = refusal(corpus.read_documents, tmp_path / "a.txt")
    assert str(tmp_path / "a.txt") in message and "no documents" in message


def test_a_file_that_is_missing_or_not_utf8_is_refused_with_path_byte_and_what_to_do(tmp_path):
    (tmp_path / "a.txt").write_bytes("anna\nzoë\n".encode("latin-1"))
    message = refusal(corpus.read_documents, tmp_path / "a.txt")
    assert str(tmp_path / "a.txt") in message and "0xeb at offset 7" in message and "iconv" in message
    assert str(tmp_path / "none.txt") in refusal(corpus.read_documents, tmp_path / "none.txt")


# Documents to splits

texts = st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), min_size=1))


@REPEATABLE
@given(texts, st.floats(0.01, 0.9), st.integers(0, 2**31 - 1))
def test_every_distinct_document_is_in_exactly_one_split(documents, val_fraction, seed):
    try:
        train, val = corpus.split(documents, val_fraction, seed)
    except UsageError:
        return  # one of the two would be empty
    assert Counter(train) + Counter(val) == Counter(set(documents))


@REPEATABLE
@given(texts, texts, st.integers(0, 2**31 - 1))
def test_adding_or_reordering_documents_moves_none_of_the_old(documents, more, seed):
    try:
        train, val = corpus.split(documents, 0.4, seed)
    except UsageError:
        return
    train_of_all, val_of_all = corpus.split([*more, *documents[::-1]], 0.4, seed)
    assert set(train) <= set(train_of_all) and set(val) <= set(val_of_all)


def test_the_seed_and_the_share_decide_what_is_held_out():
    train, val = corpus.split(WORDS, 0.5, 1)
    assert (train, val) == corpus.split(WORDS, 0.5, 1)
    assert set(val) != set(corpus.split(WORDS, 0.5, 2)[1])
    assert [word for word in WORDS if word in train] != train  # neighbours of a sorted list do not stay neighbours
    held_out = len(corpus.split([str(i) for i in range(10_000)], 0.1, 0)[1])
    assert abs(held_out - 1000) < 150  # five standard deviations of 10,000 draws at 0.1


def test_an_empty_split_is_refused_with_numbers():
    message = refusal(corpus.split, ["anna"] * 10, 0.1, 0)
    assert "split is empty" in message and "1 distinct documents" in message and "val_fraction=0.1" in message


# Splits to token files


def test_a_token_file_is_documents_with_a_separator_before_between_and_after(prepared):
    write(prepared, WORDS)
    meta = corpus.prepare("names", 0.3, 0)
    alphabet = sorted(set("".join(WORDS)))
    for split, documents in zip(("train", "val"), corpus.split(WORDS, 0.3, 0), strict=True):
        ids = [len(alphabet)]
        for document in documents:
            ids += [alphabet.index(character) for character in document] + [len(alphabet)]
        assert stored(split, "uint8") == ids
        n = len(documents)
        assert meta["splits"][split] == {"documents": n, "characters": 3 * n, "tokens": 4 * n + 1}
    assert meta == json.loads((corpus.PREPARED / "names" / "meta.json").read_text(encoding="utf-8"))


def test_every_line_ten_times_is_the_same_set_and_the_count_is_reported(prepared):
    write(prepared, WORDS)
    once = corpus.prepare("names", 0.3, 0)
    write(prepared, ["", *WORDS * 10])
    tenfold = corpus.prepare("names", 0.3, 0)
    assert tenfold == once | {"duplicates": 9 * len(WORDS), "blank": 1}
    assert f"dropped: {9 * len(WORDS)} duplicates, 1 blank lines" in corpus.describe("names", tenfold)


TYPES = [(255, "uint8"), (256, "uint16"), (65_535, "uint16"), (65_536, "uint32")]


@pytest.mark.parametrize(("characters", "dtype"), TYPES)
def test_the_stored_type_follows_the_vocabulary(prepared, characters, dtype):
    # with the separator there is one token more than characters; chr() from 0x10000: no surrogates, no line breaks
    alphabet = [chr(0x10000 + i) for i in range(characters)]
    write(prepared, ["".join(alphabet), *alphabet[:20]])
    assert corpus.prepare("names", 0.3, 0)["dtype"] == dtype
    ids = stored("train", dtype) + stored("val", dtype)
    assert set(ids) == set(range(characters + 1))
    assert open_names().tokenizer.vocab_size == characters + 1


def test_preparation_does_not_depend_on_the_locale(prepared, tmp_path):
    write(prepared, ["zoë", "王芳", "łucja", *WORDS])
    corpus.prepare("names", 0.3, 5)
    script = "import sys, runpy, pathlib, corpus\nhere = pathlib.Path(__file__).parent\n"
    script += "corpus.PREPARED, corpus.EMBEDDED = here / 'other', {'names': here / 'names.txt'}\n"
    script += "sys.argv[1:] = 'names --val-fraction 0.3 --seed 5'.split()\n"
    script += "runpy.run_path('data/prepare.py', run_name='__main__')\n"
    (tmp_path / "script.py").write_text(script)
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, tmp_path / "script.py"], cwd=ROOT, env=env, check=True, capture_output=True)
    assert files(tmp_path / "other") == files(tmp_path / "prepared")


def test_the_names_are_29693_documents_of_26_letters(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PREPARED", tmp_path)
    data = Data(DataConfig(), ModelConfig(), seed=1)
    assert data.tokenizer.encode("az") == [0, 25] and data.tokenizer.bos_id == 26
    assert sum(split["documents"] for split in data.meta["splits"].values()) == 29_693
    assert data.val_characters == data.meta["splits"]["val"]["tokens"] - 1
    assert 0.09 < data.meta["splits"]["val"]["documents"] / 29_693 < 0.11


def test_a_set_is_prepared_when_missing_damaged_or_with_other_settings_and_only_then(prepared):
    write(prepared, WORDS)
    assert open_names().prepared_now and not open_names().prepared_now
    (corpus.PREPARED / "names" / "meta.json").write_text("{")
    assert open_names().prepared_now and not open_names().prepared_now
    assert open_names(val_fraction=0.5).prepared_now
    assert open_names(val_fraction=0.5).meta["val_fraction"] == 0.5


@pytest.mark.parametrize("existing", [False, True])
def test_a_preparation_that_fails_leaves_what_was_there_and_no_temporary_folder(prepared, monkeypatch, existing):
    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    write(prepared, WORDS)
    if existing:
        corpus.prepare("names", 0.3, 0)
    before = files(corpus.PREPARED)
    write(prepared, WORDS[:30])
    monkeypatch.setattr(Path, "write_text", fail)  # meta.json is written last, after both token files
    with pytest.raises(OSError, match="No space"):
        corpus.prepare("names", 0.3, 0)
    assert files(corpus.PREPARED) == before
    assert [folder.name for folder in corpus.PREPARED.iterdir()] == ["names"] * existing


def test_preparing_again_replaces_the_set_and_leaves_nothing_else(prepared):
    for words in (WORDS, WORDS[:30]):
        write(prepared, words)
        corpus.prepare("names", 0.3, 0)
        assert [folder.name for folder in corpus.PREPARED.iterdir()] == ["names"]
        assert {Path(name).name for name in files(corpus.PREPARED)} == {"meta.json", "train.bin", "val.bin"}
        assert len(stored("train", "uint8")) + len(stored("val", "uint8")) == 2 + 4 * len(words)


# Token files to rows


def test_a_missing_or_damaged_meta_is_refused_with_path_and_command(prepared):
    write(prepared, WORDS)
    corpus.prepare("names", 0.3, 0)
    (corpus.PREPARED / "names").rename(corpus.PREPARED / "mine")
    meta = corpus.PREPARED / "mine" / "meta.json"
    for damage in (lambda: meta.write_text(meta.read_text()[:-20]), lambda: meta.write_text("[]"), meta.unlink):
        damage()
        message = refusal(Data, DataConfig(name="mine", val_fraction=0.3), ModelConfig(), 1)
        assert str(meta) in message and "python data/prepare.py mine" in message


def test_an_unknown_set_is_refused_with_those_there_are(prepared):
    message = refusal(Data, DataConfig(name="nmaes"), ModelConfig(), 1)
    assert "nmaes" in message and message.endswith("names")
    assert "nmaes" in refusal(corpus.prepare, "nmaes", 0.1, 0)
    write(prepared, WORDS)
    corpus.prepare("names", 0.3, 0)
    (corpus.PREPARED / "names").rename(corpus.PREPARED / "mine")
    assert "0.3" in refusal(Data, DataConfig(name="mine", val_fraction=0.2), ModelConfig(), 1)


@pytest.mark.parametrize("damage", ["short", "long", "empty", "missing"])
def test_a_token_file_of_the_wrong_length_is_refused_with_its_path(prepared, damage):
    write(prepared, [*WORDS, *map(chr, range(0x4E00, 0x4F00))])
    assert open_names().meta["dtype"] == "uint16"
    path = corpus.PREPARED / "names" / "val.bin"
    raw = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes({"short": raw[:-3], "long": raw + raw, "empty": b""}[damage])
    message = refusal(open_names)
    assert str(path) in message and "prepare the set again" in message


def test_a_token_beyond_the_vocabulary_is_refused(prepared):
    write(prepared, WORDS)
    size = open_names().tokenizer.vocab_size
    path = corpus.PREPARED / "names" / "train.bin"
    path.write_bytes(path.read_bytes()[:-1] + bytes([size]))
    message = refusal(open_names)
    assert str(path) in message and f"has token {size}" in message and f"ends at {size - 1}" in message


DOCUMENTS = [[1], [2, 3], list(range(8)), list(range(9)), [5] * 7, [4] * 40, [8, 7], [*range(9)] * 4, [0]]
TOKENS = np.array([BOS, *(token for document in DOCUMENTS for token in (*document, BOS))], dtype=np.uint8)


def contexts(document: list[int], block_size: int) -> list[tuple[list[int], int]]:
    """(what the model may see, the token that follows) for each token of a document and its end."""
    tokens = [BOS, *document, BOS]
    return [(tokens[window_start(n, block_size) : n], tokens[n]) for n in range(1, len(tokens))]


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 16, 100])
def test_every_token_is_a_target_once_with_the_window_of_the_rule_before_it(block_size):
    rows = DocumentRows(TOKENS, BOS, block_size, seed=0)
    inputs, targets = rows.rows(np.arange(len(rows)))
    assert inputs.shape == targets.shape == (len(rows), block_size) and inputs.dtype == targets.dtype == np.int64
    found = Counter(
        (tuple(row[: place + 1].tolist()), int(target[place]))
        for row, target in zip(inputs, targets, strict=True)
        for place in np.flatnonzero(target >= 0)
    )
    expected = [pair for document in DOCUMENTS for pair in contexts(document, block_size)]
    assert found == Counter((tuple(seen), target) for seen, target in expected)
    assert (targets >= -1).all() and (targets >= 0).sum() == len(TOKENS) - 1


@pytest.mark.parametrize("block_size", [2, 8, 16])
def test_a_row_is_filled_up_with_separators(block_size):
    rows = DocumentRows(TOKENS, BOS, block_size, seed=0)
    for row, target in zip(*rows.rows(np.arange(len(rows))), strict=True):
        assert (row[np.flatnonzero(target >= 0)[-1] + 1 :] == BOS).all()


@pytest.mark.parametrize("size", [1, 4, 7, 50])
def test_every_epoch_has_every_row_once_and_its_own_order(size):
    rows = DocumentRows(TOKENS, BOS, 8, seed=3)
    expected = Counter(map(bytes, np.concatenate(rows.rows(np.arange(len(rows))), axis=1)))
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


def test_a_stream_row_is_a_piece_of_the_stream_with_targets_one_further():
    rows = StreamRows(TOKENS, 8, seed=0)
    pieces = [TOKENS[i : i + 9].tolist() for i in range(len(TOKENS) - 8)]
    inputs, targets = rows.rows(np.arange(len(rows)))
    assert [[*row, target[-1]] for row, target in zip(inputs.tolist(), targets.tolist(), strict=True)] == pieces
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    starts = {bytes(row) for step in range(100) for row in np.concatenate(rows.batch(step, 20), axis=1)}
    assert starts == set(map(bytes, np.concatenate((inputs, targets), axis=1)))


def test_a_block_longer_than_the_stream_is_refused_with_the_longest_there_can_be(prepared):
    write(prepared, WORDS)
    tokens = open_names().meta["splits"]["train"]["tokens"]
    message = refusal(open_names, "stream", tokens)
    assert f"block_size={tokens} " in message and "training split of names" in message
    assert f"has {tokens} tokens" in message and message.endswith(f"at most {tokens - 1}")
    assert len(open_names("stream", tokens - 1).train) == 1
    assert open_names("documents", 10 * tokens).train.continued == 0


# The loss of a split


def tiny_model(block_size: int) -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(d_model=8, n_heads=2, block_size=block_size, init_std=0.5, dropout=0.5), BOS + 1)


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_the_loss_of_a_split_is_the_sum_over_its_tokens_one_by_one(block_size):
    model, expected = tiny_model(block_size), 0.0
    total, count = evaluate.total_loss(model, DocumentRows(TOKENS, BOS, block_size, 0), contextlib.nullcontext())
    model.eval()
    for document in DOCUMENTS:
        for seen, target in contexts(document, block_size):
            logits = model(torch.tensor([seen]))[0, -1].detach().double()
            expected -= logits.log_softmax(-1)[target].item()
    assert count == len(TOKENS) - 1
    assert total == pytest.approx(expected, rel=1e-5)


def test_the_loss_of_a_split_does_not_depend_on_how_many_rows_run_at_once(monkeypatch):
    model, rows, results = tiny_model(8), DocumentRows(TOKENS, BOS, 8, 0), []
    for positions in (1, 24, 100, 100_000):
        monkeypatch.setattr(evaluate, "POSITIONS_AT_ONCE", positions)
        results.append(evaluate.total_loss(model, rows, contextlib.nullcontext()))
    assert len({count for _, count in results}) == 1
    assert [total for total, _ in results] == pytest.approx([results[0][0]] * 4, rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_changes_nothing_and_keeps_no_graph(training):
    model, recorded = tiny_model(8).train(training), []
    model.register_forward_hook(lambda *_: recorded.append(torch.is_grad_enabled()))
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    evaluate.total_loss(model, DocumentRows(TOKENS, BOS, 8, 0), contextlib.nullcontext())
    assert model.training is training and all(module.training is training for module in model.modules())
    assert torch.equal(torch_state, torch.get_rng_state()) and (numpy_state == np.random.get_state()[1]).all()
    assert recorded == [False]


# Where a run computes


@pytest.fixture
def machine(monkeypatch):
    """Makes PyTorch see this many CUDA devices, with or without bfloat16, and Apple's GPU or none."""

    def have(cuda: int = 0, bfloat16: bool = True, mps: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        # emulated bfloat16 is there on every GPU
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or bfloat16
        )
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return have


DEVICES = {
    (0, False): {"auto": "cpu", "cpu": "cpu", "cuda": None, "cuda:1": None, "mps": None},
    (1, False): {"auto": "cuda", "cpu": "cpu", "cuda": "cuda", "cuda:1": None, "mps": None},
    (2, True): {"auto": "cuda", "cpu": "cpu", "cuda": "cuda", "cuda:1": "cuda:1", "mps": "mps"},
    (0, True): {"auto": "mps", "cpu": "cpu", "cuda": None, "cuda:1": None, "mps": "mps"},
}


@pytest.mark.parametrize(("cuda", "mps"), DEVICES)
def test_a_device_is_chosen_or_refused_by_what_there_is(machine, cuda, mps):
    machine(cuda=cuda, mps=mps)
    for name, chosen in DEVICES[cuda, mps].items():
        if chosen:
            assert device.choose_device(name) == torch.device(chosen)
        else:
            message = refusal(device.choose_device, name)
            assert f"device {name} does not exist" in message and "use auto or cpu" in message


f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = {
    ("cpu", True): {"auto": f32, "float32": f32, "bfloat16": bf16, "float16": None},
    ("mps", True): {"auto": f32, "float32": f32, "bfloat16": None, "float16": None},
    ("cuda", True): {"auto": bf16, "float32": f32, "bfloat16": bf16, "float16": f16},
    ("cuda", False): {"auto": f16, "float32": f32, "bfloat16": None, "float16": f16},
}
# what a CUDA device can do says nothing about the others
DTYPES |= {("cpu", False): DTYPES["cpu", True], ("mps", False): DTYPES["mps", True]}


@pytest.mark.parametrize(("kind", "bfloat16"), DTYPES)
def test_a_dtype_is_chosen_or_refused_by_the_device(machine, kind, bfloat16):
    machine(cuda=1, bfloat16=bfloat16)
    for name, chosen in DTYPES[kind, bfloat16].items():
        if chosen:
            dtype, notice = device.choose_dtype(torch.device(kind), name)
            assert dtype == chosen
            assert bool(notice) == (name == "auto" and chosen == f16)
        else:
            message = refusal(device.choose_dtype, torch.device(kind), name)
            assert f"dtype {name} " in message and "float32" in message


def test_gradients_are_scaled_for_float16_on_cuda_alone(monkeypatch):
    # the scaler itself switches off where there is no GPU, so what it is asked for is looked at
    monkeypatch.setattr(torch.amp, "GradScaler", lambda kind, enabled: (kind, enabled))
    for kind in ("cpu", "cuda", "mps"):
        for dtype in (f32, bf16, f16):
            scaler = device.make_scaler(torch.device(kind), dtype)
            assert scaler == (kind, kind == "cuda" and dtype == f16)


def test_matrix_products_are_in_the_dtype_and_float32_means_nothing_is_touched():
    x, cpu = torch.ones(2, 2), torch.device("cpu")
    with device.autocast(cpu, bf16):
        assert (x @ x).dtype == bf16
    for kind in ("cpu", "cuda", "mps"):
        assert isinstance(device.autocast(torch.device(kind), f32), contextlib.nullcontext)
    assert not device.make_scaler(cpu, bf16).is_enabled()


def test_a_model_that_cannot_be_compiled_runs_without_unless_it_must(monkeypatch):
    def fail(compiled):
        raise RuntimeError("no C++ compiler\nmore lines")

    model, cpu, cuda = tiny_model(8), torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch, "compile", lambda model: "compiled")
    assert device.compile_model(model, "auto", cpu, fail) == (model, "off")
    assert device.compile_model(model, False, cuda, fail) == (model, "off")
    assert device.compile_model(model, True, cpu, lambda compiled: None) == ("compiled", "on")
    assert device.compile_model(model, "auto", cuda, lambda compiled: None) == ("compiled", "on")
    without = (model, "off, because compiling fails here (no C++ compiler)")
    assert device.compile_model(model, "auto", cuda, fail) == without
    assert "no C++ compiler" in refusal(device.compile_model, model, True, cpu, fail)


# Text to tokens


@REPEATABLE
@given(st.text())
def test_encoding_and_decoding_gives_the_text_back(text):
    tokens = tokenizer.CharTokenizer(text + "ab")
    ids = tokens.encode(text)
    assert tokens.decode([tokens.bos_id, *ids, tokens.bos_id]) == text
    assert all(0 <= i < tokens.bos_id == tokens.vocab_size - 1 for i in ids)
    again = tokenizer.from_dict(json.loads(json.dumps(tokens.to_dict())))
    assert again.encode(text) == ids and again.vocab_size == tokens.vocab_size == len(set(text + "ab")) + 1


def test_unknown_characters_are_named_with_the_known_ones():
    message = refusal(tokenizer.CharTokenizer("cab").encode, "aé\nb1")
    assert "'\\n', '1', 'é'" in message and "'abc'" in message


@pytest.mark.parametrize("data", [{}, {"type": "bpe", "characters": "ab"}, {"type": "char", "characters": 3}])
def test_an_unknown_tokenizer_is_refused(data):
    with pytest.raises(ValueError, match="unknown tokenizer"):
        tokenizer.from_dict(data)
