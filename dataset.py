"""Prepared sets to batches. `batch(step)` depends on seed and step alone, so that a resumed run sees the same rows."""

from pathlib import Path
from typing import Any

import numpy as np

import corpus
import tokenizer as tokenizers
from config import DataConfig, ModelConfig
from errors import UsageError

Rows = tuple[np.ndarray, np.ndarray]  # inputs and targets, both (rows, block_size) int64; a target of -1 is not counted


class DocumentRows:
    """Windows of documents: row after row, every token of the split once as a target.

    The first window of a document starts with it; a longer document continues in further rows, each `hop` tokens on,
    in which only the last hop targets, those that no earlier row had, are counted. With hop = max(1, block_size // 8)
    these are the windows of the window rule (config.window_start), as in sampling; with hop = block_size they do
    not overlap.
    """

    def __init__(self, tokens: np.ndarray, bos_id: int | None, block_size: int, seed: int, hop: int | None = None):
        """bos_id: what separates the documents; None: it is all one text."""
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        self.hop = hop or max(1, block_size // 8)
        borders = np.array([0, len(tokens) - 1]) if bos_id is None else np.flatnonzero(tokens == bos_id)
        self.starts, self.lengths = borders[:-1], np.diff(borders)  # inputs, of which each has a target
        rows_of = 1 + -(-np.maximum(0, self.lengths - block_size) // self.hop)
        self.ends = np.cumsum(rows_of)  # of each document, counted in rows
        self._order: tuple[int, np.ndarray] = (-1, borders)

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def continued(self) -> float:
        """Share of the rows that continue a longer document."""
        return 1 - len(self.starts) / len(self)

    def document_of(self, index: np.ndarray) -> np.ndarray:
        """The documents that the rows of these numbers belong to."""
        return np.searchsorted(self.ends, index, side="right")

    def predicted(self, unit: int, is_row: bool) -> list[int]:
        """The tokens that are targets in a document, or in a row."""
        if is_row:
            targets = self.rows(np.array([unit]))[1]
            return targets[targets >= 0].tolist()
        return self.tokens[self.starts[unit] + 1 : self.starts[unit] + self.lengths[unit] + 1].tolist()

    def rows(self, index: np.ndarray) -> Rows:
        """The rows of these numbers."""
        document = self.document_of(index)
        nth = index - np.concatenate(([0], self.ends))[document]
        offset = nth * self.hop  # of the window in its document
        place = np.arange(self.block_size)
        at = (self.starts[document] + offset)[:, None] + place
        inside = offset[:, None] + place < self.lengths[document][:, None]
        new = place >= np.where(nth == 0, 0, self.block_size - self.hop)[:, None]
        at = np.where(inside, at, 0)  # what fills a row up comes after all that counts, and is no other document's text
        inputs = self.tokens[at].astype(np.int64)
        targets = np.where(inside & new, self.tokens[at + 1].astype(np.int64), -1)
        return inputs, targets

    def batch(self, step: int, size: int) -> Rows:
        """The rows of an update: every row once per epoch, in an order fixed by the seed and the epoch."""
        position = np.arange(step * size, (step + 1) * size)
        epoch, place = np.divmod(position, len(self))
        index = np.empty(size, dtype=np.int64)
        for e in range(epoch[0], epoch[-1] + 1):
            if self._order[0] != e:
                self._order = (e, np.random.default_rng([self.seed, e]).permutation(len(self)))
            index[epoch == e] = self._order[1][place[epoch == e]]
        return self.rows(index)


class StreamRows:
    """`stream` mode: a row is block_size + 1 consecutive tokens from anywhere, across document borders."""

    def __init__(self, tokens: np.ndarray, block_size: int, seed: int):
        self.tokens, self.block_size, self.seed = tokens, block_size, seed

    def __len__(self) -> int:
        return len(self.tokens) - self.block_size

    def rows(self, index: np.ndarray) -> Rows:
        """The rows that start at these tokens."""
        window = self.tokens[index[:, None] + np.arange(self.block_size + 1)].astype(np.int64)
        return window[:, :-1], window[:, 1:]

    def batch(self, step: int, size: int) -> Rows:
        """The rows of an update: starts drawn evenly from all there are."""
        return self.rows(np.random.default_rng([self.seed, step]).integers(0, len(self), size))


class Data:
    """A prepared set, opened for one configuration: its meta, and the rows of both splits."""

    def __init__(self, data: DataConfig, model: ModelConfig, seed: int):
        self.name, self.meta = corpus.ensure(data.name, data.mode, data.val_fraction, data.split_seed)
        folder, block = corpus.PREPARED / self.name, model.block_size
        try:
            self.tokenizer = tokenizers.from_dict(self.meta["tokenizer"])
            self.bos_id = self.tokenizer.bos_id if self.meta["documents"] else None
            tokens = {split: _open(folder / f"{split}.bin", self.meta, split) for split in ("train", "val")}
            counts, self.fingerprint = self.meta["splits"]["val"], self.meta["fingerprint"]
            if not isinstance(self.fingerprint, str):
                raise ValueError("its fingerprint is no text")
            self.val_characters = int(counts["characters"]) + int(counts["documents"])  # BOS counts as one
            self.description = corpus.describe(self.name, self.meta)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{folder / 'meta.json'} is damaged ({error}): {corpus.again(self.name)}") from None
        for split, ids in tokens.items():
            if int(ids.max()) >= self.tokenizer.vocab_size or (self.bos_id and {ids[0], ids[-1]} != {self.bos_id}):
                raise UsageError(f"{folder / split}.bin does not fit its meta.json: {corpus.again(self.name)}")
        if data.mode == "stream" and len(tokens["train"]) <= block:
            raise UsageError(
                f"model.block_size={block} is too long for the training split of {data.name}, which has "
                f"{len(tokens['train'])} tokens: it can be at most {len(tokens['train']) - 1}"
            )
        self.train = (
            StreamRows(tokens["train"], block, seed)
            if data.mode == "stream"
            else DocumentRows(tokens["train"], self.bos_id, block, seed)
        )
        self.tokens = tokens
        # the same in both modes: for documents the window rule, as in sampling; for a plain text windows without
        # overlap, as other projects report it
        self.val = DocumentRows(tokens["val"], self.bos_id, block, seed, None if self.meta["documents"] else block)
        if self.bos_id is None:  # nothing stands before the first token that could predict it
            self.val_characters -= self.tokenizer.characters[tokens["val"][0]]

    def describe(self) -> str:
        """What the set holds and how it is cut into rows, in a few lines."""
        lines = [self.description]
        if isinstance(self.train, DocumentRows):
            more = self.train.continued
            lines.append(f"data    {len(self.train):,} rows, {more:.0%} of them continue a longer document")
            if more > 0.5:
                lines.append("data    most rows re-read a longer document: data.mode=stream would be cheaper")
        else:
            lines.append(f"data    {len(self.train):,} windows of {self.train.block_size + 1} tokens")
        if len(self.tokens["val"]) <= self.val.block_size and self.bos_id is None:
            lines.append(f"data    validation is {len(self.tokens['val'])} tokens, less than one whole window")
        return "\n".join(lines)


def _open(path: Path, meta: dict[str, Any], split: str) -> np.ndarray:
    dtype = {"uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32}[meta["dtype"]]
    expected = meta["splits"][split]["tokens"]
    try:
        tokens = np.memmap(path, dtype=dtype, mode="r")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}): {corpus.again(path.parent.name)}") from None
    if len(tokens) != expected:
        raise UsageError(f"{path} does not fit its meta.json: {corpus.again(path.parent.name)}")
    return tokens
