"""The optimizer: which parameter is decayed, AdamW, its state by parameter name, and learning rates by step."""

import math
from typing import Any

import torch
from torch import Tensor

from config import OptimConfig
from model import GPT


def parameter_groups(model: GPT, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups that own every parameter once: matrices, with decay, and gains, biases and embeddings, without.

    Decay pulls towards zero, which for a gain means switching the layer off. A tied lm_head is an embedding.
    """
    groups: dict[float, list[tuple[str, Tensor]]] = {weight_decay: [], 0.0: []}
    for name, p in model.named_parameters():
        is_matrix = p.ndim == 2 and name.split(".")[0] not in ("wte", "wpe")
        groups[weight_decay if is_matrix else 0.0].append((name, p))
    owned = [name for members in groups.values() for name, _ in members]
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters())
    return [{"params": members, "weight_decay": decay} for decay, members in groups.items() if members]


def make_optimizer(model: GPT, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2), in PyTorch's fused form, for a model on its final device."""
    groups = parameter_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def learning_rate(step: int, config: OptimConfig, max_steps: int) -> float:
    """The learning rate of update `step` = 0 … max_steps − 1.

    Linear warm-up that is never 0; then lr · (min + (1 − min) · f(x)), x = 0 … 1 the share of the rest that is done:
    constant: f = 1. linear: 1 − x. cosine: (1 + cos πx) / 2 (Loshchilov & Hutter 2017, eq. 5).
    wsd: 1, then 1 − √ of the last fifth (Hägele et al. 2024, section 3).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    x = (step - config.warmup_steps) / (max_steps - config.warmup_steps)
    factor = {
        "constant": 1.0,
        "linear": 1 - x,
        "cosine": (1 + math.cos(math.pi * x)) / 2,
        "wsd": 1 - math.sqrt(max(0.0, (x - 0.8) / 0.2)),
    }[config.schedule]
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * factor)


def state_by_name(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """{parameter name: {"step": …, "exp_avg": …, …}}; by name, since positions change with the model's code."""
    return {
        name: optimizer.state[p]
        for group in optimizer.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
    }


def load_state_by_name(optimizer: torch.optim.Optimizer, state: dict[str, dict[str, Tensor]]) -> None:
    """Put back what `state_by_name` gave, each tensor to its parameter's device; KeyError if a parameter has none."""
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            optimizer.state[p] = {key: value.to(p.device, copy=True) for key, value in state[name].items()}
