"""Text files to prepared sets: read, cut into documents, deduplicated, split into training and validation, encoded.

data/prepared/<name>/ holds train.bin, val.bin (token ids) and meta.json (tokenizer, stored type, counts, settings,
fingerprint). Documents stand one after the other with the separator BOS before, between and after,

    BOS e m m a BOS o l i v i a BOS

and a plain text stands as it is, its last tenth being the validation split.
"""

import bisect
import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tokenizer as tokenizers
from errors import RunError, UsageError
from log import progress
from reader import Source, at_word_borders, find_files
from tokenizer import Tokenizer

DATA = Path(__file__).resolve().parent / "data"
PREPARED = DATA / "prepared"
EMBEDDED = {"names": DATA / "names.txt"}  # sets whose text the project has: one name a line
FORMAT = 1


class _Split:
    """train.bin or val.bin while it is written."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer, stored: np.dtype):
        self.file = open(folder / f"{name}.bin", "wb")  # noqa: SIM115
        self.tokenizer, self.stored = tokenizer, stored
        self.sha256 = hashlib.sha256()
        self.counts = {"documents": 0, "characters": 0, "bytes": 0, "tokens": 0}

    def write(self, ids: np.ndarray, text: str, documents: int = 0) -> None:
        data = ids.astype(self.stored).tobytes()
        self.sha256.update(data)
        self.file.write(data)
        for key, n in (("documents", documents), ("characters", len(text)), ("bytes", len(text.encode()))):
            self.counts[key] += n
        self.counts["tokens"] += len(ids)

    def add_text(self, text: str) -> None:
        self.write(self.tokenizer.encode_array(text), text)

    def add_documents(self, documents: list[str]) -> None:
        if not self.counts["tokens"]:
            self.write(np.array([self.tokenizer.bos_id]), "")
        self.write(self.tokenizer.encode_documents(documents), "".join(documents), len(documents))


def prepare(
    name: str,
    source: Source,
    tokens: str,
    val_fraction: float,
    split_seed: int,
    val_source: Source | None = None,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write data/prepared/<name>/ and return its meta, with `extra` in it.

    tokens: char, char+unk, byte, bpe:N or gpt2[:FILE] (see tokenizer.py). With val_source that is the validation split.
    The folder is made aside and renamed: nothing half-written ever stands under the final name.
    Raises UsageError for texts or settings that do not work, RunError where the folder cannot be written.
    """
    if not re.fullmatch(r"\w[\w.-]{0,99}", name):
        raise UsageError(f"{name[:100]!r} cannot be the name of a set: use letters, digits, '-', '_' and '.'")
    everything = [source] + ([val_source] if val_source else [])
    if val_source and (both := {f.resolve() for f in source.files} & {f.resolve() for f in val_source.files}):
        raise UsageError(f"{min(both)} is both the training and the validation text: hold out another one")
    if any(PREPARED in file.resolve().parents for each in everything for file in each.files):
        raise UsageError(f"the folder has {PREPARED} inside, where sets are written: give the text a folder of its own")
    with_alphabet = tokens.startswith("char")
    n_characters, alphabet = _survey(everything, with_alphabet) if with_alphabet or not source.documents else (0, "")
    tokenizer = _make_tokenizer(tokens, alphabet, source)
    stored = np.min_scalar_type(tokenizer.vocab_size - 1)
    meta: dict[str, Any] = {
        "format": FORMAT,
        "documents": source.documents,
        "tokenizer": tokenizer.to_dict(),
        "dtype": stored.name,
        "val_fraction": None if val_source else val_fraction,
        "split_seed": split_seed,
        "duplicates": 0,
        **(extra or {}),
    }
    try:
        PREPARED.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=PREPARED, ignore_cleanup_errors=True) as aside:
            train, val = (_Split(Path(aside), split, tokenizer, stored) for split in ("train", "val"))
            with train.file, val.file, progress(sum(s.size for s in everything), "B", "writing") as bar:
                if source.documents is None:
                    cut = n_characters if val_source else int(n_characters * (1 - val_fraction))
                    _write_text(source, cut, train, val, bar.update)
                    if val_source:
                        _write_text(val_source, 0, train, val, bar.update)
                else:
                    bound = b"" if val_source else int(val_fraction * 2**128).to_bytes(16, "big")
                    meta["duplicates"] = _write_documents(source, val_source, bound, split_seed, train, val, bar.update)
            if not train.counts["characters"] + val.counts["characters"]:
                raise UsageError(f"{', '.join(map(str, source.files))[:200]} has no text: everything is blank")
            for split, what in ((train, "training"), (val, "validation")):
                if split.counts["tokens"] < 2:
                    raise UsageError(f"the {what} split is empty: {_amount(source, train, val)}; give more text")
            if tokenizer.vocab_size <= 2:
                raise UsageError(f"the text has only the character {alphabet!r}: there is nothing to learn")
            meta["blank"] = sum(s.counts["blank"] for s in everything)
            meta["splits"] = {"train": train.counts, "val": val.counts}
            digests = train.sha256.digest() + val.sha256.digest()
            about = json.dumps([meta["tokenizer"], meta["documents"]]).encode()
            meta["fingerprint"] = hashlib.sha256(digests + about).hexdigest()
            (Path(aside) / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
            _replace_folder(Path(aside), PREPARED / name)
    except OSError as error:
        raise RunError(f"{PREPARED / name} could not be written: {error.strerror or error}") from None
    return meta


def _amount(source: Source, train: _Split, val: _Split) -> str:
    if source.documents is None:
        return f"{train.counts['characters'] + val.counts['characters']} characters in all"
    return f"{train.counts['documents'] + val.counts['documents']} distinct documents in all"


def _survey(sources: list[Source], with_alphabet: bool) -> tuple[int, str]:
    """(number of characters, the distinct ones if asked for) of all documents, in a first reading."""
    seen, count, blank = np.zeros(0x110000, dtype=np.bool_), 0, True
    with progress(sum(source.size for source in sources), "B", "reading") as bar:
        for source in sources:
            for texts in source.chunks(bar.update):
                count += sum(map(len, texts))
                blank = blank and all(text.isspace() or not text for text in texts)
                if with_alphabet:
                    seen[np.frombuffer("".join(texts).encode("utf-32-le"), dtype="<u4")] = True
    if blank:
        raise UsageError(f"{', '.join(map(str, sources[0].files))[:200]} has no text: everything is blank")
    return count, "".join(map(chr, np.flatnonzero(seen).tolist()))


def _make_tokenizer(tokens: str, alphabet: str, source: Source) -> Tokenizer:
    kind, _, argument = tokens.partition(":")
    if tokens in ("char", "char+unk"):
        return tokenizers.char(alphabet, unknown=tokens == "char+unk")
    if tokens == "byte":
        return tokenizers.byte()
    if kind == "bpe" and argument.isdecimal() and 257 <= int(argument) <= 1_000_000:
        with progress(source.size, "B", "learning the tokens") as bar:
            pieces = (text for texts in source.chunks(bar.update) for text in texts)
            return tokenizers.train_bpe(pieces if source.documents else at_word_borders(pieces), int(argument))
    if kind == "gpt2":
        return tokenizers.gpt2(tokenizers.gpt2_ranks(argument or None))
    raise UsageError(f"tokenizer {tokens!r} is not char, char+unk, byte, bpe:N (257 to 1,000,000) or gpt2")


def _write_text(source: Source, cut: int, train: _Split, val: _Split, advance: Callable[[int], object]) -> None:
    """Up to character `cut` into the training split, from there on into the validation split."""
    pieces = (text for texts in source.chunks(advance) for text in texts)
    for text in pieces if train.tokenizer.data["type"] in ("char", "byte") else at_word_borders(pieces):
        if cut > 0:
            train.add_text(text[:cut])
        if cut < len(text):
            val.add_text(text[max(0, cut) :])
        cut -= len(text)


def _write_documents(
    source: Source,
    val_source: Source | None,
    bound: bytes,
    seed: int,
    train: _Split,
    val: _Split,
    advance: Callable[[int], object],
) -> int:
    """Write the documents, each once, into the split that their hash tells; returns how many duplicates were dropped.

    A document's seeded hash decides everything: equal documents have equal hashes, so none can be in both splits; those
    with a hash below `bound` are held out, so adding documents moves none of the old; and each chunk is written in
    the order of the hashes, since lists are often sorted and neighbours would tell of each other in `stream` mode.
    """
    empty, duplicates = hashlib.blake2b(digest_size=16, salt=seed.to_bytes(8, "little")), 0

    def hash_of(document: str) -> bytes:
        h = empty.copy()
        h.update(document.encode())
        return h.digest()

    seen, seen_val, all_shared, example = set[bytes](), set[bytes](), set[bytes](), ""
    for given, low, mine, others in ((source, bound, seen, seen_val), (val_source, b"\xff" * 17, seen_val, seen)):
        for documents in given.chunks(advance) if given else ():
            hashed = dict(zip(map(hash_of, documents), documents, strict=True))
            if shared := hashed.keys() & others:
                all_shared |= shared
                example = hashed[min(shared)]
            new = sorted([h for h in hashed if h not in mine])
            mine.update(new)
            duplicates += len(documents) - len(new)
            border = bisect.bisect_left(new, low)
            val.add_documents([hashed[h] for h in new[:border]])
            train.add_documents([hashed[h] for h in new[border:]])
    if all_shared:
        raise UsageError(
            f"the validation text shares {len(all_shared)} documents with the training text, such as "
            f"{example[:60]!r}: take them out of one of the two"
        )
    return duplicates


def _replace_folder(new: Path, final: Path) -> None:
    """Give the folder its name; what had the name is deleted then. A training that has it mapped keeps its pages."""
    os.chmod(new, 0o755)  # tempfile makes folders that only their owner can read
    with tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=final.parent) as parked:
        old = Path(parked) / "old"
        if final.exists():
            final.rename(old)
        try:
            new.rename(final)
        except OSError as error:
            raise RunError(f"{final} could not be replaced ({error.strerror}): is it being prepared twice?") from None
        finally:
            if old.exists() and not final.exists():
                old.rename(final)


