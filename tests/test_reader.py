"""Text files to documents, in pieces of any size."""

import functools
import gzip
import itertools
import json
from pathlib import Path

import pytest
from conftest import REPEATABLE, WORDS, chunks_of, refusal, skip_without_the_package_of, write
from hypothesis import example, given
from hypothesis import strategies as st

import corpus
import reader
import tokenizer as tokenizers
from reader import Source, find_files


def read(*paths: Path, how: str | None = None, field: str | None = None) -> tuple[list[str], int]:
    """(documents, or the pieces of a plain text; how many were blank)"""
    source = Source(list(paths), how, field)
    documents = [document for documents in source.chunks(lambda n: None) for document in documents]
    return documents, source.counts["blank"]


# Files to documents

READINGS = [
    ("lines", "anna\n\n   \nbob\n\n", ["anna", "bob"], 3),
    ("lines", "anna\nbob", ["anna", "bob"], 0),
    ("lines", "anna\r\nbob\r\n\r\n", ["anna", "bob"], 1),
    ("lines", "\ufeffanna\nbob\n", ["anna", "bob"], 0),
    ("lines", "an\u2028na\nb\u0085ob\nc\x0bd\x0ce\rf\n", ["an\u2028na", "b\u0085ob", "c\x0bd\x0ce\rf"], 0),
    ("lines", "zoë \n 王\n", ["zoë ", " 王"], 0),
    ("blocks", "anna\nbob\n\nzoë\n", ["anna\nbob", "zoë"], 0),
    ("blocks", "\n \n anna\nbob \n\t\n\n\n\nzoë", [" anna\nbob ", "zoë"], 0),
    ("blocks", "anna\r\n\r\nbob\r\n \r\n", ["anna", "bob"], 0),
    ("blocks", "anna\n  ", ["anna"], 0),
]


@pytest.mark.parametrize(("how", "text", "documents", "blank"), READINGS)
def test_a_document_is_a_line_or_what_stands_between_blank_lines(tmp_path, how, text, documents, blank):
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read(tmp_path / "a.txt", how=how) == (documents, blank)


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
        assert f"{file} is a damaged gzip file" in refusal(lambda: read(*find_files([tmp_path / "folder"])))


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
    found = find_files([folder])
    assert sorted(str(path.relative_to(folder)) for path in found) == sorted(texts)
    assert find_files([folder / ".hidden", folder / "sub"]) == [
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
    one, other = (read(*find_files([tmp_path / folder]), how="files")[0] for folder in ("one", "other"))
    assert one == other and sorted(one) == sorted(names)


def test_a_folder_without_texts_is_refused_with_its_path(tmp_path):
    assert str(tmp_path) in refusal(find_files, [tmp_path])
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    assert str(tmp_path) in refusal(find_files, [tmp_path])
    assert "nothing" in refusal(find_files, [tmp_path / "nothing"])


# Where BPE tokens cannot be cut


# tokens of every kind that a cut in the wrong place would break
MERGES = [b"  ", b"\n\n", b" a", b"a ", b"\na", b"a\n", b" \n", "é".encode()]


@functools.cache
def with_merges() -> list[tokenizers.Tokenizer]:
    for kind in ("bpe", "gpt2"):
        skip_without_the_package_of(kind)
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
