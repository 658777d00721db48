"""Text to tokens and back, for every kind of tokenizer."""

import base64
import functools
import json
import sys

import numpy as np
import pytest
from conftest import refusal
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tokenizer as tokenizers

REPEATABLE = settings(deadline=None, derandomize=True, max_examples=60)
TEXT = "the thing that the author thinks of is then there; l'été à Zürich 王王 🙂🙂, don't\n\n  they say " * 3
RANKS = [bytes([b]) for b in range(256)]  # and some merges, each of two pieces before it
RANKS += [b"th", b"the", b" the", b"in", b"ing", "é".encode(), b"\xf0\x9f", b"ab", b"abab", b"\n\n", b"  "]
CHARACTERS = st.characters(exclude_categories=["Cs"])  # all of Unicode; surrogates are halves of characters
anything = st.text(CHARACTERS)


@functools.cache
def bpe() -> tokenizers.Tokenizer:
    pytest.importorskip("tokenizers")
    return tokenizers.train_bpe([TEXT], 300)


@functools.cache
def gpt2() -> tokenizers.Tokenizer:
    pytest.importorskip("tiktoken")
    return tokenizers.gpt2(RANKS)


KINDS = {
    "char": lambda text: tokenizers.char(text + "ab"),
    "char+unk": lambda text: tokenizers.char(text + "ab", unknown=True),
    "byte": lambda text: tokenizers.byte(),
    "bpe": lambda text: bpe(),
    "gpt2": lambda text: gpt2(),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


# There and back


@every_kind
@REPEATABLE
@given(anything)
@example("<bos><|endoftext|><unk></s>[BOS]")
@example("  \n\n \r\n\t the  thing's é́ 王🙂👩‍👩‍👧 \x00\ufeff\u2028\U0010ffff")
@example(TEXT)
def test_a_text_is_its_own_again_and_no_text_has_the_separator_in_it(kind, text):
    tokens = KINDS[kind](text)
    ids = tokens.encode(text)
    assert tokens.bos_id == tokens.vocab_size - 1 and all(0 <= i < tokens.bos_id for i in ids)
    assert tokens.decode(ids) == tokens.decode([tokens.bos_id, *ids, tokens.bos_id]) == text


@every_kind
@REPEATABLE
@given(anything)
@example(TEXT)
def test_a_tokenizer_is_the_same_after_a_way_through_json(kind, text):
    tokens = KINDS[kind](text)
    again = tokenizers.from_dict(json.loads(json.dumps(tokens.to_dict())))
    assert again.encode(text) == tokens.encode(text) and again.decode(again.encode(text)) == text
    assert (again.vocab_size, again.to_dict()) == (tokens.vocab_size, tokens.to_dict())


@every_kind
@REPEATABLE
@given(st.lists(anything))
@example([])
@example(["", "the", "", "zoë 王🙂"])
def test_documents_together_are_each_document_with_a_separator_after_it(kind, documents):
    tokens = KINDS[kind]("".join(documents))
    expected = [i for document in documents for i in (*tokens.encode(document), tokens.bos_id)]
    ids = tokens.encode_documents(documents)
    assert ids.tolist() == expected and np.issubdtype(ids.dtype, np.integer)


@every_kind
@REPEATABLE
@given(anything)
@example("é王🙂👩‍👩‍👧 don't")
def test_a_text_that_comes_token_by_token_never_shows_half_a_character(kind, text):
    tokens = KINDS[kind](text)
    ids = tokens.encode(text)
    shown = [tokens.decode(ids[:n]) for n in range(len(ids) + 1)]
    assert shown[-1] == text and all(text.startswith(part) for part in shown)


@pytest.mark.parametrize("kind", ["byte", "bpe", "gpt2"])
@REPEATABLE
@given(st.lists(st.integers(0, 255)))
@example([0xE4, 0xB8, 0x41, 0xF0, 0x9F, 0xED, 0xA0, 0x80, 0xC0, 0xC3, 0xA9, 0xFF])
def test_whatever_a_model_draws_what_was_shown_of_it_stays(kind, drawn):
    tokens = KINDS[kind]("")
    ids = [i % tokens.vocab_size for i in drawn]
    for n in range(len(ids)):
        assert tokens.decode(ids[: n + 1]).startswith(tokens.decode(ids[:n]))


# The kinds


def test_characters_have_their_ids_in_the_order_of_their_codes():
    tokens = tokenizers.char("ban王aé")
    assert tokens.encode("abné王") == [0, 1, 2, 3, 4] and (tokens.bos_id, tokens.vocab_size) == (5, 6)


@REPEATABLE
@given(anything)
@example("c\x00\U0010ffffe")
def test_all_unknown_characters_have_one_id_where_that_was_asked_for(text):
    tokens = tokenizers.char("bdf", unknown=True)
    assert tokens.encode(text) == ["bdf".index(c) if c in "bdf" else 3 for c in text]
    assert tokens.bos_id == 4
    assert tokens.decode(tokens.encode("bxd")) == "b<unk>d"


def test_unknown_characters_are_refused_by_name_with_the_known_ones():
    message = refusal(tokenizers.char("cab").encode, "aé\nb1")
    assert "'\\n', '1', 'é'" in message and "'abc'" in message
    many = "".join(map(chr, range(0x4E00, 0x5E00)))
    assert len(refusal(tokenizers.char(many).encode, many.translate({ord(c): ord(c) + 0x3000 for c in many}))) < 500


@pytest.mark.parametrize("text", ["a\udcff", "\ud83d", "\ud83d\ude42"])
@every_kind
def test_a_text_with_bytes_that_are_not_utf8_is_refused(kind, text):
    assert repr(text) in refusal(KINDS[kind]("").encode, text)


@REPEATABLE
@given(anything)
def test_bytes_are_those_of_utf8(text):
    assert tokenizers.byte().encode(text) == list(text.encode()) and tokenizers.byte().vocab_size == 257


@REPEATABLE
@given(anything)
@example(TEXT)
@example("the   thing\n\n\n  that's\t\tthere \r\n")
def test_bpe_has_the_ids_of_the_tokenizers_library(text):
    library = pytest.importorskip("tokenizers").ByteLevelBPETokenizer()
    library.train_from_iterator([TEXT], vocab_size=299, min_frequency=0, show_progress=False)
    assert bpe().encode(text) == library.encode(text).ids
    assert bpe().vocab_size == 300 and len(bpe().encode(TEXT)) < len(TEXT.encode()) / 2


def test_bpe_learned_twice_is_the_same():
    pytest.importorskip("tokenizers")
    assert tokenizers.train_bpe([TEXT], 290).to_dict() == tokenizers.train_bpe([TEXT], 290).to_dict()
    # a text with fewer pairs than asked for has fewer tokens
    assert tokenizers.train_bpe(["ab"], 300).vocab_size == 258


@REPEATABLE
@given(anything)
@example(TEXT)
@example("the   thing\n\n\n  that's\t\tthere abababab \r\n")
def test_gpt2_has_the_ids_of_tiktoken(text):
    tiktoken = pytest.importorskip("tiktoken")
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = {piece: rank for rank, piece in enumerate(RANKS)}
    library = tiktoken.Encoding("x", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 267})
    assert gpt2().encode(text) == library.encode_ordinary(text)
    assert gpt2().bos_id == 267 == len(RANKS)


