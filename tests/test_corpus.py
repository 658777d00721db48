"""Text files to documents, to splits, to token files, and the command line that does it."""

import base64
import contextlib
import errno
import functools
import gzip
import hashlib
import http.client
import io
import itertools
import json
import os
import resource
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import corpus
import reader
import tokenizer as tokenizers
from corpus import Source
from data import prepare
from errors import RunError, UsageError

ROOT = Path(__file__).resolve().parent.parent
# `prepared` is an empty folder or one that earlier examples have left a set in: both are as good
REPEATABLE = settings(
    deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
WORDS = [f"{a}{b}{c}" for a in "klm" for b in "aeiou" for c in "nrst"]
BOS = 256  # of byte tokens


def write(path: Path, documents: list[str]) -> Path:
    path.write_bytes("".join(f"{document}\n" for document in documents).encode())
    return path


def refusal(function, *args) -> str:
    with pytest.raises(UsageError) as error:
        function(*args)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read(*paths: Path, how: str | None = None, field: str | None = None) -> tuple[list[str], int]:
    """(documents, or the pieces of a plain text; how many were blank)"""
    source = Source(list(paths), how, field)
    documents = [document for documents in source.chunks(lambda n: None) for document in documents]
    return documents, source.counts["blank"]


def meta(name: str = "mine") -> dict:
    return json.loads((corpus.PREPARED / name / "meta.json").read_text(encoding="utf-8"))


def stored(split: str, name: str = "mine") -> list[int]:
    return np.fromfile(corpus.PREPARED / name / f"{split}.bin", dtype=meta(name)["dtype"]).tolist()


def documents_of(split: str, name: str = "mine") -> list[str]:
    """The documents of a token file of bytes."""
    ids, documents, document = stored(split, name), [], b""
    assert ids[0] == ids[-1] == BOS
    for i in ids[1:]:
        if i == BOS:
            documents.append(document.decode())
        document = b"" if i == BOS else document + bytes([i])
    return documents


def text_of(split: str, name: str = "mine") -> str:
    """The plain text of a token file, whatever its tokens."""
    return tokenizers.from_dict(meta(name)["tokenizer"]).decode(stored(split, name))


def prepare_lines(file: Path, tokens: str = "byte", val_fraction: float = 0.3, seed: int = 0) -> dict:
    return corpus.prepare("mine", Source([file], "lines"), tokens, val_fraction, seed)


@contextlib.contextmanager
def chunks_of(size: int):
    """Files are read this many bytes at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "CHUNK", size)
        yield


@contextlib.contextmanager
def at_call(nth: int, owner, name: str, happens):
    """Something happens just before the nth call of owner.name from here on; yields the calls so far."""
    calls, works = [], getattr(owner, name)

    def with_it(*args, **options):
        calls.append(args)
        if len(calls) == nth:
            happens()
        return works(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, with_it)
        yield calls


@pytest.fixture
def ranks(tmp_path) -> Path:
    """A small file of GPT-2 ranks: all bytes and a few merges."""
    pieces = [bytes([b]) for b in range(256)] + [b"th", b"the", b" the", b"\n\n"]
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces)]
    (tmp_path / "gpt2.tiktoken").write_text("".join(lines))
    return tmp_path / "gpt2.tiktoken"


# Files to documents

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
    assert read(tmp_path / "a.txt", how="lines") == (documents, blank)


BLOCKS = [
    ("anna\nbob\n\nzoë\n", ["anna\nbob", "zoë"]),
    ("\n \n anna\nbob \n\t\n\n\n\nzoë", [" anna\nbob ", "zoë"]),
    ("anna\r\n\r\nbob\r\n \r\n", ["anna", "bob"]),
    ("anna\n  ", ["anna"]),
]


@pytest.mark.parametrize(("text", "documents"), BLOCKS)
def test_a_document_is_what_stands_between_blank_lines(tmp_path, text, documents):
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read(tmp_path / "a.txt", how="blocks")[0] == documents


def test_a_document_is_a_file_and_blank_ones_are_counted(tmp_path):
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, text in zip(paths, ["\ufeff\nanna\r\n\r\nbob", " \n\n", "zoë\n"], strict=True):
        path.write_bytes(text.encode())
    assert read(*paths, how="files") == (["\nanna\n\nbob", "zoë\n"], 1)
    # and as a plain text they stand one after the other
    assert "".join(read(*paths)[0]) == "\nanna\n\nbob \n\nzoë\n"


def all_at_once(raw: bytes, how: str | None) -> list[str]:
    """The documents of a file, or its one text, by definition and without chunks."""
    text = raw.decode().removeprefix("\ufeff").replace("\r\n", "\n")
    found = [text]
    if how == "lines":
        found = text.split("\n")
    if how == "blocks":
        groups = itertools.groupby(text.split("\n"), key=lambda line: not line.strip())
        found = ["\n".join(lines) for blank, lines in groups if not blank]
    return [document for document in found if how is None or document.strip()]


anything = st.text(st.characters(exclude_categories=["Cs"]))  # surrogates are halves of characters
PIECES = ["a", "b c", "é", "王", "🙂", " ", "\t", "\n", "\n\n", "\r", "\r\n", "\r\n\r\n", "\u2028", "\x0b", "\ufeff"]
mixed = st.lists(st.sampled_from(PIECES)).map("".join) | st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"])
)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("how", ["lines", "blocks", "files", None])
@REPEATABLE
@given(mixed, st.integers(1, 20))
@example("\ufeffa\n", 1)
@example("a\r\n\r\n\r\nb", 3)
@example("a\n\n\n\n\nb\n  ", 2)
@example("🙂🙂\r\r\n", 5)
def test_a_file_is_the_same_in_chunks_of_any_size(tmp_path, how, packed, text, chunk):
    file, raw = tmp_path / "a.txt", text.encode()
    file.write_bytes(gzip.compress(raw[:7]) + gzip.compress(raw[7:]) if packed else raw)
    whole = read(file, how=how)
    with chunks_of(chunk):
        found, blank = read(file, how=how)
    assert (found if how else ["".join(found)]) == all_at_once(raw, how)
    assert blank == whole[1]


@REPEATABLE
@given(st.binary().map(lambda raw: raw.replace(b"\0", b"")), st.integers(1, 20))
@example("zoë".encode("latin-1"), 1)
@example("anna 王".encode()[:-1], 20)
@example(b"\xf0\x9f\x99A", 2)
def test_bytes_that_are_not_utf8_are_refused_with_their_offset_in_the_file(tmp_path, raw, chunk):
    (tmp_path / "a.txt").write_bytes(b"ab" + raw)  # so that nothing is taken for gzip
    try:
        (b"ab" + raw).decode()
    except UnicodeDecodeError as error:
        with chunks_of(chunk):
            message = refusal(read, tmp_path / "a.txt")
        assert f"{tmp_path / 'a.txt'} is not UTF-8" in message and "iconv" in message
        assert f"byte 0x{(b'ab' + raw)[error.start]:02x} at offset {error.start};" in message


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_a_file_that_is_no_text_is_refused_with_the_offset(tmp_path, chunk):
    (tmp_path / "a.txt").write_bytes(b"some text\0and more\0")
    with chunks_of(chunk):
        message = refusal(read, tmp_path / "a.txt")
    assert "a.txt is no text" in message and "offset 9" in message
    (tmp_path / "utf16.txt").write_bytes("text".encode("utf-16"))
    assert "utf16.txt" in refusal(read, tmp_path / "utf16.txt")
    assert "none.txt" in refusal(read, tmp_path / "none.txt")


PACKED = gzip.compress(b"some text\n" * 10, mtime=0)
DAMAGED_GZIP = [PACKED[:n] for n in range(2, len(PACKED))]  # cut
DAMAGED_GZIP += [PACKED[:-6] + b"?" + PACKED[-5:], b"\x1f\x8bsome text"]  # another checksum; no gzip at all


def test_a_damaged_gzip_file_is_refused_with_its_path(tmp_path):
    (tmp_path / "folder").mkdir()
    for raw in DAMAGED_GZIP:
        file = tmp_path / "folder" / "a.gz"
        file.write_bytes(raw)
        assert f"{file} is a damaged gzip file" in refusal(read, file)
        # inside a folder as well, where files are looked at to leave out those that are no text
        assert f"{file} is a damaged gzip file" in refusal(lambda: read(*corpus.find_files([tmp_path / "folder"])))


# JSON lines


@REPEATABLE
@given(st.lists(anything), st.booleans(), st.integers(1, 20))
def test_json_lines_are_the_texts_of_one_field(tmp_path, texts, ascii_only, chunk):
    lines = [json.dumps({"id": 3, "text": text, "x": {"text": 1}}, ensure_ascii=ascii_only) for text in texts]
    (tmp_path / "a.jsonl").write_bytes("\r\n \n".join(lines).encode())
    with chunks_of(chunk):
        found, blank = read(tmp_path / "a.jsonl", how="lines", field="text")
    assert found == [text for text in texts if text.strip()]
    assert blank == len(texts) - len(found)


DAMAGED_JSON = [
    ('{"text": "a"', "no JSON"),
    ("text", "no JSON"),
    ('{"text": "a"} {"text": "b"}', "no JSON"),
    ("[" * 10_000, "no JSON"),
    ('{"title": "a", "body": "b"}', "its fields: title, body"),
    ('{"text": 3}', "no text in the field 'text'"),
    ('{"text": null}', "no text in the field 'text'"),
    ('["text"]', "no object"),
    ('{"text": "half a character: \\ud83d"}', "text"),
]


@pytest.mark.parametrize("tokens", ["char", "byte"])
@pytest.mark.parametrize(("line", "word"), DAMAGED_JSON)
def test_a_json_line_without_a_text_is_refused_with_its_number(prepared, line, word, tokens):
    lines = [json.dumps({"text": text}) for text in WORDS]
    file = write(prepared.with_name("a.jsonl"), [*lines[:20], "", line, *lines[20:]])
    for chunk in (50, 1 << 20):
        with chunks_of(chunk):
            message = refusal(corpus.prepare, "mine", Source([file], "lines", "text"), tokens, 0.3, 0)
        assert f"{file}, line 22, " in message and word in message
    assert not corpus.PREPARED.exists() or not list(corpus.PREPARED.iterdir())


# Folders


def test_of_a_folder_all_texts_are_taken_but_hidden_and_binary_files(tmp_path):
    texts = {"b.txt": b"1", "a.md": b"2", "sub/c": "ë".encode(), "sub/deep/d.gz": gzip.compress(b"4"), "empty": b""}
    others = {".hidden": b"5", ".git/config": b"6", "sub/.x/e.txt": b"7", "image.png": b"\x89PNG\0", "g.gz": b""}
    others["g.gz"] = gzip.compress(b"\0" * 100)
    folder = tmp_path / ".notes"  # that the folder itself is hidden says nothing
    for name, raw in (texts | others).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    (folder / "dangling").symlink_to(tmp_path / "nothing")
    found = corpus.find_files([folder])
    assert sorted(str(path.relative_to(folder)) for path in found) == sorted(texts)
    assert corpus.find_files([folder / ".hidden", folder / "sub"]) == [
        folder / ".hidden",
        folder / "sub" / "c",
        folder / "sub" / "deep" / "d.gz",
    ]


def test_a_folder_is_read_in_the_same_order_wherever_it_is(tmp_path):
    names = ["b", "a", "c/a", "B", "10", "9", "c.txt"]
    for folder, order in (("one", names), ("other", names[::-1])):
        for name in order:
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text(name)
    one, other = (read(*corpus.find_files([tmp_path / folder]), how="files")[0] for folder in ("one", "other"))
    assert one == other and sorted(one) == sorted(names)


def test_a_folder_without_texts_is_refused_with_its_path(tmp_path):
    assert str(tmp_path) in refusal(corpus.find_files, [tmp_path])
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    assert str(tmp_path) in refusal(corpus.find_files, [tmp_path])
    assert "nothing" in refusal(corpus.find_files, [tmp_path / "nothing"])


# Documents to splits

line = st.text(st.characters(exclude_characters="\n\r\0\ufeff", exclude_categories=["Cs"]), min_size=1)
texts = st.lists(line | st.sampled_from(WORDS))


def split(path: Path, documents: list[str], **settings) -> tuple[list[str], list[str]] | None:
    """(training, validation) documents; None where one of the two would be empty."""
    write(path, documents)
    try:
        prepare_lines(path, **settings)
    except UsageError as error:
        assert "split is empty" in str(error) or "everything is blank" in str(error)
        return None
    return documents_of("train"), documents_of("val")


@REPEATABLE
@given(texts, st.floats(0.01, 0.9), st.integers(0, 2**31 - 1), st.integers(1, 40))
def test_every_distinct_document_is_in_exactly_one_split(prepared, documents, val_fraction, seed, chunk):
    with chunks_of(chunk):
        splits = split(prepared, documents, val_fraction=val_fraction, seed=seed)
    if splits:
        distinct = {document for document in documents if document.strip()}
        assert Counter(splits[0]) + Counter(splits[1]) == Counter(distinct)
        dropped = meta()["duplicates"], meta()["blank"]
        blank = sum(not document.strip() for document in documents)
        assert dropped == (len(documents) - blank - len(distinct), blank)


@REPEATABLE
@given(texts, texts, st.integers(0, 2**31 - 1))
def test_adding_or_reordering_documents_moves_none_of_the_old(prepared, documents, more, seed):
    if splits := split(prepared, documents, val_fraction=0.4, seed=seed):
        train, val = split(prepared, [*more, *documents[::-1]], val_fraction=0.4, seed=seed)
        assert set(splits[0]) <= set(train) and set(splits[1]) <= set(val)


def test_the_seed_and_the_share_decide_what_is_held_out(prepared):
    train, val = split(prepared, WORDS, val_fraction=0.5, seed=1)
    assert (train, val) == split(prepared, WORDS, val_fraction=0.5, seed=1)
    assert set(val) != set(split(prepared, WORDS, val_fraction=0.5, seed=2)[1])
    assert set(val) > set(split(prepared, WORDS, val_fraction=0.2, seed=1)[1])
    # neighbours of a sorted list do not stay neighbours
    assert [word for word in WORDS if word in train] != train
    held_out = len(split(prepared, [str(i) for i in range(10_000)], val_fraction=0.1)[1])
    assert abs(held_out - 1000) < 150  # five standard deviations of 10,000 draws at 0.1


def test_a_split_without_documents_is_refused_with_numbers(prepared):
    message = refusal(prepare_lines, write(prepared, ["anna"] * 10), "char")
    assert "split is empty" in message and "1 distinct documents" in message
    assert not list(corpus.PREPARED.iterdir())


@pytest.mark.parametrize("tokens", ["char", "byte"])
@pytest.mark.parametrize("how", ["lines", "blocks", "files", None])
@pytest.mark.parametrize("raw", [b"", b"\n\n\n", b"\xef\xbb\xbf \t\r\n"])
def test_a_blank_file_is_refused(prepared, how, tokens, raw):
    prepared.write_bytes(raw)
    # as a plain text, blanks are characters like others, but these are too few
    message = refusal(corpus.prepare, "mine", Source([prepared], how), tokens, 0.1, 0)
    assert "no text" in message or "split is empty" in message


@pytest.mark.parametrize("how", ["lines", None])
def test_a_vocabulary_of_one_character_is_refused(prepared, how):
    write(prepared, ["a" * n for n in range(1, 40)]) if how else prepared.write_text("a" * 100)
    message = refusal(corpus.prepare, "mine", Source([prepared], how), "char", 0.1, 0)
    assert "only the character 'a'" in message and not list(corpus.PREPARED.iterdir())


# A given validation text


def test_a_given_validation_text_is_held_out_as_it_is(prepared, call):
    write(prepared.with_name("a.txt"), [*WORDS[:30], *WORDS[:5], "", "only here: x"])
    write(prepared.with_name("b.txt"), [*WORDS[30:40], WORDS[30], "only there: y"])
    write(prepared.with_name("c.txt"), WORDS[40:])
    a, b, c = (prepared.with_name(name) for name in ("a.txt", "b.txt", "c.txt"))
    args = [a, "--val-file", b, "--val-file", c, "--documents", "lines", "--name", "mine"]
    status, out, _ = call(prepare, *args, "--val-fraction", "0.7")
    assert status == 0 and "6 duplicates, 1 blank" in out
    assert sorted(documents_of("train")) == sorted([*WORDS[:30], "only here: x"])
    assert sorted(documents_of("val")) == sorted([*WORDS[30:], "only there: y"])
    # nothing was drawn, so nothing is asked of the settings that would draw
    assert corpus.ensure("mine", "documents", 0.1, 5)[0] == "mine"
    assert call(prepare, *args, "--tokenizer", "char")[0] == 0
    assert {"x", "y"} < set(meta()["tokenizer"]["characters"])


def test_a_given_validation_text_that_shares_documents_is_refused_with_their_number(prepared, call):
    write(prepared, WORDS)
    write(prepared.with_name("b.txt"), ["new", *WORDS[7:10], WORDS[8], "newer"])
    args = [prepared, "--val-file", prepared.with_name("b.txt"), "--documents", "lines", "--name", "mine"]
    for chunk in (1, 1 << 20):
        with chunks_of(chunk):
            status, out, err = call(prepare, *args)
        assert (status, out) == (2, "") and len(err.splitlines()) == 1
        assert "shares 3 documents" in err and any(repr(word) in err for word in WORDS[7:10])
        assert not list(corpus.PREPARED.iterdir())


def test_a_plain_text_can_have_a_given_validation_text(prepared, call):
    prepared.write_text("to be or not\nto be", encoding="utf-8")
    prepared.with_name("b.txt").write_text("that is thé question", encoding="utf-8")
    assert call(prepare, prepared, "--val-file", prepared.with_name("b.txt"), "--name", "mine")[0] == 0
    assert (text_of("train"), text_of("val")) == ("to be or not\nto be", "that is thé question")
    status, _, err = call(prepare, prepared, "--val-file", write(prepared.with_name("c.txt"), []), "--name", "mine")
    assert status == 2 and "validation split is empty" in err
    assert text_of("train") == "to be or not\nto be"


# Splits to token files


def test_a_token_file_is_documents_with_a_separator_before_between_and_after(prepared):
    write(prepared, [*WORDS, "zoë"])
    returned = prepare_lines(prepared, "char")
    alphabet, found = sorted(set("".join(WORDS) + "zoë")), []
    for name in ("train", "val"):
        text = "".join([*alphabet, "|"][i] for i in stored(name))
        assert text[0] == text[-1] == "|" and "||" not in text
        documents = text[1:-1].split("|")
        found += documents
        characters, size = sum(map(len, documents)), sum(len(document.encode()) for document in documents)
        counts = {"documents": len(documents), "characters": characters, "bytes": size, "tokens": len(text)}
        assert returned["splits"][name] == counts
    assert sorted(found) == sorted([*WORDS, "zoë"])
    assert returned == meta()


def test_every_line_ten_times_is_the_same_set_and_the_count_is_reported(prepared):
    once = prepare_lines(write(prepared, WORDS))
    tenfold = prepare_lines(write(prepared, ["", *WORDS * 10]))
    assert tenfold == once | {"duplicates": 9 * len(WORDS), "blank": 1}
    assert f"dropped: {9 * len(WORDS)} duplicates, 1 blank documents" in corpus.describe("mine", tenfold)


TYPES = [(255, "uint8"), (256, "uint16"), (65_535, "uint16"), (65_536, "uint32")]


@pytest.mark.parametrize(("characters", "dtype"), TYPES)
def test_the_stored_type_follows_the_vocabulary(prepared, characters, dtype):
    # with the separator there is one token more than characters; chr() from 0x10000: no surrogates, no line breaks
    alphabet = [chr(0x10000 + i) for i in range(characters)]
    write(prepared, ["".join(alphabet), *alphabet[:20]])
    assert prepare_lines(prepared, "char")["dtype"] == dtype
    assert set(stored("train") + stored("val")) == set(range(characters + 1))


def test_the_fingerprint_tells_sets_apart(prepared):
    found = [prepare_lines(write(prepared, WORDS), "char")["fingerprint"]]
    assert prepare_lines(prepared, "char")["fingerprint"] == found[0]
    found.append(prepare_lines(write(prepared, [word.upper() for word in WORDS]), "char")["fingerprint"])
    found.append(prepare_lines(write(prepared, WORDS), "char", seed=1)["fingerprint"])
    found.append(prepare_lines(prepared, "byte")["fingerprint"])
    found.append(prepare_lines(write(prepared, WORDS[1:]), "byte")["fingerprint"])
    # the same ids for other characters
    shifted = "".join(WORDS).translate({ord(c): ord(c) + 0x100 for c in "abcdefghijklmnopqrstuvwxyz"})
    for text in ("".join(WORDS), shifted):
        prepared.write_text(text, encoding="utf-8")
        found.append(corpus.prepare("mine", Source([prepared]), "char", 0.3, 0)["fingerprint"])
    assert len(set(found)) == len(found)


def test_preparation_does_not_depend_on_the_locale(prepared, tmp_path):
    write(prepared, ["zoë", "王芳", "łucja", *WORDS])
    corpus.prepare("names", Source([prepared], "lines"), "char", 0.3, 5)
    script = "import sys, runpy, pathlib, corpus\nhere = pathlib.Path(__file__).parent\n"
    script += "corpus.PREPARED, corpus.EMBEDDED = here / 'other', {'names': here / 'names.txt'}\n"
    script += "sys.argv[1:] = 'names --val-fraction 0.3 --seed 5'.split()\n"
    script += "runpy.run_path('data/prepare.py', run_name='__main__')\n"
    (tmp_path / "script.py").write_text(script)
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, tmp_path / "script.py"], cwd=ROOT, env=env, check=True, capture_output=True)
    assert files(tmp_path / "other") == files(tmp_path / "prepared")


# One plain text

KINDS = ["char", "char+unk", "byte", "bpe:300", "gpt2"]


def prepare_text(file: Path, tokens: str, ranks: Path, val_fraction: float = 0.1) -> dict:
    for kind, package in (("bpe", "tokenizers"), ("gpt2", "tiktoken")):
        if tokens.startswith(kind):
            pytest.importorskip(package)
    return corpus.prepare("mine", Source([file]), f"gpt2:{ranks}" if tokens == "gpt2" else tokens, val_fraction, 0)


@pytest.mark.parametrize("tokens", KINDS)
@pytest.mark.parametrize("length", [20, 99, 1001])
def test_the_last_tenth_of_the_characters_of_a_plain_text_is_held_out(prepared, ranks, tokens, length):
    text = ("the thing ÿ 王🙂\n\nthere, " * 100)[:length]
    prepared.write_bytes(text.encode())
    for chunk in (7, 1 << 20):
        with chunks_of(chunk):
            splits = prepare_text(prepared, tokens, ranks)["splits"]
        cut = 9 * length // 10
        assert (text_of("train"), text_of("val")) == (text[:cut], text[cut:])
        for name, part in (("train", text[:cut]), ("val", text[cut:])):
            counts = {"documents": 0, "characters": len(part), "bytes": len(part.encode())}
            assert splits[name] == counts | {"tokens": len(stored(name))}
        # no separator: what follows it would be no text
        assert max(stored("train") + stored("val")) < tokenizers.from_dict(meta()["tokenizer"]).bos_id


@pytest.mark.parametrize(("val_fraction", "cut"), [(0.5, 50), (0.25, 75)])
def test_another_share_of_a_plain_text_can_be_held_out(prepared, ranks, val_fraction, cut):
    prepared.write_text("abcdefghij" * 10)
    prepare_text(prepared, "char", ranks, val_fraction)
    assert len(text_of("train")) == cut and len(text_of("val")) == 100 - cut


@pytest.mark.parametrize("length", [0, 1, 2, 10])
def test_a_plain_text_too_short_for_two_splits_is_refused_with_its_length(prepared, length):
    prepared.write_text("abcdefghijklmnopqrst"[:length])
    message = refusal(corpus.prepare, "mine", Source([prepared]), "byte", 0.1, 0)
    assert "no text" in message if not length else f"{length} characters in all" in message


TEXTS = {
    "words": "the thing that the author thinks of\nis there; don't  say\n\n\nso, \t or 12 34! " * 60,
    "no spaces": "thethingthattheauthorthinksof王🙂isthere" * 60,
    "spaces and a word": "  \n \n\n\t" * 200 + "word" + " \n" * 200,
    "one space": "a" * 3000 + " " + "b" * 3000,
    "odd spaces": "a\u00a0b\u2003c\u3000d\x1ce\x85f\u200bg \u0301h '\u2028s 'll\r\n" * 60,
}


@pytest.mark.parametrize("tokens", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_plain_text_has_the_same_token_files_in_chunks_of_any_size(prepared, ranks, text, tokens):
    prepared.write_bytes(TEXTS[text].encode())
    found = []
    for chunk in (1 << 20, 13, 1000):
        with chunks_of(chunk):
            prepare_text(prepared, tokens, ranks)
        found.append(files(corpus.PREPARED))
    assert found[0] == found[1] == found[2]
    # and they are the tokens of each part in one piece
    tokenizer, whole = tokenizers.from_dict(meta()["tokenizer"]), TEXTS[text].replace("\r\n", "\n")
    cut = 9 * len(whole) // 10
    assert stored("train") == tokenizer.encode(whole[:cut]) and stored("val") == tokenizer.encode(whole[cut:])


# tokens of every kind that a cut in the wrong place would break
MERGES = [b"  ", b"\n\n", b" a", b"a ", b"\na", b"a\n", b" \n", "é".encode()]


@functools.cache
def with_merges() -> list[tokenizers.Tokenizer]:
    for package in ("tokenizers", "tiktoken"):
        pytest.importorskip(package)
    learned = tokenizers.train_bpe(["  \n\n a a a\n12 12 don't  \u00a0\u3000"], 320)
    return [learned, tokenizers.gpt2([bytes([b]) for b in range(256)] + MERGES)]


@REPEATABLE
@given(st.lists(st.sampled_from([*PIECES, " a", "\n\n", "don't", "  ", "12 ", "\u00a0", "\x1c", "\u200b", "\u3000"])))
def test_a_text_cut_at_word_borders_has_the_tokens_of_the_whole(pieces):
    cut, text = list(reader.at_word_borders(iter(pieces))), "".join(pieces)
    assert "".join(cut) == text
    for tokenizer in with_merges():
        assert [i for part in cut for i in tokenizer.encode(part)] == tokenizer.encode(text)


def test_a_long_text_is_cut_into_pieces_of_about_a_chunk():
    pieces = [("word " * 1000) for _ in range(20)]
    cut = list(reader.at_word_borders(iter(pieces)))
    assert len(cut) >= 20 and max(map(len, cut)) < 10_000


# A set on the disk


MOMENTS = [(corpus._Split, "write"), (Path, "write_text"), (Path, "rename"), (Path, "mkdir"), (os, "chmod")]
MOMENTS += [(corpus.tempfile, "mkdtemp")]


@pytest.mark.parametrize(("owner", "name"), MOMENTS)
@pytest.mark.parametrize("how", ["lines", None])
@pytest.mark.parametrize("existing", [False, True])
def test_a_preparation_that_fails_at_any_moment_leaves_what_was_there_and_nothing_else(
    prepared, existing, how, owner, name
):
    def again():
        return corpus.prepare("mine", Source([prepared], how), "byte", 0.3, 0)

    def fail():
        raise OSError(errno.ENOSPC, "No space left on device")

    write(prepared, WORDS)
    if existing:
        again()
    write(prepared, WORDS[:30])
    before = files(prepared.parent)
    for nth in itertools.count(1):
        with at_call(nth, owner, name, fail) as calls:
            try:
                again()
            except RunError as error:
                message = str(error)
        if len(calls) < nth:
            break  # it is not called that often, so nothing failed
        assert len(message.splitlines()) == 1 and "mine" in message and "No space left on device" in message
        assert files(prepared.parent) == before
        assert not corpus.PREPARED.exists() or [path.name for path in corpus.PREPARED.iterdir()] == ["mine"] * existing
    assert nth > 1 and files(prepared.parent) != before


def test_a_disk_that_is_full_is_said_in_one_line(prepared):
    prepared.write_text("some text\n" * 10_000)
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, allowed[1]))  # bytes a file: the same errors as a full disk
    try:
        with pytest.raises(RunError, match=r"mine could not be written: File too large"):
            corpus.prepare("mine", Source([prepared]), "byte", 0.1, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert not list(corpus.PREPARED.iterdir())


def test_preparing_again_replaces_the_set_and_leaves_nothing_else(prepared):
    for words in (WORDS, WORDS[:30]):
        prepare_lines(write(prepared, words))
        assert [folder.name for folder in corpus.PREPARED.iterdir()] == ["mine"]
        assert {Path(name).name for name in files(corpus.PREPARED)} == {"meta.json", "train.bin", "val.bin"}
        assert len(stored("train")) + len(stored("val")) == 2 + 4 * len(words)


@pytest.mark.parametrize(("owner", "name"), MOMENTS)
@pytest.mark.parametrize("existing", [False, True])
def test_another_preparation_of_the_name_at_any_moment_leaves_a_whole_set(prepared, existing, owner, name):
    first, second = write(prepared, WORDS), write(prepared.with_name("b.txt"), WORDS[:30])
    for nth in itertools.count(1):
        if existing:
            prepare_lines(write(prepared.with_name("c.txt"), WORDS[30:]))
        with at_call(nth, owner, name, lambda: prepare_lines(second)) as calls:
            try:
                prepare_lines(first)
                expected = WORDS
            except RunError as error:  # the other was faster
                assert len(str(error).splitlines()) == 1 and "mine" in str(error)
                expected = WORDS[:30]
        assert sorted(documents_of("train") + documents_of("val")) == sorted(expected)
        assert [path.name for path in corpus.PREPARED.iterdir()] == ["mine"]
        if len(calls) < nth:
            break
    assert nth > 1


def test_two_preparations_of_one_name_at_once_leave_a_whole_set(prepared, tmp_path):
    script = "import sys, pathlib, corpus, errors\nfrom data import prepare\n"
    script += "corpus.PREPARED = pathlib.Path(sys.argv[1])\n"
    script += "sys.argv[1:] = [sys.argv[2], '--documents', 'lines', '--name', 'mine']\n"
    script += "for _ in range(25):\n    try:\n        errors.run(prepare.main)\n"
    script += "    except SystemExit as stopped:\n        print('status', stopped.code)\n"
    contents = []
    for name, words in (("a.txt", WORDS), ("b.txt", WORDS[:30])):
        prepare_lines(write(tmp_path / name, words), val_fraction=0.1)
        contents.append(files(corpus.PREPARED))
    command, env = [sys.executable, "-c", script, str(corpus.PREPARED)], os.environ | {"PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [*command, str(tmp_path / name)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name in ("a.txt", "b.txt")
    ]
    for process in started:
        out, err = process.communicate(timeout=60)
        failed = out.count("status 1\n")
        assert out.count("status ") == 25 and failed + out.count("status 0\n") == 25
        assert len(err.splitlines()) == failed and all(line.startswith("error: ") for line in err.splitlines())
    assert files(corpus.PREPARED) in contents


# The set that data.name means


def written() -> dict[str, int]:
    """When each set was written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in corpus.PREPARED.glob("*/meta.json")}


