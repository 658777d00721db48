"""Documents to splits and token files, and the set that data.name means."""

import errno
import itertools
import os
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import (
    REPEATABLE,
    ROOT,
    WORDS,
    chunks_of,
    documents_of,
    files,
    files_of_at_most,
    meta,
    refusal,
    skip_without_the_package_of,
    stored,
    text_of,
    write,
)
from hypothesis import given
from hypothesis import strategies as st

import corpus
import tokenizer as tokenizers
from corpus import Source
from errors import Interrupted, RunError, UsageError


def prepare_lines(file: Path, tokens: str = "byte", val_fraction: float = 0.3, seed: int = 0) -> dict:
    return corpus.prepare("mine", Source([file], "lines"), tokens, val_fraction, seed)


@contextmanager
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


# One plain text


@pytest.mark.parametrize(("val_fraction", "cut"), [(0.5, 50), (0.25, 75)])
def test_another_share_of_a_plain_text_can_be_held_out(prepared, val_fraction, cut):
    prepared.write_text("abcdefghij" * 10)
    corpus.prepare("mine", Source([prepared]), "char", val_fraction, 0)
    assert len(text_of("train")) == cut and len(text_of("val")) == 100 - cut


@pytest.mark.parametrize("length", [0, 1, 2, 10])
def test_a_plain_text_too_short_for_two_splits_is_refused_with_its_length(prepared, length):
    prepared.write_text("abcdefghijklmnopqrst"[:length])
    message = refusal(corpus.prepare, "mine", Source([prepared]), "byte", 0.1, 0)
    assert "no text" in message if not length else f"{length} characters in all" in message


TEXTS = {
    "short": "the thing ÿ 王🙂\n\nthere, ",
    "words": "the thing that the author thinks of\nis there; don't  say\n\n\nso, \t or 12 34! " * 60,
    "no spaces": "thethingthattheauthorthinksof王🙂isthere" * 60,
    "spaces and a word": "  \n \n\n\t" * 200 + "word" + " \n" * 200,
    "one space": "a" * 3000 + " " + "b" * 3000,
    "odd spaces": "a\u00a0b\u2003c\u3000d\x1ce\x85f\u200bg \u0301h '\u2028s 'll\r\n" * 60,
}


@pytest.mark.parametrize("tokens", ["char", "char+unk", "byte", "bpe:300", "gpt2"])
@pytest.mark.parametrize("text", TEXTS)
def test_the_last_tenth_of_a_plain_text_is_held_out_in_chunks_of_any_size(prepared, ranks, text, tokens):
    skip_without_the_package_of(tokens)
    prepared.write_bytes(TEXTS[text].encode())
    kind, found = f"gpt2:{ranks}" if tokens == "gpt2" else tokens, []
    for chunk in (1 << 20, 13, 1000):
        with chunks_of(chunk):
            splits = corpus.prepare("mine", Source([prepared]), kind, 0.1, 0)["splits"]
        found.append(files(corpus.PREPARED))
    assert found[0] == found[1] == found[2]
    # and the tokens are those of each part in one piece
    tokenizer, whole = tokenizers.from_dict(meta()["tokenizer"]), TEXTS[text].replace("\r\n", "\n")
    cut = 9 * len(whole) // 10
    for name, part in (("train", whole[:cut]), ("val", whole[cut:])):
        ids = stored(name)
        assert ids == tokenizer.encode(part) and text_of(name) == part
        counts = {"documents": 0, "characters": len(part), "bytes": len(part.encode()), "tokens": len(ids)}
        assert splits[name] == counts
        assert max(ids) < tokenizer.bos_id  # no separator: what follows it would be no text


# A set on the disk


MOMENTS = [(corpus._Split, "write"), (Path, "write_text"), (Path, "rename"), (Path, "mkdir"), (os, "chmod")]
MOMENTS += [(corpus.tempfile, "mkdtemp")]


@pytest.mark.parametrize(("owner", "name"), MOMENTS)
@pytest.mark.parametrize("how", ["lines", None])
@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    "stop", [OSError(errno.ENOSPC, "No space left on device"), Interrupted("terminated", 143)], ids=["full", "stopped"]
)
def test_a_preparation_that_ends_at_any_moment_leaves_what_was_there_and_nothing_else(
    prepared, stop, existing, how, owner, name
):
    def again():
        return corpus.prepare("mine", Source([prepared], how), "byte", 0.3, 0)

    def happens():
        raise stop

    write(prepared, WORDS)
    if existing:
        again()
    write(prepared, WORDS[:30])
    before = files(prepared.parent)
    for nth in itertools.count(1):
        with at_call(nth, owner, name, happens) as calls:
            try:
                again()
            except (RunError, Interrupted) as error:
                message = str(error)
        if len(calls) < nth:
            break  # it is not called that often, so nothing happened
        assert message == "terminated" or ("mine" in message and "No space left on device" in message)
        assert files(prepared.parent) == before
        assert not corpus.PREPARED.exists() or [path.name for path in corpus.PREPARED.iterdir()] == ["mine"] * existing
    assert nth > 1 and [path.name for path in corpus.PREPARED.iterdir()] == ["mine"]
    assert set(files(corpus.PREPARED / "mine")) == {"meta.json", "train.bin", "val.bin"}
    assert len(stored("train")) + len(stored("val")) == 4 * 30 + (2 if how else 0)


def test_a_disk_that_is_full_is_said_in_one_line(prepared):
    prepared.write_text("some text\n" * 10_000)
    with files_of_at_most(20_000), pytest.raises(RunError, match=r"mine could not be written: File too large"):
        corpus.prepare("mine", Source([prepared]), "byte", 0.1, 0)
    assert not list(corpus.PREPARED.iterdir())


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
def test_a_text_never_takes_the_name_of_a_set_of_the_project_or_of_one_prepared_by_hand(prepared, name):
    if name == "novel":
        corpus.prepare(name, Source([write(prepared, WORDS)], "lines"), "char", 0.1, 0)
    before = files(corpus.PREPARED)
    (prepared.parent / "texts").mkdir()
    message = refusal(corpus.ensure, str(write(prepared.parent / "texts" / f"{name}.txt", WORDS)), "stream", 0.1, 0)
    assert name in message and files(corpus.PREPARED) == before


CALLED = {"a.txt": "a", "a/b/my novel.txt": "my-novel", "a.b.txt.gz": "a.b", "notes": "notes", "notes/": "notes"}
CALLED |= {".hidden.txt": "hidden", "--x.txt": "x", "王.txt": "王", "???": "text", "a/..": None}


@pytest.mark.parametrize(("path", "name"), CALLED.items())
def test_a_set_is_called_as_its_file(tmp_path, monkeypatch, path, name):
    monkeypatch.chdir(tmp_path)
    assert corpus.set_name(Path(path)) == (name or tmp_path.name)
