"""Runs on the disk: runs/micro, runs/micro-2, …, each with config.yaml, metrics.jsonl, step-000500.pt … and best.pt."""

import contextlib
import os
import re
from pathlib import Path

from errors import RunError, UsageError

try:
    import fcntl
except ImportError:  # Windows has no such locks: there nothing keeps two trainings from one run
    fcntl = None  # type: ignore[assignment]

RUNS = Path("runs")  # in the working directory
_locks: dict[Path, int] = {}  # the folders this process holds, open until it ends


def files_to_sample(path: Path) -> list[Path]:
    """The file itself, or of a run its best.pt and then its steps, newest first; UsageError if there is none."""
    if not path.exists():
        raise UsageError(f"{path} does not exist: give a checkpoint file or a run, such as runs/micro")
    if not path.is_dir():
        return [path]
    files = [best for best in [path / "best.pt"] if best.exists()] + step_files(path)
    if not files:
        raise UsageError(f"{path} has no checkpoint: neither best.pt nor step-*.pt")
    return files


def step_files(run: Path) -> list[Path]:
    """The step-*.pt of a run, newest first."""
    steps = {int(m[1]): path for path in run.glob("step-*.pt") if (m := re.fullmatch(r"step-(\d+)\.pt", path.name))}
    return [steps[step] for step in sorted(steps, reverse=True)]


def drop_old(run: Path, keep: int) -> None:
    """Delete the step checkpoints of a run but the newest `keep`."""
    for old in step_files(run)[keep:]:
        old.unlink()


def runs_of(name: str) -> list[Path]:
    """The runs of a configuration: runs/name, runs/name-2, …, oldest first."""
    numbered = _numbered(name)
    return [numbered[n] for n in sorted(numbered)]


def _numbered(name: str) -> dict[int, Path]:
    pattern = re.compile(rf"{re.escape(name)}(?:-([2-9]|[1-9]\d+))?")
    with_config = [path.parent for path in RUNS.glob("*/config.yaml")]  # without one, it was killed at its very start
    return {int(m[1] or 1): run for run in with_config if (m := pattern.fullmatch(run.name))}


def new_run(name: str) -> Path:
    """Make and return runs/name, or the next of runs/name-2 and so on: no run overwrites another."""
    n = max(_numbered(name), default=0) + 1
    while True:
        run = RUNS / (name if n == 1 else f"{name}-{n}")
        try:
            RUNS.mkdir(parents=True, exist_ok=True)
            run.mkdir()
            return run
        except OSError as error:
            if not (isinstance(error, FileExistsError) and RUNS.is_dir()):
                reason = f"{RUNS.resolve()} cannot be written ({error.strerror})"
                raise RunError(f"{reason}: train in a folder where you can make a folder called {RUNS}") from None
            n += 1  # a file has the name, or another training was faster


def newest_run() -> Path:
    """The run whose checkpoints are newest; UsageError if there is none."""
    files = [path for pattern in ("*/step-*.pt", "*/best.pt") for path in RUNS.glob(pattern)]
    if not files:
        raise UsageError(f"there is no run in {RUNS.resolve()}: train one with python train.py configs/micro.yaml")
    return max(files, key=lambda path: path.stat().st_mtime_ns).parent


def lock(run: Path) -> None:
    """Keep every other training out of this run until this process ends, however it ends; UsageError if one is in."""
    if fcntl is None or run.resolve() in _locks:
        return
    folder = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise UsageError(
            f"{run} is being written by another training: wait for it, or start a run of its own"
        ) from None
    except OSError:  # a file system without locks
        os.close(folder)
        return
    _locks[run.resolve()] = folder


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that it is the old or the new one at every moment, also after a crash."""
    aside = path.with_name(path.name + ".tmp")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
