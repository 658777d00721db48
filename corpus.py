"""Text files to prepared sets: documents, deduplicated, split into training and validation, written as token files.

data/prepared/<name>/ holds train.bin, val.bin (token ids) and meta.json (tokenizer, stored type, counts, settings,
fingerprint). The documents of a split stand one after the other with the separator BOS before, between and after:

    BOS e m m a BOS o l i v i a BOS
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from errors import UsageError
from tokenizer import CharTokenizer

DATA = Path(__file__).resolve().parent / "data"
PREPARED = DATA / "prepared"
EMBEDDED = {"names": DATA / "names.txt"}  # sets that need no text from the user
FORMAT = 1


def read_documents(path: Path) -> tuple[list[str], int]:
    """The documents of a file with one a line, and how many blank lines were skipped.

    Lines end at "\\n" or "\\r\\n" alone: U+2028, U+0085 and their like are characters of a document.
    Raises UsageError if the file cannot be read, is not UTF-8 or has no document.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}; "
            f"convert it first, such as with iconv -f latin1 -t utf-8"
        ) from None
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    documents = [line for line in lines if line.strip()]
    if not documents:
        raise UsageError(f"{path} has no documents: all of its {len(lines)} lines are blank")
    return documents, len(lines) - len(documents)


def split(documents: list[str], val_fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """(training, validation): without duplicates, in an order that is random but fixed by the seed.

    Each document's seeded hash decides everything: equal documents have equal hashes, so no document can be in both
    splits; it is below val_fraction for the held-out ones, so adding documents moves none of the old; and
    sorting by it shuffles, since lists are often sorted and neighbours would tell of each other in `stream` mode.
    """
    salt = seed.to_bytes(8, "little")
    hashed = {hashlib.blake2b(doc.encode(), digest_size=16, salt=salt).digest(): doc for doc in documents}
    bound = int(val_fraction * 2**128).to_bytes(16, "big")
    train = [hashed[h] for h in sorted(hashed) if h >= bound]
    val = [hashed[h] for h in sorted(hashed) if h < bound]
    for name, part in (("training", train), ("validation", val)):
        if not part:
            raise UsageError(
                f"the {name} split is empty: {len(hashed)} distinct documents with val_fraction={val_fraction}; "
                f"give more documents or another val_fraction"
            )
    return train, val


def prepare(name: str, val_fraction: float, split_seed: int) -> dict[str, Any]:
    """Write data/prepared/<name>/ from the text of an embedded set and return its meta.

    The folder is made aside and renamed, so that nothing half-written ever stands under the final name.
    Raises UsageError for a name that is no embedded set.
    """
    if name not in EMBEDDED:
        raise UsageError(f"{name!r} is no data set of this project: there is {', '.join(EMBEDDED)}")
    documents, blank = read_documents(EMBEDDED[name])
    train, val = split(documents, val_fraction, split_seed)
    tokenizer = CharTokenizer("".join(documents))
    stored = np.min_scalar_type(tokenizer.vocab_size - 1)
    meta: dict[str, Any] = {
        "format": FORMAT,
        "tokenizer": tokenizer.to_dict(),
        "dtype": stored.name,
        "val_fraction": val_fraction,
        "split_seed": split_seed,
        "blank": blank,
        "duplicates": len(documents) - len(train) - len(val),
        "splits": {},
    }
    PREPARED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=PREPARED, ignore_cleanup_errors=True) as aside:
        fingerprint = hashlib.sha256(json.dumps(meta["tokenizer"]).encode())
        for split_name, part in (("train", train), ("val", val)):
            ids = [tokenizer.bos_id]
            for document in part:
                ids += tokenizer.encode(document)
                ids.append(tokenizer.bos_id)
            tokens = np.array(ids, dtype=stored)
            tokens.tofile(Path(aside) / f"{split_name}.bin")
            fingerprint.update(tokens.tobytes())
            meta["splits"][split_name] = {
                "documents": len(part),
                "characters": sum(map(len, part)),
                "tokens": len(tokens),
            }
        meta["fingerprint"] = fingerprint.hexdigest()
        (Path(aside) / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        _replace_folder(Path(aside), PREPARED / name)
    return meta


def _replace_folder(new: Path, final: Path) -> None:
    os.chmod(new, 0o755)  # tempfile makes folders that only their owner can read
    if final.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
        final.rename(old / "old")  # a training that has it mapped keeps its pages
        new.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        new.rename(final)


def read_meta(name: str) -> dict[str, Any]:
    """meta.json of a prepared set; UsageError with the command that makes it where it is missing or damaged."""
    path = PREPARED / name / "meta.json"
    again = f"prepare it with python data/prepare.py {name}"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): {again}") from None
    except ValueError:
        raise UsageError(f"{path} is damaged: {again}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UsageError(f"{path} is not of this version of the project: {again}")
    return meta


def ensure(name: str, val_fraction: float, split_seed: int) -> tuple[dict[str, Any], bool]:
    """The meta of a prepared set with these settings, and whether it had to be prepared now.

    Raises UsageError for a set that is missing, or prepared otherwise, and that only the user can prepare.
    """
    if name not in EMBEDDED and not (PREPARED / name).is_dir():
        raise UsageError(f"data.name={name!r} is no prepared set and none of {', '.join(EMBEDDED)}")
    wanted = {"val_fraction": val_fraction, "split_seed": split_seed}
    try:
        meta = read_meta(name)
    except UsageError:
        if name not in EMBEDDED:
            raise
        return prepare(name, val_fraction, split_seed), True
    found = {setting: meta.get(setting) for setting in wanted}
    if found == wanted:
        return meta, False
    if name not in EMBEDDED:
        raise UsageError(f"{PREPARED / name} was prepared with {found}, but the configuration asks for {wanted}")
    return prepare(name, val_fraction, split_seed), True


def describe(name: str, meta: dict[str, Any]) -> str:
    """What a set holds, in a few lines."""
    vocabulary = len(meta["tokenizer"]["characters"]) + 1
    dropped = f"dropped: {meta['duplicates']:,} duplicates, {meta['blank']:,} blank lines"
    lines = [f"data    {name}: vocabulary {vocabulary}, split seed {meta['split_seed']}, {dropped}"]
    for split_name, c in meta["splits"].items():
        counts = f"{c['documents']:>10,} documents {c['characters']:>12,} characters {c['tokens']:>12,} tokens"
        lines.append(f"data    {split_name:<6}{counts}")
    return "\n".join(lines)
