"""How fast an update is: against a plain loop, beside the loop around it, and as a share of what the machine can do.

    python benchmarks/step.py [micro | loop | peak]

micro: an update of configs/micro.yaml at 32 rows: the loop one would write down (forward, backward, PyTorch's fused
AdamW, zero_grad), and train.py's update, not compiled and compiled. loop: the share of the training time in which
train.py does something else than updates (batch, learning rate, log, bar). peak: tokens/s of the 10.7 M model of
configs/shakespeare.yaml without dropout, and the share of the float32 matrix peak, taken in the same process, that its
FLOPs (6 N + 12 · layers · d_model · T a token) come to.
"""

import argparse
import io
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import machine  # noqa: E402

import config as configuration  # noqa: E402
import device  # noqa: E402
import train  # noqa: E402
from config import Config  # noqa: E402
from model import GPT, flops_per_token  # noqa: E402
from optim import Optimizer  # noqa: E402

CPU = torch.device("cpu")


def update_of(config: Config, vocab_size: int, compiled: bool) -> tuple[GPT, Any]:
    """(model, train.py's update of it), on random tokens so far."""
    torch.manual_seed(0)
    model = GPT(config.model, vocab_size)
    optimizer, scaler = Optimizer(model, config.optim), device.make_scaler(CPU, torch.float32)
    example = list(rows(config, vocab_size))
    update, word = train.make_update(model, optimizer, scaler, config, nullcontext(), compiled, example)
    optimizer.lr.fill_(1e-3)
    print(f"update of {sum(p.numel() for p in model.parameters()):,} parameters: compile {word}", file=sys.stderr)
    return model, update


def rows(config: Config, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (config.train.batch_size, config.model.block_size)
    return torch.randint(vocab_size, shape), torch.randint(vocab_size, shape)


def micro() -> None:
    config = configuration.load(ROOT / "configs/micro.yaml", ["train.batch_size=32", "optim.name=adamw"])
    torch.set_num_threads(1)
    x, y = rows(config, 27)
    model = GPT(config.model, 27)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def plain() -> None:
        model(x, y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    updates = {word: partial(update_of(config, 27, word == "compiled")[1], x, y) for word in ("eager", "compiled")}
    times = machine.seconds_of({"plain loop": plain} | updates, calls=200)
    for name, seconds in times.items():
        ratio = seconds / times["plain loop"]
        print(f"micro    {name:<14} {1e3 * seconds:5.2f} ms an update of 32 rows, {ratio:.2f} × the plain loop")


def loop() -> None:
    medium = [
        "model.d_model=144",
        "model.n_layers=4",
        "model.block_size=64",
        "train.batch_size=16",
        "train.max_steps=60",
    ]
    tiny = ["train.batch_size=32", "train.compile=true", "train.max_steps=3000"]
    never = ["train.samples=0", "train.eval_every=100000", "train.checkpoint_every=100000"]
    make_update, spent = train.make_update, 0.0

    def make_timed_update(*args: Any) -> Any:
        update, word = make_update(*args)

        def timed(*rows: torch.Tensor) -> Any:
            nonlocal spent
            start = time.perf_counter()
            result = update(*rows)
            spent += time.perf_counter() - start
            return result

        return timed, word

    train.make_update = make_timed_update
    runs = {"micro": ["train.max_steps=600"], "micro, 32 rows, compiled": tiny, "1 M parameters": medium}
    for name, overrides in runs.items():
        config = configuration.load(ROOT / "configs/micro.yaml", [*never, *overrides])
        shares = []
        for _ in range(5):
            spent = 0.0
            with tempfile.TemporaryDirectory() as place, redirect_stdout(io.StringIO()):
                os.chdir(place)
                train.train(config, "loop")
                last = Path("runs/loop/metrics.jsonl").read_text().splitlines()[-1]
                os.chdir(ROOT)
            shares.append(1 - spent / json.loads(last)["seconds"])
        print(f"loop     {name:<25} {statistics.median(shares):6.1%} of the time is not spent in updates")


def peak() -> None:
    options = ["model.dropout=0", "train.batch_size=8"]
    config = configuration.load(ROOT / "configs/shakespeare.yaml", options)
    x, y = rows(config, 66)
    updates = {word: update_of(config, 66, word == "compiled") for word in ("eager", "compiled")}
    model = updates["eager"][0]
    functions = {name: partial(update, x, y) for name, (_, update) in updates.items()}
    flops, (best, _) = flops_per_token(model) * x.numel(), device.peak_flops(CPU, torch.float32)
    print(f"peak     {best / 1e9:.0f} GFLOP/s in large products in float32")
    for name, seconds in machine.seconds_of(functions, calls=1).items():
        rate, share = x.numel() / seconds, flops / seconds / best
        print(f"peak     {name:<14} {rate:,.0f} tokens/s of {x.shape[0]} rows of {x.shape[1]}, {share:.0%} of the peak")


if __name__ == "__main__":
    parts = {"micro": micro, "loop": loop, "peak": peak}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=parts)
    chosen = parser.parse_args().part
    print(machine.describe())
    for name, part in parts.items():
        if chosen in (None, name):
            threads = torch.get_num_threads()
            part()
            torch.set_num_threads(threads)  # a tiny model leaves one