def read_meta(name: str) -> dict[str, Any]:
    """meta.json of a prepared set; UsageError with the command that makes it where it is missing or damaged."""
    path = PREPARED / name / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        there = ", ".join(sorted({*EMBEDDED, *(meta.parent.name for meta in PREPARED.glob("*/meta.json"))}))
        have = f"give a text file or folder, or one of {there}, or {again(name)}"
        raise UsageError(
            f"data.name={name} is no text and no prepared set ({path}: {error.strerror}): {have}"
        ) from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is damaged: {again(name)}") from None
    if (
        not isinstance(meta, dict)
        or meta.get("format") != FORMAT
        or not {"val_fraction", "split_seed", "documents", "duplicates", "blank"} <= meta.keys()
    ):
        raise UsageError(f"{path} is not of this version of the project: {again(name)}")
    return meta


def again(name: str) -> str:
    """The command that prepares a set, for messages."""
    text = name if name in (*EMBEDDED, "shakespeare") else f"FILE --name {set_name(Path(name))}"
    return f"prepare it with python data/prepare.py {text}"


def ensure(name: str, mode: str, val_fraction: float, split_seed: int) -> tuple[str, dict[str, Any]]:
    """(folder name, meta) of the set that data.name means: a prepared one, an embedded one, or a text of the user's.

    Embedded sets and texts are prepared here where they are not yet, or were with other settings. A text has byte
    tokens; it is one plain text in `stream` mode, and in `documents` mode one document a line, or for a folder, a file.
    Raises UsageError for a set that is missing, or prepared otherwise, and that only the user can prepare.
    """
    wanted: dict[str, Any] = {"val_fraction": val_fraction, "split_seed": split_seed}
    folder, path, found = name, Path(name), _meta_or_none(name)
    if name in EMBEDDED:
        source, tokens = Source([EMBEDDED[name]], "lines"), "char"
    elif (
        not (os.path.exists(path) or found)
        and (moved := _meta_or_none(set_name(path)))
        and wanted.items() <= moved.items()
    ):
        print(f"note: {name} is not there any more; the set prepared from it is used", file=sys.stderr)
        return set_name(path), moved
    elif not os.path.exists(path) or (found and "source" not in found):  # prepared by data/prepare.py, or missing
        meta = read_meta(name)
        for key in ("val_fraction", "split_seed") if meta["documents"] else ("val_fraction",):
            if meta["val_fraction"] is not None and meta[key] != wanted[key]:  # None: a --val-file was given
                had = f"data.{key}={meta[key]}, not {wanted[key]}"
                raise UsageError(f"{PREPARED / name} was prepared with {had}: use that, or prepare it again")
        return name, meta
    else:
        if (folder := set_name(path)) in (*EMBEDDED, "shakespeare"):
            raise UsageError(f"{name} would be prepared as {folder}, which the project has: rename the file")
        found = _meta_or_none(folder)
        if found and "source" not in found:
            raise UsageError(f"{PREPARED / folder} was made by data/prepare.py: use data.name={folder}, or delete it")
        how = None if mode == "stream" else "files" if path.is_dir() else "lines"
        source, tokens = Source(find_files([path]), how), "byte"
        state = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in source.files]
        wanted |= {"source": state, "documents": how}
    if found and {key: found.get(key) for key in wanted} == wanted:
        return folder, found
    extra = {"source": wanted["source"]} if "source" in wanted else None
    return folder, prepare(folder, source, tokens, val_fraction, split_seed, extra=extra)


