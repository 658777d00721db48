"""How long the scripts take to start: what they add to PyTorch's own imports, until the first step and the first token.

    python benchmarks/startup.py [--times 9]

Each start is a process of its own. It imports PyTorch (for train.py it also constructs an optimizer, which imports as
much again), takes the time, and only then runs the script, so that both figures of a line are from the same processes.
"""

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHILD = """
import os, pathlib, runpy, sys, time
script = sys.argv[1]
began = time.perf_counter()
import torch
if script.endswith("train.py"):
    torch.optim.AdamW([torch.zeros(1)])
imported = time.perf_counter()
import corpus, generate, log
corpus.PREPARED = pathlib.Path("prepared").resolve()

def first(*_):
    print(imported - began, time.perf_counter() - imported, flush=True)
    os._exit(0)

log.Log.add, of_project = first, generate.generate
generate.generate = lambda *args, each, **options: of_project(*args, each=first, **options)
sys.argv = sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""


def start(place: str, script: str, *args: str) -> tuple[float, float]:
    """(seconds of PyTorch's imports, seconds from there to the first step or token) of a script in a new process."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=9)
    args = parser.parse_args()
    micro, found = str(ROOT / "configs" / "micro.yaml"), dict[str, list[tuple[float, float]]]()
    with tempfile.TemporaryDirectory() as place:
        train = [sys.executable, ROOT / "train.py", micro, "train.max_steps=1"]
        subprocess.run(train, cwd=place, capture_output=True, check=True)  # something to sample from
        for _ in range(args.times):
            shutil.rmtree(Path(place, "prepared"), ignore_errors=True)
            for what in ("train.py, the names not prepared", "train.py", "sample.py"):
                script = what.partition(",")[0]
                own = [micro] if script == "train.py" else ["--num-samples", "1", "--checkpoint", "runs/micro"]
                found.setdefault(what, []).append(start(place, script, *own))
    versions = f"Python {platform.python_version()}, PyTorch {metadata.version('torch')}"
    print(f"{platform.machine()}, {os.cpu_count()} cores, {versions}, medians of {args.times}")
    for what, times in found.items():
        imports, added = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{what:<33} adds {added:.3f} s to the {imports:.3f} s of PyTorch's imports")


if __name__ == "__main__":
    main()
