"""data/prepare.py: what it prints, writes and refuses."""

import errno
import hashlib
import http.client
import io
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from conftest import (
    ROOT,
    WORDS,
    chunks_of,
    documents_of,
    files,
    meta,
    skip_without_the_package_of,
    stored,
    text_of,
    write,
)

import corpus
from corpus import Source
from data import prepare


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
@pytest.mark.parametrize("tokens", ["char", "char+unk", "byte", "bpe:300", "gpt2"])
def test_every_kind_of_text_is_prepared_with_every_kind_of_tokens(prepared, call, ranks, how, tokens):
    skip_without_the_package_of(tokens)
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
    if how == "text":
        assert text_of("train", "texts") + text_of("val", "texts") == "\n".join(documents)
    else:
        assert sorted(documents_of("train", "texts") + documents_of("val", "texts")) == documents


def test_names_are_prepared_by_name(prepared, call):
    write(prepared, WORDS)
    status, out, _ = call(prepare, "names")
    assert status == 0 and "data.name=names" in out and meta("names")["documents"] == "lines"
    assert corpus.ensure("names", "documents", 0.1, 0) == ("names", meta("names"))


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