def test_names_are_prepared_when_missing_damaged_or_with_other_settings_and_only_then(prepared):
    write(prepared, WORDS)
    name, first = corpus.ensure("names", "documents", 0.3, 0)
    assert name == "names" and first == meta("names") and first["tokenizer"]["type"] == "char"
    before = written()
    assert corpus.ensure("names", "stream", 0.3, 0) == ("names", first) and written() == before
    (corpus.PREPARED / "names" / "meta.json").write_text("{")
    assert corpus.ensure("names", "documents", 0.3, 0) == ("names", first) == ("names", meta("names"))
    assert corpus.ensure("names", "documents", 0.5, 0)[1]["val_fraction"] == 0.5
    assert corpus.ensure("names", "documents", 0.5, 7)[1]["split_seed"] == 7 == meta("names")["split_seed"]


def test_a_missing_or_damaged_meta_is_refused_with_path_and_command(prepared):
    prepare_lines(write(prepared, WORDS))
    file = corpus.PREPARED / "mine" / "meta.json"
    for damage in (
        lambda: file.write_text(file.read_text()[:-20]),
        lambda: file.write_text("[]"),
        lambda: file.write_text("[" * 100_000),
        lambda: file.write_bytes(b"\xff"),
        lambda: file.write_text('{"format": 0}'),
        file.unlink,
    ):
        damage()
        message = refusal(corpus.ensure, "mine", "documents", 0.3, 0)
        assert str(file) in message and "python data/prepare.py FILE --name mine" in message


