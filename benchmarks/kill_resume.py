"""Kill a training with SIGKILL at random moments, resume it each time, and compare with one that was left alone.

    python benchmarks/kill_resume.py [--kills 200] [--steps 400]

micro trains with a checkpoint every third step, so that many of the moments fall into a write. When a run has got to
its end in spite of the kills, all its weights, the optimizer's state and its metrics are compared bit by bit with an
undisturbed run; then another run begins, until there were enough kills. Every training is a process of its own, forked
after PyTorch was imported, which saves the seconds that importing takes. (Linux and macOS.)
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import checkpoint  # noqa: E402
import errors  # noqa: E402
import train  # noqa: E402

torch.set_num_threads(1)  # a process with threads cannot be forked safely
NOT_COMPARED = ("tokens_per_s", "seconds")


def start(arguments: list[str], output: Path) -> int:
    """Fork a process that runs train.py with these arguments; returns its id."""
    if child := os.fork():
        return child
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.argv = ["train.py", *arguments]
        with contextlib.suppress(SystemExit):
            errors.run(train.main)
    finally:
        os._exit(0)


def state(run: Path, steps: int) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """(all tensors of the last and best checkpoints, the rows of the metrics but for their times)."""
    tensors = {}
    for name in (f"step-{steps:06d}.pt", "best.pt"):
        content = checkpoint.read(run / name)
        tensors |= {f"{name} {key}": value for key, value in content["model"].items()}
        for key, moments in content.get("optimizer", {}).items():
            moments = {"": moments} if key == "steps" else moments
            tensors |= {f"{name} {key} {moment}": value for moment, value in moments.items()}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return tensors, [{key: value for key, value in row.items() if key not in NOT_COMPARED} for row in rows]


def differing_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many bits differ between two tensors of one shape and type."""
    x, y = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
    return sum(int(byte).bit_count() for byte in (x ^ y).tolist() if byte)


def kill_and_resume(kills: int, steps: int, seed: int) -> dict[str, int]:
    """The counts that main prints; everything happens in the current folder."""
    options = [f"train.max_steps={steps}", "train.batch_size=8", "train.checkpoint_every=3", "train.eval_every=50"]
    options += ["train.samples=0", "train.device=cpu", "optim.warmup_steps=5", "model.dropout=0.1"]
    config, output = str(ROOT / "configs" / "micro.yaml"), Path("output.txt")
    times = []
    for arguments in ([config, *options, "train.max_steps=1"], [config, *options]):
        began = time.perf_counter()
        os.waitpid(start(arguments, output), 0)
        times.append(time.perf_counter() - began)
    longest = 2 * times[0] + times[1] / 4  # a training that is killed has time for the start and some steps, mostly
    tensors, rows = state(Path("runs/micro-2"), steps)
    counts = dict.fromkeys(["kills", "resumes", "runs", "damaged loads", "differing bits", "differing rows"], 0)
    rng = random.Random(seed)
    while counts["kills"] < kills:
        before = set(Path("runs").glob("*"))
        arguments = [config, *options]
        while True:
            child, killed = start(arguments, output), False
            end = time.perf_counter() + rng.uniform(0, longest)
            while time.perf_counter() < end and os.waitpid(child, os.WNOHANG) == (0, 0):
                time.sleep(0.001)
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                killed = os.waitpid(child, 0)[1] != 0
            if not killed:
                break
            counts["kills"] += 1
            if new := [run for run in set(Path("runs").glob("*")) - before if (run / "config.yaml").exists()]:
                arguments = [str(new[0]), "--resume"]
                counts["resumes"] += 1
        run = Path(arguments[0]) if "--resume" in arguments else max(set(Path("runs").glob("*")) - before)
        others, other_rows = state(run, steps)
        counts["runs"] += 1
        counts["differing bits"] += sum(differing_bits(value, others[name]) for name, value in tensors.items())
        counts["differing rows"] += sum(a != b for a, b in zip(rows, other_rows, strict=True))
    counts["damaged loads"] = output.read_text(encoding="utf-8").count("is damaged")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        counts = kill_and_resume(args.kills, args.steps, args.seed)
        os.chdir(ROOT)
    print(", ".join(f"{key} {value}" for key, value in counts.items()))
    sys.exit(1 if any(counts[key] for key in ("damaged loads", "differing bits", "differing rows")) else 0)


if __name__ == "__main__":
    main()
