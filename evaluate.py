"""How well a model predicts text it has not seen."""

import contextlib
from typing import Any

import numpy as np
import torch

from dataset import DocumentRows
from model import GPT

POSITIONS_AT_ONCE = 16_384  # tokens a forward pass; bounds memory, does not change the result


@torch.no_grad()
def total_loss(model: GPT, rows: DocumentRows, autocast: contextlib.AbstractContextManager[Any]) -> tuple[float, int]:
    """(sum of the losses in nats, number of targets) over every target of a split, once, under the window rule.

    Draws no random numbers and puts the model back into the mode it was in: a training goes on as if nothing happened.
    """
    was_training, device = model.training, model.wte.weight.device
    model.eval()
    total, count, size = 0.0, 0, max(1, POSITIONS_AT_ONCE // model.config.block_size)
    with autocast:
        for first in range(0, len(rows), size):
            inputs, targets = rows.rows(np.arange(first, min(first + size, len(rows))))
            losses = model(torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))
            total += losses.sum().item()
            count += int((targets >= 0).sum())
    model.train(was_training)
    return total, count