def test_a_set_that_does_not_exist_or_has_other_settings_is_refused(prepared):
    message = refusal(corpus.ensure, "nmaes", "documents", 0.1, 0)
    assert "data.name=nmaes" in message and "python data/prepare.py" in message
    assert "python data/prepare.py shakespeare" in refusal(corpus.ensure, "shakespeare", "stream", 0.1, 0)
    prepare_lines(write(prepared, WORDS))
    assert corpus.ensure("mine", "documents", 0.3, 0) == ("mine", meta())
    for val_fraction, seed, word in ((0.2, 0, "data.val_fraction=0.3"), (0.3, 1, "data.split_seed=0")):
        assert word in refusal(corpus.ensure, "mine", "documents", val_fraction, seed)


def test_a_text_of_the_users_own_is_prepared_on_the_way_and_again_when_it_changed(prepared):
    file = write(prepared.with_name("my novel.txt"), WORDS)
    name, first = corpus.ensure(str(file), "documents", 0.3, 0)
    assert (first["documents"], first["tokenizer"]["type"], first) == ("lines", "byte", meta(name))
    assert sorted(documents_of("train", name) + documents_of("val", name)) == sorted(WORDS)
    before = written()
    assert corpus.ensure(str(file), "documents", 0.3, 0) == (name, first) and written() == before
    # as one plain text in stream mode
    assert corpus.ensure(str(file), "stream", 0.3, 0)[1]["documents"] is None
    assert text_of("train", name) + text_of("val", name) == file.read_text()
    assert corpus.ensure(str(file), "stream", 0.5, 0)[1]["val_fraction"] == 0.5
    # another text of the same length, written later
    corpus.ensure(str(file), "documents", 0.3, 0)
    before = file.stat().st_mtime_ns
    write(file, [word.upper() for word in WORDS])
    os.utime(file, ns=(before + 1, before + 1))
    corpus.ensure(str(file), "documents", 0.3, 0)
    assert sorted(documents_of("train", name) + documents_of("val", name)) == sorted(word.upper() for word in WORDS)


