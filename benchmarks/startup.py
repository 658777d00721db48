"""How long the scripts take to start: what they add to PyTorch's own imports, until the first step and the first token.

    python benchmarks/startup.py [--times 9]

Each start is a process of its own, in which the time of PyTorch's imports is taken as well: of `import torch` before
all else, and of what is imported from it later (constructing an optimizer of torch.optim imports as much again).
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import machine  # noqa: E402

import errors  # noqa: E402

CHILD = """
import builtins, os, pathlib, runpy, sys, time

began, imports, inside, real_import = time.perf_counter(), 0.0, False, builtins.__import__

def timed_import(name, *args, **options):
    global imports, inside
    if inside or name.partition(".")[0] != "torch":
        return real_import(name, *args, **options)
    inside, start = True, time.perf_counter()
    try:
        return real_import(name, *args, **options)
    finally:
        inside, imports = False, imports + time.perf_counter() - start

def first(*_):
    print(imports, time.perf_counter() - began - imports, flush=True)
    os._exit(0)

builtins.__import__ = timed_import
import torch
import corpus, generate, log
corpus.PREPARED = pathlib.Path("prepared").resolve()
log.Log.add, generate_all = first, generate.generate
generate.generate = lambda *args, each, **options: generate_all(*args, each=first, **options)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(place: str, script: str, *args: str) -> tuple[float, float]:
    """(seconds of PyTorch's imports, all other seconds until the first step or token) of a script in a new process."""
    result = subprocess.run(
        [sys.executable, "-c", CHILD, str(ROOT / script), *args],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    imports, added = map(float, result.stdout.splitlines()[-1].split())
    return imports, added


def main() -> None:
    parser = errors.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=machine.count, default=9)
    args = parser.parse_args()
    micro, found = str(ROOT / "configs" / "micro.yaml"), dict[str, list[tuple[float, float]]]()
    with tempfile.TemporaryDirectory() as place:
        train = [sys.executable, ROOT / "train.py", micro, "train.max_steps=1"]
        subprocess.run(train, cwd=place, capture_output=True, check=True)  # something to sample from
        for _ in range(args.times):
            shutil.rmtree(Path(place, "prepared"), ignore_errors=True)
            for what in ("train.py, names not yet prepared", "train.py", "sample.py"):
                script = what.partition(",")[0]
                own = [micro] if script == "train.py" else ["--num-samples", "1", "--checkpoint", "runs/micro"]
                found.setdefault(what, []).append(start(place, script, *own))
    print(machine.describe())
    print(f"medians of {args.times}")
    for what, times in found.items():
        imports, added = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{what:<33} adds {added:.3f} s to the {imports:.3f} s of PyTorch's imports")


if __name__ == "__main__":
    errors.run(main)
