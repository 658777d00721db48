"""Text files to documents: reading in pieces, so that a text of any size takes little memory."""

import codecs
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from errors import UsageError

CHUNK = 1 << 18  # bytes read at once: what fits a core's cache is twice as fast as what does not
BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")  # what stands between blocks
BLANK_ENDS = re.compile(r"\A(?:[^\S\n]*\n)+|\n[^\S\n]*\Z|\A\s*\Z")


@dataclass
class Source:
    """Files and how they are cut into documents: lines, blocks, files, or None for one plain text.

    `json_field`: each line is a JSON object, and the document is its field of this name. Reading counts what it skips.
    """

    files: list[Path]
    documents: str | None = None
    json_field: str | None = None
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def chunks(self, advance: Callable[[int], object]) -> Iterator[list[str]]:
        """The documents, or the pieces of a plain text, in lists of about CHUNK bytes; `advance` is told the bytes."""
        self.counts = {"blank": 0}
        if self.documents is None:
            return ([text] for path in self.files for text in read_text(path, advance))
        return (self._not_blank(found) for path in self.files for found in self._documents_of(path, advance))

    def _documents_of(self, path: Path, advance: Callable[[int], object]) -> Iterator[list[str]]:
        if self.documents == "files":
            yield ["".join(read_text(path, advance))]
            return
        left, line = "", 1
        for text in itertools.chain(read_text(path, advance), [None]):
            # all but the last document: the rest of that may be in the next chunk; at the end it is one as well
            left += text or ""
            *found, left = left.split("\n") if self.documents == "lines" else BLANK_LINES.split(left)
            if text is None and left:
                found.append(left)
            if self.documents == "blocks":  # a border can fall into the lines between two blocks
                found = [document for block in found if (document := BLANK_ENDS.sub("", block))]
            if self.json_field:
                line += len(found)
                found = [self._json(text, path, line - len(found) + i) for i, text in enumerate(found) if text.strip()]
            yield found

    def _json(self, text: str, path: Path, line: int) -> str:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}, line {line}, is no JSON: {getattr(error, 'msg', 'too deep')}") from None
        if not isinstance(value, dict) or not isinstance(value.get(self.json_field), str):
            fields = ", ".join(value) if isinstance(value, dict) else "none: it is no object"
            if isinstance(value, dict) and self.json_field in value:
                fields = f"that one is {json.dumps(value[self.json_field])[:40]}"
            raise UsageError(f"{path}, line {line}, has no text in the field {self.json_field!r}; its fields: {fields}")
        if re.search("[\ud800-\udfff]", value[self.json_field]):
            raise UsageError(f"{path}, line {line}, has half a character (a lone surrogate) in its text")
        return value[self.json_field]

    def _not_blank(self, documents: list[str]) -> list[str]:
        kept = [document for document in documents if document and not document.isspace()]
        self.counts["blank"] += len(documents) - len(kept)
        return kept


def find_files(paths: Iterable[Path]) -> list[Path]:
    """The files, and those inside the folders, sorted; of these, hidden ones and those that are no text are left out.

    Raises UsageError for a path that does not exist, and if there is no file.
    """
    files = []
    for path in paths:
        if path.is_file():
            files.append(path)
            continue
        if not path.is_dir():
            raise UsageError(f"{path} {'is neither a file nor a folder' if path.exists() else 'does not exist'}")
        try:
            for inside in sorted(path.rglob("*")):
                hidden = any(part.startswith(".") for part in inside.relative_to(path).parts)
                if not hidden and inside.is_file() and b"\0" not in _first_bytes(inside):
                    files.append(inside)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.filename}: {error.strerror}") from None
    if not files:
        raise UsageError(f"{', '.join(map(str, paths))} has no text files")
    return files


def _first_bytes(path: Path) -> bytes:
    try:
        with open_text(path) as file:
            return file.read(8192)
    except (EOFError, OSError, zlib.error):
        return b""  # damaged: reading it says so


def open_text(path: Path) -> BinaryIO:
    """The bytes of a file, unpacked if it is gzip."""
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if packed else open(path, "rb")  # type: ignore[return-value]


def read_text(path: Path, advance: Callable[[int], object]) -> Iterator[str]:
    """The text of a UTF-8 file in pieces, without byte-order mark, lines ending in "\\n" (and in nothing else).

    Raises UsageError for a file that cannot be read, is not UTF-8 (with the offset), or is no text.
    """
    decoder, offset, held, first = codecs.getincrementaldecoder("utf-8")(), 0, "", True
    try:
        with open_text(path) as file:
            while raw := file.read(CHUNK):
                if b"\0" in raw:
                    raise UsageError(f"{path} is no text: it has a NUL byte at offset {offset + raw.index(0)}")
                pending = len(decoder.getstate()[0])
                text = held + decoder.decode(raw)
                if text and first:
                    text, first = text.removeprefix("\ufeff"), False
                offset += len(raw)
                advance(len(raw))
                held = "\r" if text.endswith("\r") else ""  # the "\n" may come next
                text = text.removesuffix(held)
                yield text.replace("\r\n", "\n") if "\r" in text else text
            pending = len(decoder.getstate()[0])
            yield held + decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        at = offset - pending + error.start
        raise UsageError(
            f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at offset {at}; "
            f"convert it first, such as with iconv -f latin1 -t utf-8"
        ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path} is a damaged gzip file: {error}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def at_word_borders(pieces: Iterable[str]) -> Iterator[str]:
    """The same text, cut only before a space or line end between two words, where no BPE token can stand across."""
    left = ""
    for piece in pieces:
        left += piece
        borders = [m.start() for m in re.finditer(r"(?<=\S)[ \n](?=\S)", left[-10_000:])]
        if borders:
            at = max(0, len(left) - 10_000) + borders[-1]
            yield left[:at]
            left = left[at:]
    yield left
