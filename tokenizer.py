"""Text to token ids and back. A tokenizer is data: `to_dict` goes into meta.json and into every checkpoint.

The separator BOS is always the last id. It stands before and after every document: it starts a text when sampling, and
drawing it ends one. It is part of no text, so nothing that anyone writes encodes to it.
"""

import base64
import binascii
import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from errors import UsageError

UNKNOWN = b"<unk>"
EXTRA = "pip install -r requirements-extra.txt"
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # (Radford et al. 2019, 2.2)


@dataclass
class Tokenizer:
    """One of the kinds below: what each id stands for, and how a text is cut into them."""

    pieces: Sequence[bytes]  # of every id but BOS
    encode_array: Callable[[str], np.ndarray]  # the ids of a text, without BOS; UsageError if some of it has none
    data: dict[str, Any]

    @property
    def bos_id(self) -> int:
        return len(self.pieces)

    @property
    def vocab_size(self) -> int:
        return len(self.pieces) + 1

    @property
    def sizes(self) -> list[int]:
        """The bytes of each id; BOS counts as one, like the line end that it stands for."""
        return [*map(len, self.pieces), 1]

    @property
    def characters(self) -> list[int]:
        """How many characters begin in the bytes of each id; BOS counts as one."""
        return [*(sum(b & 0xC0 != 0x80 for b in piece) for piece in self.pieces), 1]

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without BOS; UsageError if some of it has none."""
        try:
            text.encode()
            return self.encode_array(text).tolist()
        except UnicodeEncodeError:
            raise UsageError(f"{text!r} cannot be encoded: it has bytes that are not UTF-8") from None

    def encode_documents(self, documents: list[str]) -> np.ndarray:
        """The ids of documents, each followed by BOS."""
        if self.data["type"] in ("char", "byte"):  # a known number of ids each: all in one go is ten times as fast
            sizes = [len(document if self.data["type"] == "char" else document.encode()) for document in documents]
            ids = self.encode_array("".join(documents)).astype(np.int32)
            return np.insert(ids, np.cumsum(sizes, dtype=np.int64), self.bos_id)
        parts = [part for document in documents for part in (self.encode_array(document), [self.bos_id])]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids. A character whose last bytes are still to come is left out, never shown in half."""
        raw = b"".join(self.pieces[i] for i in ids if i != self.bos_id)
        return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)

    def to_dict(self) -> dict[str, Any]:
        return self.data


def char(characters: Iterable[str], unknown: bool = False) -> Tokenizer:
    """One id per character of a fixed alphabet; with `unknown`, one more that stands for all others."""
    alphabet = "".join(sorted(set(characters)))
    codes = np.frombuffer(alphabet.encode("utf-32-le"), dtype="<u4")
    missing = len(alphabet) if unknown else -1
    id_of = np.full(int(codes.max(initial=0)) + 2, missing, dtype=np.int32)  # the last place is for all codes beyond
    id_of[codes] = np.arange(len(alphabet))

    def encode_array(text: str) -> np.ndarray:
        ids = id_of[np.minimum(np.frombuffer(text.encode("utf-32-le"), dtype="<u4"), len(id_of) - 1)]
        if not unknown and ids.min(initial=0) < 0:
            strangers = ", ".join(repr(c) for c in sorted(set(text) - set(alphabet))[:10])
            known = alphabet if len(alphabet) <= 100 else alphabet[:100] + "…"
            raise UsageError(f"{strangers} cannot be encoded: the model knows only the characters {known!r}")
        return ids

    pieces = [c.encode() for c in alphabet] + ([UNKNOWN] if unknown else [])
    return Tokenizer(pieces, encode_array, {"type": "char", "characters": alphabet, "unknown": unknown})