def test_a_folder_of_the_users_own_is_prepared_on_the_way_and_again_when_it_changed(prepared):
    folder = prepared.with_name("notes")
    folder.mkdir()
    for word in WORDS[:40]:
        (folder / f"{word}.md").write_text(f"# {word}\n\ntext\n")
    name, first = corpus.ensure(str(folder), "documents", 0.3, 0)
    assert (name, first["documents"]) == ("notes", "files")
    assert sorted(documents_of("train", name) + documents_of("val", name)) == [f"# {w}\n\ntext\n" for w in WORDS[:40]]
    (folder / "new.md").write_text("new")
    corpus.ensure(str(folder), "documents", 0.3, 0)
    assert "new" in documents_of("train", name) + documents_of("val", name)
    corpus.ensure(str(folder), "stream", 0.3, 0)
    assert (text_of("train", name) + text_of("val", name)).startswith(f"# {WORDS[0]}\n\ntext\n# {WORDS[1]}")


def test_two_texts_of_one_name_are_never_taken_for_each_other(prepared):
    for folder, words in (("a", WORDS), ("b", WORDS[::-1])):
        (prepared.parent / folder).mkdir()
        write(prepared.parent / folder / "text.txt", words)
    for folder, words in (("a", WORDS), ("b", WORDS[::-1]), ("a", WORDS)):
        name, _ = corpus.ensure(str(prepared.parent / folder / "text.txt"), "stream", 0.3, 0)
        assert (text_of("train", name) + text_of("val", name)).split() == words