def _meta_or_none(name: str) -> dict[str, Any] | None:
    with contextlib.suppress(UsageError):
        return read_meta(name)
    return None


def fingerprint(name: str) -> str | None:
    """That of the set of this name, or None where there is none."""
    return (_meta_or_none(name) or {}).get("fingerprint")


def set_name(path: Path) -> str:
    """The name of the set that a file or folder is prepared as: its own, without what does not fit a folder's name."""
    name = path.resolve().name.removesuffix(".gz")
    return re.sub(r"[^\w.-]", "-", Path(name).stem).lstrip(".-") or "text"


def describe(name: str, meta: dict[str, Any]) -> str:
    """What a set holds, in a few lines."""
    vocabulary = tokenizers.from_dict(meta["tokenizer"]).vocab_size
    kind = {"lines": "a document a line", "blocks": "a document a block", "files": "a document a file"}
    lines = [f"data    {name}: {kind.get(meta['documents'], 'one plain text')}, {meta['tokenizer']['type']} tokens, "]
    lines[0] += f"vocabulary {vocabulary:,}"
    for split, c in meta["splits"].items():
        documents = f"{c['documents']:>10,} documents " if meta["documents"] else ""
        lines.append(f"data    {split:<6}{documents}{c['characters']:>13,} characters {c['tokens']:>13,} tokens")
    if meta["documents"]:
        lines.append(f"data    dropped: {meta['duplicates']:,} duplicates, {meta['blank']:,} blank documents")
    return "\n".join(lines)