def test_gpt2_joins_the_pair_of_the_lowest_rank_first():
    name = {piece: rank for rank, piece in enumerate(RANKS)}
    assert gpt2().encode("the the") == [name[b"the"], name[b" the"]]
    assert gpt2().encode("ababab") == [name[b"abab"], name[b"ab"]]
    assert gpt2().encode("thing") == [name[b"th"], name[b"ing"]]


# GPT-2's ranks


def rank_lines(pieces=RANKS) -> list[str]:
    """A file of ranks as tiktoken has it, line by line."""
    return [f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces)]


def test_ranks_are_read_from_a_file_in_any_order(tmp_path):
    file = tmp_path / "gpt2.tiktoken"
    file.write_text("".join(reversed(rank_lines())) + "\n")
    assert tokenizers.gpt2_ranks(str(file)) == RANKS


SINGLE = rank_lines(RANKS[:256])
DAMAGED_RANKS = {
    "empty": "",
    "something else": "the thing\n",
    "no base64": "".join(SINGLE) + "a 256\n",
    "no rank": "".join(SINGLE) + "aaaa\n",
    "no number": "".join(SINGLE) + "aaaa x\n",
    "one field too many": "".join(SINGLE) + "aaaa 256 1\n",
    "cut": "".join(SINGLE[:200]),
    "one byte missing": "".join(SINGLE[:-1]),
    "one line lost": "".join(line for line in rank_lines() if not line.endswith(" 256\n")),
    "one rank twice": "".join(rank_lines()) + "aaaa 266\n",
    "a rank below zero": "".join(rank_lines()) + "aaaa -1\n",
}


