"""Logits to text: choosing the next token, and the loop that feeds it back. Prints nothing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from config import window_start
from errors import RunError, UsageError
from model import GPT
from tokenizer import Tokenizer


@dataclass
class Sampling:
    """How the next token is drawn. UsageError for a value out of range.

    temperature: p_i ∝ exp(logit_i / temperature); 0 takes the most likely token.
    top_k: only the k most likely. min_p: only those with at least min_p times the probability of the most likely
    (Nguyen et al. 2024). top_p: of what these leave, only the fewest that together have the share p of it (Holtzman
    et al. 2020, section 3.1).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature {self.temperature} must be 0 (the most likely token) or above")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top-k {self.top_k} must be at least 1")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p {self.top_p} must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min-p {self.min_p} must be between 0 and 1")


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution the next token is drawn from. logits (B, V) → (B, V) float64; temperature must be above 0."""
    # float32's largest number / 1e-30 is finite in float64
    p = (logits.double() / max(sampling.temperature, 1e-30)).softmax(dim=-1)
    if sampling.top_k is None and sampling.top_p == 1.0 and sampling.min_p == 0.0:
        return p
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    keep = ranked >= sampling.min_p * ranked[:, :1]
    if sampling.top_k is not None:
        keep[:, sampling.top_k :] = False
    ranked = ranked * keep
    before = ranked.cumsum(dim=-1) - ranked
    if sampling.top_p < 1.0:
        keep &= before < sampling.top_p * ranked.sum(dim=-1, keepdim=True)
    keep[:, 0] = True
    p = p * torch.zeros_like(keep).scatter(-1, order, keep)  # back in the order of the vocabulary
    return p / p.sum(dim=-1, keepdim=True)


def next_token(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    """Draw one token a row by inverting the distribution at `uniform` (B,) in [0, 1). logits (B, V) → ids (B,).

    Raises RunError if a logit is NaN or infinite.
    """
    if logits.device.type == "mps":
        logits = logits.cpu()  # no float64 there
    logits = logits.double()  # in which the sum of finite float32 numbers is finite
    if not math.isfinite(logits.sum()):
        raise RunError("the logits are not finite: the weights of this checkpoint are damaged or have diverged")
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)  # softmax keeps the order, so it is not needed
    cumulative = probabilities(logits, sampling).cumsum(dim=-1)
    threshold = uniform.to(logits.device)[:, None] * cumulative[:, -1:]  # below the last, as `uniform` is below 1
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]


def start_of_text(tokenizer: Tokenizer, documents: str | None, prompt: str) -> list[int]:
    """The ids a sample starts with: BOS and the prompt for a model of documents; for one of a plain text the prompt,
    or else a line end, behind which something new begins. UsageError for a prompt that cannot be encoded."""
    if documents:
        return [tokenizer.bos_id, *tokenizer.encode(prompt)]
    try:
        return tokenizer.encode(prompt or "\n")
    except UsageError:
        if prompt:
            raise
        return [tokenizer.bos_id]  # a text without line ends


def store_by_column(model: GPT) -> None:
    """Store the matrices (out, in) with out > in column by column, in place; their values stay. For sampling on a CPU.

    A step of a single row takes as long as reading the weights does, and long columns are read faster than short rows:
    a seventh less time a token where d_model is 384 (MKL).
    """
    for p in model.parameters():
        if p.ndim == 2 and p.size(0) > p.size(1):
            p.data = p.data.t().contiguous().t()


@torch.inference_mode()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    stop_id: int | None = None,
    vocab_size: int | None = None,
    first_row: int = 0,
    use_cache: bool = True,
    each: Callable[[list[int]], object] | None = None,
) -> list[list[int]]:
    """The new tokens after each prompt, until `stop_id` (not included) or max_new_tokens.

    Prompts have at least one token each and may be longer than block_size: config.window_start has the window rule.
    Row i draws with numbers of its own, fixed by seed, first_row + i and the length so far: what it says does not
    depend on the other rows. Ids from vocab_size on (rows that only pad the matrices) are never drawn. `each` is called
    after every step with the new ids of the rows that are still computed, so that a caller can show them as they come.

    With the cache each new token is one forward step; without, the whole window is computed again. The result is the
    same. All rows advance together: the shortest prompt is read first, and rows with a longer one then take their own
    next token instead of the draw, so that no row needs padding. Rows that have ended are left out once they are half
    of those computed: seldom enough that copying the cache costs nothing.
    """
    device, block_size = model.wte.weight.device, model.config.block_size
    lengths = np.array([len(prompt) for prompt in prompts])
    ends = lengths + max_new_tokens  # where each row stops at the latest
    ids = np.zeros((len(prompts), ends.max()), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    rows = np.arange(len(prompts))  # the rows still computed
    was_training = model.training
    model.eval()
    try:
        cache, window = model.new_cache(), 0  # what the cache holds starts at token `window`
        for n in range(lengths.min(), ends.max()):  # n tokens stand, token n is next
            if window_start(n, block_size) != window or not use_cache:
                cache, window = model.new_cache(), window_start(n, block_size)
            unread = torch.from_numpy(ids[rows, window + cache[0].length : n])
            logits = model(unread.to(device), cache=cache)[:, :vocab_size]
            rng = np.random.default_rng([seed, n])
            rng.bit_generator.advance(first_row)  # type: ignore[attr-defined]  # one draw a row
            uniform = torch.from_numpy(rng.random(len(prompts))[rows])
            drawn = next_token(logits, uniform, sampling).cpu().numpy()
            ids[rows, n] = np.where(n < lengths[rows], ids[rows, n], drawn)
            if stop_id is not None:
                stopped = rows[(ids[rows, n] == stop_id) & (n >= lengths[rows])]
                ends[stopped] = np.minimum(ends[stopped], n)
            if each:
                each(ids[rows, n].tolist())
            unfinished = ends[rows] > n + 1
            if not unfinished.any():
                break
            if unfinished.mean() <= 0.5:
                rows = rows[unfinished]
                for layer in cache:
                    layer.keep(torch.from_numpy(unfinished).to(device))
    finally:
        model.train(was_training)
    texts = ids[:, : ends.max()].tolist()
    return [text[len(prompt) : end] for text, prompt, end in zip(texts, prompts, ends, strict=True)]
