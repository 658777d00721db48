"""Prepared sets to batches. `batch(step)` depends on seed and step alone, so that a resumed run sees the same rows."""

from pathlib import Path
from typing import Any

import numpy as np

import corpus
import tokenizer
from config import DataConfig, ModelConfig
from errors import UsageError

Rows = tuple[np.ndarray, np.ndarray]  # inputs and targets, both (rows, block_size) int64; a target of -1 is not counted


class DocumentRows:
    """`documents` mode: a row is one window of one document under the window rule (config.window_start).

    The first window of a document starts with its BOS; a longer document continues in further rows, each hop =
    max(1, block_size // 8) tokens on. Only targets that no earlier row had are counted, so the rows together hold
    every token of the split exactly once as a target.
    """

    def __init__(self, tokens: np.ndarray, bos_id: int, block_size: int, seed: int):
        self.tokens, self.bos_id, self.block_size, self.seed = tokens, bos_id, block_size, seed
        self.hop = max(1, block_size // 8)
        bos = np.flatnonzero(tokens == bos_id)
        self.starts, self.lengths = bos[:-1], np.diff(bos)  # BOS and the characters: as many as there are targets
        rows_of = 1 + -(-np.maximum(0, self.lengths - block_size) // self.hop)
        self.ends = np.cumsum(rows_of)  # of each document, counted in rows
        self._order: tuple[int, np.ndarray] = (-1, bos)

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def continued(self) -> float:
        """Share of the rows that continue a longer document."""
        return 1 - len(self.starts) / len(self)

    def rows(self, index: np.ndarray) -> Rows:
        """The rows of these numbers."""
        document = np.searchsorted(self.ends, index, side="right")
        nth = index - np.concatenate(([0], self.ends))[document]
        offset = nth * self.hop  # of the window in its document
        place = np.arange(self.block_size)
        at = (self.starts[document] + offset)[:, None] + place
        inside = offset[:, None] + place < self.lengths[document][:, None]
        new = place >= np.where(nth == 0, 0, self.block_size - self.hop)[:, None]
        at = np.where(inside, at, 0)  # token 0 is a BOS: what fills a row up is no other document's text
        inputs = self.tokens[at].astype(np.int64)
        targets = np.where(inside & new, self.tokens[at + 1].astype(np.int64), -1)
        return inputs, targets

    def batch(self, step: int, size: int) -> Rows:
        """The rows of an update: every row once per epoch, in an order fixed by the seed and the epoch."""
        position = np.arange(step * size, (step + 1) * size)
        epoch, place = np.divmod(position, len(self))
        index = np.empty(size, dtype=np.int64)
        for e in np.unique(epoch):
            if self._order[0] != e:
                self._order = (int(e), np.random.default_rng([self.seed, int(e)]).permutation(len(self)))
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
        self.name = data.name
        self.meta, self.prepared_now = corpus.ensure(data.name, data.val_fraction, data.split_seed)
        folder = corpus.PREPARED / data.name
        self.tokenizer = tokenizer.from_dict(self.meta["tokenizer"])
        tokens = {split: _open(folder / f"{split}.bin", self.meta, split) for split in ("train", "val")}
        for split, ids in tokens.items():
            if int(ids.max()) >= self.tokenizer.vocab_size:
                raise UsageError(
                    f"{folder / split}.bin has token {ids.max()}, but the vocabulary of its meta.json ends at "
                    f"{self.tokenizer.vocab_size - 1}: prepare the set again"
                )
        bos, block = self.tokenizer.bos_id, model.block_size
        if data.mode == "stream" and len(tokens["train"]) <= block:
            raise UsageError(
                f"model.block_size={block} is too long for the training split of {data.name}, which has "
                f"{len(tokens['train'])} tokens: it can be at most {len(tokens['train']) - 1}"
            )
        self.train = (
            StreamRows(tokens["train"], block, seed)
            if data.mode == "stream"
            else DocumentRows(tokens["train"], bos, block, seed)
        )
        # validation follows the documents in both modes: one figure, whichever way the model was trained
        self.val = DocumentRows(tokens["val"], bos, block, seed)
        counts = self.meta["splits"]["val"]
        self.val_characters = counts["characters"] + counts["documents"]  # each document ends with a separator

    def describe(self) -> str:
        """What the set holds and how it is cut into rows, in a few lines."""
        lines = [corpus.describe(self.name, self.meta)]
        if isinstance(self.train, DocumentRows):
            more = self.train.continued
            lines.append(f"data    {len(self.train):,} rows, {more:.0%} of them continue a longer document")
            if more > 0.5:
                lines.append("data    most rows re-read a longer document: data.mode=stream would be cheaper")
        else:
            lines.append(f"data    {len(self.train):,} windows of {self.train.block_size + 1} tokens")
        return "\n".join(lines)


def _open(path: Path, meta: dict[str, Any], split: str) -> np.ndarray:
    dtype, expected = np.dtype(meta["dtype"]), meta["splits"][split]["tokens"]
    try:
        tokens = np.memmap(path, dtype=dtype, mode="r")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}): prepare the set again") from None
    if len(tokens) != expected:
        raise UsageError(f"{path} has {len(tokens)} tokens, but meta.json says {expected}: prepare the set again")
    return tokens