@pytest.mark.parametrize("damage", DAMAGED_RANKS)
def test_a_damaged_file_of_ranks_is_refused_with_its_path(tmp_path, damage):
    (tmp_path / "ranks").write_text(DAMAGED_RANKS[damage])
    assert str(tmp_path / "ranks") in refusal(tokenizers.gpt2_ranks, str(tmp_path / "ranks"))


def test_a_file_of_ranks_that_is_missing_binary_or_a_folder_is_refused_with_its_path(tmp_path):
    assert "nothing" in refusal(tokenizers.gpt2_ranks, str(tmp_path / "nothing"))
    assert str(tmp_path) in refusal(tokenizers.gpt2_ranks, str(tmp_path))
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    assert "binary" in refusal(tokenizers.gpt2_ranks, str(tmp_path / "binary"))


def test_without_a_file_the_ranks_are_those_that_tiktoken_has(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {piece: rank for rank, piece in enumerate(RANKS)}
    library = tiktoken.Encoding(
        "gpt2", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 267}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": library}.get)
    assert tokenizers.gpt2_ranks(None) == RANKS


def test_ranks_that_cannot_be_downloaded_are_refused_with_the_way_out(monkeypatch):
    tiktoken, requests = pytest.importorskip("tiktoken"), pytest.importorskip("requests")

    def fail(name):
        raise requests.exceptions.ConnectionError("no route to host\nand more")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    message = refusal(tokenizers.gpt2_ranks, None)
    assert "no route to host" in message and "gpt2:FILE" in message


# What cannot be used


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("tokenizers", lambda: tokenizers.train_bpe(["text"], 300)),
        ("tokenizers", lambda: tokenizers.from_dict({"type": "bpe", "model": "{}"})),
        ("tiktoken", lambda: tokenizers.gpt2_ranks(None)),
        ("tiktoken", lambda: tokenizers.from_dict({"type": "gpt2", "ranks": []})),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch, package, use):
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails from here on
    message = refusal(use)
    assert package in message and "pip install -r requirements-extra.txt" in message


@pytest.mark.parametrize(
    "data",
    [
        None,
        "byte",
        {},
        {"type": "words"},
        {"type": ["char"]},
        {"type": "char", "characters": 3, "unknown": False},
        {"type": "char", "characters": "ab"},
        {"type": "char", "characters": "a\ud800", "unknown": False},
        {"type": "bpe"},
        {"type": "bpe", "model": 3},
        {"type": "bpe", "model": "{"},
        {"type": "gpt2"},
        {"type": "gpt2", "ranks": ["!"]},
        {"type": "gpt2", "ranks": ["YQ"]},
        {"type": "gpt2", "ranks": ["YQ=="]},
        {"type": "gpt2", "ranks": []},
    ],
    ids=str,
)
def test_a_description_of_no_tokenizer_is_refused(data):
    for package in ("tokenizers", "tiktoken"):
        pytest.importorskip(package)
    with pytest.raises(ValueError):
        tokenizers.from_dict(data)
