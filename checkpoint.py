"""Checkpoints: written whole or not at all, verified when read, enough on their own to sample from.

A file is what torch.save writes and then 40 bytes, MAGIC and the SHA-256 of all before it, because PyTorch's loader
does not notice flipped bits. It holds plain containers, tensors, strings and numbers; nothing in it can run code.
In a notebook: model, tokenizer, config = load("runs/micro")
"""

import contextlib
import errno
import hashlib
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

import config as configuration
import tokenizer as tokenizers
from config import Config
from errors import RunError, UsageError
from model import GPT
from runs import files_to_sample

MAGIC = b"microgpt"
FORMAT = 1
TRAILER = len(MAGIC) + hashlib.sha256().digest_size
NEEDED: dict[str, Any] = {
    "config": str,
    "tokenizer": dict,
    "documents": (str, type(None)),  # how the text was cut into documents, see corpus.py
    "fingerprint": str,  # of the data
    "row": dict,  # the last of metrics.jsonl
    "model": dict,
}


class _HashingFile:
    """The write half of a file, hashing what passes: the hash costs no second copy of the checkpoint in memory."""

    def __init__(self, file: BinaryIO):
        self.file, self.sha256 = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def save(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to a file aside, flush it to the disk, and give it its name: a crash leaves the old or the new.

    Raises RunError if the disk does not take it; what stood at `path` is then untouched.
    """
    aside = path.with_name(path.name + ".tmp")
    try:
        with open(aside, "wb") as file:
            hashing = _HashingFile(file)
            torch.save({"format": FORMAT, **content}, cast(BinaryIO, hashing))
            file.write(MAGIC + hashing.sha256.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        _flush_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        # torch's writer hides what stopped it behind an error of its own
        cause = error.__context__ if isinstance(error, RuntimeError) and error.__context__ else error
        if not isinstance(cause, (OSError, RuntimeError)):
            raise cause from None  # a second Ctrl-C
        reason = getattr(cause, "strerror", None) or str(cause)
        raise RunError(f"{path} could not be saved: {reason}; the checkpoints before it are untouched") from error


def _flush_folder(path: Path) -> None:
    """A new name is on the disk when its folder is. Windows and some file systems know no such thing."""
    if os.name != "posix":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(folder)


def read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, its tensors on the CPU and still in the file (mapped, read when touched).

    Raises UsageError for a file that cannot be read, is damaged, or is not one of this project's.
    """
    try:
        with open(path, "rb") as file:
            left, sha256 = os.fstat(file.fileno()).st_size - TRAILER, hashlib.sha256()
            while left > 0 and (chunk := file.read(min(left, 1 << 20))):
                sha256.update(chunk)
                left -= len(chunk)
            trailer = file.read()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    foreign = f"{path} is not a checkpoint of this project"
    if len(trailer) != TRAILER or not trailer.startswith(MAGIC):
        raise UsageError(f"{foreign}, or was cut short: the SHA-256 that ends one is missing")
    if trailer[len(MAGIC) :] != sha256.digest():
        raise UsageError(f"{path} is damaged: its SHA-256 does not match its content")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # damaged or malicious content makes the unpickler raise almost anything
        raise UsageError(f"{foreign}: PyTorch cannot read it without running code from it") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(f"{foreign}, or one of another version: format {FORMAT} is expected")
    if missing := [key for key, kind in NEEDED.items() if not isinstance(content.get(key, ...), kind)]:
        raise UsageError(f"{foreign}: it has no {', '.join(missing)}")
    if not isinstance(content["row"].get("step"), int):
        raise UsageError(f"{foreign}: it does not say after which step it was saved")
    return content


def read_first(paths: Sequence[Path]) -> tuple[Path, dict[str, Any]]:
    """The first of the files that is whole, and its content; each damaged one before it is named on stderr."""
    for path, following in pairwise(paths):
        try:
            return path, read(path)
        except UsageError as error:
            print(f"warning: {error}; going back to {following}", file=sys.stderr)
    return paths[-1], read(paths[-1])


def rebuild(content: dict[str, Any], path: Path, device: torch.device) -> tuple[GPT, Any, Config]:
    """(model, tokenizer, config) from the content of the checkpoint at `path`."""
    config = configuration.parse(content["config"], f"the configuration in {path}")
    try:
        tokenizer = tokenizers.from_dict(content["tokenizer"])
        vocab_size = content["model"]["wte.weight"].shape[0]
    except (ValueError, KeyError, AttributeError, IndexError) as error:
        raise UsageError(f"{path} is not a checkpoint of this project: {error}") from None
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(f"{path} has {tokenizer.vocab_size} tokens, but embeddings for only {vocab_size} of them")
    with torch.device(device):
        model = GPT(config.model, vocab_size)
    load_weights(model, content["model"], path)
    return model, tokenizer, config


@torch.no_grad()
def load_weights(model: GPT, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Copy the weights into the model; UsageError unless names and shapes are exactly the model's."""
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    stored = {name: tuple(getattr(w, "shape", ())) for name, w in weights.items()}
    if own != stored:
        odd = sorted(set(own.items()) ^ set(stored.items()))[0]
        raise UsageError(f"{path} does not fit its own configuration: {odd[0]} {odd[1]} is in one of the two only")
    for name, p in model.named_parameters():
        p.copy_(weights[name])


def weights_of(model: GPT) -> dict[str, torch.Tensor]:
    """The parameters by name, a tied matrix once; give it the plain model, not what compile or DDP wrap around it."""
    return {name: p.detach() for name, p in model.named_parameters()}


def load(path: str | Path, device: str | torch.device = "cpu") -> tuple[GPT, Any, Config]:
    """(model in eval mode, tokenizer, config) of a checkpoint file, or of a run: its best.pt, or else its newest step.

    Raises UsageError for anything that is not a whole checkpoint of this project.
    """
    found, content = read_first(files_to_sample(Path(path)))
    model, tokenizer, config = rebuild(content, found, torch.device(device))
    return model.eval(), tokenizer, config
