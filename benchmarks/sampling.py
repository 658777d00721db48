"""How fast text is sampled: with the cache against without it, and many names at once against one at a time.

    python benchmarks/sampling.py [--checkpoint runs/micro] [--tokens 500] [--names 1000] [--runs 5] [--threads 1]

How many steps a name takes depends on the training, so the names come from a trained micro: the checkpoint given, or
else one that is trained first, for 600 steps. The long text comes from the model of configs/shakespeare.yaml with
random weights, which cost what trained ones do. Both sides of a ratio run in turns, in this process.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import machine  # noqa: E402

import checkpoint  # noqa: E402
import config  # noqa: E402
import errors  # noqa: E402
from generate import Sampling, generate, store_by_column  # noqa: E402
from model import GPT  # noqa: E402


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def long_text(tokens: int, runs: int) -> None:
    """One row of a 10.7 M model: the cache against the whole window for every token."""
    torch.manual_seed(0)
    model = GPT(config.load(ROOT / "configs" / "shakespeare.yaml").model, vocab_size=65).eval()
    store_by_column(model)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, block_size {model.config.block_size}, one row of {tokens} tokens")
    print(
        "  (without the cache, the whole window for every token, it takes ten times as long)",
        flush=True,
    )

    def sample(seed: int, use_cache: bool) -> float:
        return seconds(lambda: generate(model, [[0]], tokens, Sampling(), seed, use_cache=use_cache))

    sample(0, True)
    cached, naive = [], []
    for run in range(runs):
        cached += [sample(run, True), sample(run, True)]
        naive.append(sample(run, False))
        print(f"  run {run + 1} of {runs}: {cached[-1]:.1f} s with the cache, {naive[-1]:.1f} s without", flush=True)
    rates = tokens / median(cached), tokens / median(naive)
    print(f"  {rates[0]:.1f} tokens/s with the cache, {rates[1]:.1f} without: {rates[0] / rates[1]:.1f} times")


def names(run: Path, number: int, runs: int) -> None:
    """Many names of a trained micro in one call, against a call for each (of a tenth as many)."""
    model, tokenizer, _ = checkpoint.load(run)
    store_by_column(model)
    settings: dict[str, Any] = {"stop_id": tokenizer.bos_id, "vocab_size": tokenizer.vocab_size}

    def sample(seed: int, rows: int, first_row: int = 0) -> list[list[int]]:
        prompts = [[tokenizer.bos_id]] * rows
        return generate(model, prompts, 500, Sampling(), seed, **settings, first_row=first_row)

    letters = sum(map(len, sample(0, number))) / number
    together, alone, few = [], [], max(1, number // 10)
    for seed in range(runs):
        together.append(number / seconds(lambda seed=seed: sample(seed, number)))
        alone.append(few / seconds(lambda seed=seed: [sample(seed, 1, row) for row in range(few)]))
    print(f"{run.name}, {number:,} names of {letters:.1f} letters on average")
    rates = median(together), median(alone)
    print(f"  {rates[0]:,.0f} names/s in one call, {rates[1]:,.0f} in a call for each: {rates[0] / rates[1]:.0f} times")


def main() -> None:
    parser = errors.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="a trained micro: a checkpoint file or a run")
    parser.add_argument("--tokens", type=machine.count, default=500)
    parser.add_argument("--names", type=machine.count, default=1000)
    parser.add_argument("--runs", type=machine.count, default=5)
    parser.add_argument("--threads", type=machine.count, default=1, help="a single row gains little from a second")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(machine.describe())
    print(f"medians of {args.runs} runs")
    with tempfile.TemporaryDirectory() as folder:
        if args.checkpoint is None:
            command = [sys.executable, str(ROOT / "train.py"), str(ROOT / "configs" / "micro.yaml")]
            command += ["train.max_steps=600", "train.device=cpu", "train.samples=0"]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        names(args.checkpoint or Path(folder) / "runs" / "micro", args.names, 4 * args.runs)
    long_text(args.tokens, args.runs)


if __name__ == "__main__":
    errors.run(main)
