"""Two configurations side by side: validation loss against seconds of training, and how much sooner B is there than A.

    python benchmarks/time_to_loss.py configs/shakespeare_cpu.yaml configs/shakespeare_fast.yaml --runs 3 --plot FILE

Trains A and B in turns, each by train.py in a process of its own, and reads their metrics.jsonl: seconds without
evaluation and saving, and the loss that train.py reports (for a plain text: over the whole validation split in windows
of block_size side by side). Prints the curves, the time to A's final loss (--loss: to another), the ratio, and B's loss
when A was done: medians over the runs. Overrides go behind a name: configs/micro.yaml,train.max_steps=1000
--together runs both at once, on a thread each: on a busy machine they then meet the same disturbances.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import machine  # noqa: E402

import config as configuration  # noqa: E402
import errors  # noqa: E402
from errors import RunError  # noqa: E402

Curve = list[tuple[float, float]]  # (seconds, validation loss)


def trained(name: str, evaluations: int, threads: int | None) -> tuple[Curve, float]:
    """The curve of one training, and the seconds from the start of its process to its end."""
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    path, *overrides = name.split(",")
    config = configuration.load(Path(path), overrides)
    every = max(1, config.train.max_steps // evaluations)
    options = [*overrides, f"train.eval_every={every}", "train.checkpoint_every=1000000", "train.samples=0"]
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, str(ROOT / "train.py"), str(Path(path).resolve()), *options]
        start = time.perf_counter()
        if status := subprocess.run(command, cwd=place, stdout=subprocess.DEVNULL, env=environment).returncode:
            raise RunError(f"the training of {name} ended with status {status}")
        wall = time.perf_counter() - start
        (metrics,) = Path(place).glob("runs/*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [(row["seconds"], row["val_loss"]) for row in rows if row["val_loss"] is not None], wall


def seconds_to(curve: Curve, loss: float) -> float:
    """When the curve is first at or below the loss, on straight lines between its points; infinity if never."""
    before = (0.0, float("inf"))
    for seconds, value in curve:
        if value <= loss:
            share = 1.0 if before[1] == float("inf") else (before[1] - loss) / (before[1] - value)
            return before[0] + share * (seconds - before[0])
        before = (seconds, value)
    return float("inf")


def loss_at(curve: Curve, seconds: float) -> float:
    """The best loss of an evaluation at or before this time."""
    return min((value for at, value in curve if at <= seconds), default=float("inf"))


def main() -> None:
    parser = errors.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument("--runs", type=machine.count, default=3)
    parser.add_argument("--together", action="store_true", help="A and B at once, a thread each, instead of in turns")
    parser.add_argument("--evaluations", type=machine.count, default=20, help="points of each curve")
    parser.add_argument("--loss", type=float, help="the loss to reach (default: what A ends at)")
    parser.add_argument("--plot", help="an image file to draw the curves into; needs matplotlib")
    args = parser.parse_args()
    for name in (args.a, args.b):
        configuration.load(Path(name.split(",")[0]), name.split(",")[1:])
    if args.plot and not Path(args.plot).resolve().parent.is_dir():
        parser.error(f"--plot {args.plot}: there is no such folder")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install -r requirements-extra.txt")
    print(machine.describe())
    curves: dict[str, list[Curve]] = {args.a: [], args.b: []}
    results = []
    for run in range(1, args.runs + 1):
        with ThreadPoolExecutor(2 if args.together else 1) as pool:
            threads = 1 if args.together else None
            both = list(pool.map(lambda name: trained(name, args.evaluations, threads), (args.a, args.b)))  # noqa: B023
        for name, (curve, wall) in zip((args.a, args.b), both, strict=True):
            curves[name].append(curve)
            done, loss = curve[-1]
            print(f"run {run}    {name}: {loss:.4f} after {done:.1f} s of training, {wall:.1f} s in all", flush=True)
        a, b = curves[args.a][-1], curves[args.b][-1]
        loss = a[-1][1] if args.loss is None else args.loss
        results.append((loss, seconds_to(a, loss), seconds_to(b, loss), a[-1][0], loss_at(b, a[-1][0])))
    for name, measured in curves.items():
        middle = [tuple(map(statistics.median, zip(*points, strict=True))) for points in zip(*measured, strict=True)]
        print(f"curve    {name}: " + "  ".join(f"{loss:.3f} at {seconds:.0f} s" for seconds, loss in middle))
    loss, seconds_a, seconds_b, end, then = (statistics.median(column) for column in zip(*results, strict=True))
    reached = [a / b for _, a, b, _, _ in results if a < float("inf") and b < float("inf")]
    ratio = f"{statistics.median(reached):.1f} times as fast" if reached else "so there is no ratio"
    when = [f"after {s:.1f} s" if s < float("inf") else "never" for s in (seconds_a, seconds_b)]
    print(f"result   {loss:.4f}: A {when[0]}, B {when[1]}, {ratio}")
    print(f"result   when A is done, after {end:.1f} s, B is at {then:.4f}")
    if args.plot:
        plot(curves, args.plot)


def plot(curves: dict[str, list[Curve]], file: str) -> None:
    """Draw every run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for (name, measured), color in zip(curves.items(), ("tab:gray", "tab:blue"), strict=True):
        for i, curve in enumerate(measured):
            label = f"{Path(name.split(',')[0]).stem}" if i == 0 else None
            pyplot.plot(*zip(*curve, strict=True), color=color, label=label)
    pyplot.xlabel("seconds of training")
    pyplot.ylabel("validation loss, nats per character")
    pyplot.legend()
    pyplot.grid(alpha=0.3)
    pyplot.gcf().set_size_inches(6, 3.6)
    pyplot.savefig(file, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    errors.run(main)