@pytest.mark.parametrize("name", ["names", "shakespeare", "novel"])
def test_a_text_never_replaces_a_set_that_was_prepared_by_hand(prepared, name):
    corpus.prepare(name, Source([write(prepared, WORDS)], "lines"), "char", 0.1, 0)
    before = files(corpus.PREPARED)
    (prepared.parent / "texts").mkdir()
    message = refusal(corpus.ensure, str(write(prepared.parent / "texts" / f"{name}.txt", WORDS)), "stream", 0.1, 0)
    assert name in message and files(corpus.PREPARED) == before


@pytest.mark.parametrize("name", ["names", "shakespeare"])
def test_a_text_never_takes_the_name_of_a_set_of_the_project(prepared, name):
    (prepared.parent / "texts").mkdir()
    file = write(prepared.parent / "texts" / f"{name}.txt", WORDS)
    assert name in refusal(corpus.ensure, str(file), "stream", 0.1, 0)
    assert not corpus.PREPARED.exists()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a.txt", "a"),
        ("a/b/my novel.txt", "my-novel"),
        ("a.b.txt.gz", "a.b"),
        ("notes", "notes"),
        ("notes/", "notes"),
        (".hidden.txt", "hidden"),
        ("--x.txt", "x"),
        ("王.txt", "王"),
        ("???", "text"),
        ("a/..", None),
    ],
)
def test_a_set_is_called_as_its_file(tmp_path, monkeypatch, path, name):
    monkeypatch.chdir(tmp_path)
    assert corpus.set_name(Path(path)) == (name or tmp_path.name)