def byte() -> Tokenizer:
    """One id per byte of UTF-8: 256 and BOS, whatever the text."""
    return Tokenizer(
        [bytes([b]) for b in range(256)],
        lambda text: np.frombuffer(text.encode(), dtype=np.uint8),
        {"type": "byte"},
    )


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE (Sennrich et al. 2016, section 3.2) with `vocab_size` ids, BOS among them, learned from texts."""
    try:
        from tokenizers import Tokenizer as HuggingFace
        from tokenizers import models, pre_tokenizers, trainers
    except ImportError:
        raise UsageError(f"bpe tokens need the package tokenizers: {EXTRA}") from None
    learner = HuggingFace(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all bytes: no text is unknown
    learner.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    )
    return bpe(learner.to_str())


def bpe(model: str) -> Tokenizer:
    """The byte-level BPE that the JSON of the tokenizers library describes."""
    try:
        from tokenizers import Tokenizer as HuggingFace
    except ImportError:
        raise UsageError(f"bpe tokens need the package tokenizers: {EXTRA}") from None
    try:
        encoder = HuggingFace.from_str(model)
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"damaged bpe tokenizer: {error}") from None
    # the library writes each byte as a printable character: itself, or from U+0100 on for the bytes that are not
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    byte_of = {chr(b): b for b in printable}
    byte_of |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in printable)}
    names = sorted(encoder.get_vocab().items(), key=lambda item: item[1])
    pieces = [bytes(byte_of[c] for c in name) for name, _ in names]
    return Tokenizer(
        pieces, lambda text: np.array(encoder.encode(text).ids, dtype=np.int64), {"type": "bpe", "model": model}
    )


def gpt2(ranks: Sequence[bytes]) -> Tokenizer:
    """GPT-2's BPE from its pieces in the order of their ranks (= ids)."""
    try:
        import tiktoken
    except ImportError:
        raise UsageError(f"gpt2 tokens need the package tiktoken: {EXTRA}") from None
    rank_of = {piece: rank for rank, piece in enumerate(ranks)}
    if len({piece for piece in ranks if len(piece) == 1}) < 256 or len(rank_of) < len(ranks):
        raise ValueError("damaged gpt2 tokenizer: its ranks are not complete")
    encoder = tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=rank_of, special_tokens={})
    data = {"type": "gpt2", "ranks": [base64.b64encode(piece).decode() for piece in ranks]}
    return Tokenizer(ranks, lambda text: np.array(encoder.encode_ordinary(text), dtype=np.int64), data)


def gpt2_ranks(file: str | None) -> list[bytes]:
    """GPT-2's pieces from a local file of tiktoken's format, or by tiktoken, which downloads them once.

    Raises UsageError where that is not possible.
    """
    if file is None:
        try:
            import tiktoken

            encoder = tiktoken.get_encoding("gpt2")
            return [encoder.decode_single_token_bytes(i) for i in range(encoder.n_vocab - 1)]
        except ImportError:
            raise UsageError(f"gpt2 tokens need the package tiktoken: {EXTRA}") from None
        except OSError as error:  # all of the errors of its downloads are OSErrors
            reason = str(error).split("\n")[0][:200]
            raise UsageError(f"GPT-2's ranks could not be downloaded ({reason}): give them as gpt2:FILE") from None
    try:
        lines = [line.split() for line in Path(file).read_bytes().splitlines() if line.strip()]
        rank_of = {int(rank): base64.b64decode(piece, validate=True) for piece, rank in lines}
        ranks = [rank_of[i] for i in range(len(lines))]
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, IndexError, KeyError, binascii.Error):
        raise UsageError(f"{file} is no file of ranks: each line must be a base64 piece and its rank") from None
    if missing := 256 - len({piece for piece in ranks if len(piece) == 1}):
        raise UsageError(f"{file} is no complete file of ranks: {missing} of the 256 single bytes are missing")
    return ranks


def from_dict(data: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `to_dict` described; ValueError if it is none of this project's."""
    try:
        return {
            "char": lambda: char(data["characters"], data["unknown"]),
            "byte": byte,
            "bpe": lambda: bpe(data["model"]),
            "gpt2": lambda: gpt2([base64.b64decode(piece, validate=True) for piece in data["ranks"]]),
        }[data["type"]]()
    except (KeyError, TypeError, AttributeError, UnicodeEncodeError):
        raise ValueError(f"unknown tokenizer {str(data)[:80]}") from None
