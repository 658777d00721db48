"""What counting alone predicts: n-gram models of the training split, scored on the validation split.

    python benchmarks/count_models.py

p(next | the n − 1 before) = (count + A · p(next | the n − 2 before)) / (total + A): each order falls back on the one
below in as far as it has seen little (MacKay & Peto 1995, section 4), the lowest on the uniform distribution.
"""

import math
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import corpus
import tokenizer as tokenizers
from config import DataConfig

A = 5.0  # how many observations the order below counts for


def documents(name: str, split: str, meta: dict[str, Any]) -> list[list[int]]:
    """The documents of a split, each with BOS at both ends."""
    bos = tokenizers.from_dict(meta["tokenizer"]).bos_id
    ids = np.fromfile(corpus.PREPARED / name / f"{split}.bin", dtype=meta["dtype"]).tolist()
    borders = [i for i, token in enumerate(ids) if token == bos]
    return [ids[a : b + 1] for a, b in pairwise(borders)]


def nats_per_character(order: int, train: list[list[int]], val: list[list[int]], vocab_size: int) -> float:
    """The loss of the n-gram model of this order: contexts are the order − 1 tokens before, none before BOS."""
    grams: Counter[tuple[int, ...]] = Counter()
    totals: Counter[tuple[int, ...]] = Counter()
    for document in train:
        for i in range(1, len(document)):
            for n in range(min(order, i + 1)):
                context = tuple(document[i - n : i])
                grams[(*context, document[i])] += 1
                totals[context] += 1

    def p(context: tuple[int, ...], token: int) -> float:
        below = p(context[1:], token) if context else 1 / vocab_size
        return (grams[(*context, token)] + A * below) / (totals[context] + A)

    losses = [
        -math.log(p(tuple(document[max(0, i - order + 1) : i]), document[i]))
        for document in val
        for i in range(1, len(document))
    ]
    return sum(losses) / len(losses)


def main() -> None:
    data = DataConfig()
    _, meta = corpus.ensure(data.name, data.mode, data.val_fraction, data.split_seed)
    train, val = documents(data.name, "train", meta), documents(data.name, "val", meta)
    vocab_size = tokenizers.from_dict(meta["tokenizer"]).vocab_size
    print(f"uniform      {math.log(vocab_size):.3f} nats per character")
    for order, name in enumerate(("letter", "bigram", "trigram", "4-gram", "5-gram", "6-gram"), start=1):
        print(f"{name:<10} {nats_per_character(order, train, val, vocab_size):7.3f}")


if __name__ == "__main__":
    main()