# The command line


def test_what_was_prepared_is_told(prepared, call):
    file = write(prepared.with_name("words.txt"), [*WORDS, *WORDS, "", "zoë"])
    status, out, err = call(prepare, file, "--documents", "lines", "--val-fraction", "0.2", "--seed", 3)
    assert (status, err) == (0, "")
    sizes = [len(documents_of(name, "words")) for name in ("train", "val")]
    assert sum(sizes) == 61
    for fact in (
        "a document a line, byte tokens, vocabulary 257",
        "60 duplicates, 1 blank",
        "train with data.name=words",
    ):
        assert fact in out
    for name, size in zip(("train", "val"), sizes, strict=True):
        row = next(line for line in out.splitlines() if line.split()[1] == name).split()
        assert row[2:4] == [str(size), "documents"] and row[-2:] == [str(len(stored(name, "words"))), "tokens"]
    assert (meta("words")["val_fraction"], meta("words")["split_seed"]) == (0.2, 3)


@pytest.mark.parametrize("how", ["lines", "blocks", "files", "field", "text"])
@pytest.mark.parametrize("tokens", KINDS)
def test_every_kind_of_text_is_prepared_with_every_kind_of_tokens(prepared, call, ranks, how, tokens):
    for kind, package in (("bpe", "tokenizers"), ("gpt2", "tiktoken")):
        if tokens.startswith(kind):
            pytest.importorskip(package)
    folder, documents = prepared.with_name("texts"), [f"{word} zoë" for word in WORDS]
    folder.mkdir()
    if how == "files":
        for document in documents:
            (folder / f"{document}.txt").write_text(document, encoding="utf-8")
    else:
        lines = [json.dumps({"body": document}) if how == "field" else document for document in documents]
        (folder / "a.txt").write_text(("\n\n" if how == "blocks" else "\n").join(lines), encoding="utf-8")
    options = {"field": ["--field", "body"], "text": []}.get(how, ["--documents", how])
    options += ["--tokenizer", f"gpt2:{ranks}" if tokens == "gpt2" else tokens]
    assert call(prepare, folder, *options)[0] == 0
    bos = tokenizers.from_dict(meta("texts")["tokenizer"]).bos_id
    found = []
    for name in ("train", "val"):
        ids = stored(name, "texts")
        at = [i for i, token in enumerate(ids) if token == bos]
        tokenizer = tokenizers.from_dict(meta("texts")["tokenizer"])
        found += (
            [tokenizer.decode(ids[a + 1 : b]) for a, b in itertools.pairwise(at)] if at else [tokenizer.decode(ids)]
        )
    assert sorted(found) == documents if how != "text" else "".join(found) == "\n".join(documents)


def test_names_are_prepared_by_name(prepared, call):
    write(prepared, WORDS)
    status, out, _ = call(prepare, "names")
    assert status == 0 and "data.name=names" in out and meta("names")["documents"] == "lines"
    assert corpus.ensure("names", "documents", 0.1, 0) == ("names", meta("names"))


USAGE = [
    ([], ["text"]),
    (["nothing.txt"], ["nothing.txt", "does not exist"]),
    (["empty"], ["empty", "no text files"]),
    (["a.txt", "--documents", "words"], ["words", "lines", "blocks", "files"]),
    (["a.txt", "--documents", "blocks", "--field", "text"], ["--field", "blocks"]),
    (["a.txt", "--field", "text"], ["a.txt, line 1, is no JSON"]),
    (["a.txt", "--documents", "files"], ["split is empty", "1 distinct documents"]),
    (["a.txt", "--val-file", "nothing.txt"], ["nothing.txt", "does not exist"]),
    (["a.txt", "--val-fraction", "0"], ["--val-fraction 0", "above 0"]),
    (["a.txt", "--val-fraction", "1"], ["--val-fraction 1", "at most 0.9"]),
    (["a.txt", "--val-fraction", "some"], ["--val-fraction", "some"]),
    (["a.txt", "--seed", "-1"], ["--seed -1"]),
    (["a.txt", "--name", "a/b"], ["a/b"]),
    (["a.txt", "--name", "../a"], ["../a"]),
    (["a.txt", "--name", ".a"], [".a"]),
    (["a.txt", "--name", "names"], ["names", "--name"]),
    (["a.txt", "--name", "shakespeare"], ["shakespeare", "--name"]),
    (["names.txt"], ["names", "--name"]),
    (["shakespeare.txt"], ["shakespeare", "--name"]),
    (["names", "--name", "shakespeare"], ["shakespeare", "--name"]),
    (["shakespeare", "--from", "a.txt", "--name", "names"], ["names", "--name"]),
    (["a.txt", "--from", "a.txt"], ["--from"]),
    (["shakespeare", "--from", "nothing.txt"], ["--from nothing.txt"]),
    (["a.txt", "--tokenizer", "words"], ["'words'", "bpe:N"]),
    (["a.txt", "--tokenizer", "bpe"], ["'bpe'", "bpe:N"]),
    (["a.txt", "--tokenizer", "bpe:10"], ["'bpe:10'", "257"]),
    (["a.txt", "--tokenizer", "bpe:x"], ["'bpe:x'", "bpe:N"]),
    (["a.txt", "--tokenizer", "bpe:1e9"], ["'bpe:1e9'", "bpe:N"]),
    (["a.txt", "--tokenizer", "byte:3"], ["'byte:3'"]),
    (["a.txt", "--tokenizer", "gpt2:nothing"], ["nothing", "cannot be read"]),
    (["a.txt", "--unknown"], ["--unknown", "--help"]),
]


@pytest.mark.parametrize(("args", "words"), USAGE, ids=lambda value: " ".join(value))
def test_what_cannot_be_prepared_says_why_in_one_line(prepared, call, monkeypatch, args, words):
    monkeypatch.chdir(prepared.parent)
    for name in ("a.txt", "names.txt", "shakespeare.txt"):
        write(prepared.with_name(name), WORDS)
    prepared.with_name("empty").mkdir()
    status, out, err = call(prepare, *args)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert all(word in err for word in words), err
    assert not corpus.PREPARED.exists() or not list(corpus.PREPARED.iterdir())


# Shakespeare

PLAY = ("To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n" * 20).encode()


@pytest.fixture
def download(monkeypatch):
    """download(answer): what the project's only download gets, bytes or an exception; PLAY is the text it expects."""
    monkeypatch.setattr(prepare, "SHAKESPEARE_SHA256", hashlib.sha256(PLAY).hexdigest())

    def download(answer) -> None:
        def urlopen(address, **options):
            assert address == prepare.SHAKESPEARE and options["timeout"] > 0
            if isinstance(answer, Exception):
                raise answer
            return answer if isinstance(answer, io.IOBase) else io.BytesIO(answer)

        monkeypatch.setattr(urllib.request, "urlopen", urlopen)

    return download


def test_shakespeare_is_downloaded_and_is_one_plain_text(prepared, call, download):
    download(PLAY)
    status, out, err = call(prepare, "shakespeare")
    assert (status, err) == (0, "") and "train with data.name=shakespeare" in out
    assert text_of("train", "shakespeare") + text_of("val", "shakespeare") == PLAY.decode()
    assert len(text_of("val", "shakespeare")) == len(PLAY) - 9 * len(PLAY) // 10
    assert meta("shakespeare")["tokenizer"]["type"] == "char"
    assert corpus.ensure("shakespeare", "stream", 0.1, 0) == ("shakespeare", meta("shakespeare"))


def test_a_local_copy_of_shakespeare_needs_no_download(prepared, call, download):
    download(urllib.error.URLError("offline"))
    prepared.write_bytes(PLAY)
    status, _, err = call(prepare, "shakespeare", "--from", prepared)
    assert (status, err) == (0, "")
    assert text_of("train", "shakespeare") + text_of("val", "shakespeare") == PLAY.decode()
    # another edition may be what the user wants: it is said
    prepared.write_bytes(PLAY + b"Exit.\n")
    status, _, err = call(prepare, "shakespeare", "--from", prepared)
    assert status == 0 and str(prepared) in err and "SHA-256 differs" in err and len(err.splitlines()) == 1


class Cut(io.BytesIO):
    """A connection that ends too early."""

    def read(self, *args):
        raise http.client.IncompleteRead(b"To be", 1000)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (urllib.error.URLError("Name or service not known"), ["Name or service not known", "--from FILE"]),
        (urllib.error.HTTPError(prepare.SHAKESPEARE, 404, "Not Found", {}, None), ["Not Found", "--from FILE"]),
        (TimeoutError("timed out"), ["timed out", "--from FILE"]),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset"), ["Connection reset", "--from FILE"]),
        (Cut(), ["--from FILE"]),
        (PLAY[:-1], ["SHA-256", hashlib.sha256(PLAY).hexdigest()]),
        (b"", ["SHA-256", hashlib.sha256(PLAY).hexdigest()]),
    ],
    ids=["offline", "not found", "slow", "reset", "cut", "one byte less", "empty"],
)
def test_a_download_that_fails_says_so_in_one_line_and_leaves_nothing(prepared, call, download, answer, words):
    download(answer)
    status, out, err = call(prepare, "shakespeare")
    assert (status, out) == (2, "") and len(err.splitlines()) == 1 and all(word in err for word in words)
    assert not corpus.PREPARED.exists()
