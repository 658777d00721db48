"""The record of a run: metrics.jsonl, a row an update, and what is shown meanwhile."""

import collections
import contextlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from errors import RunError
from runs import replace_text

LINE_EVERY = 10.0  # seconds between plain lines, where there is no terminal for a bar

Row = dict[str, Any]


class Log:
    """Rows go through three stations: `add`ed with tensors in them, `read` back from the device, `written` to the file.

    Reading waits for the device, so rows are read together, now and then, and always before anything is saved.
    """

    def __init__(
        self,
        path: Path,
        row: Row,
        max_steps: int,
        scaled: bool,
        full_rate: float | None = None,
        hopeless: float = math.inf,
    ):
        """Go on after `row`, cutting the file back to the rows before it.

        scaled: a gradient may overflow. full_rate: tokens/s that would use all that the device can compute. hopeless: a
        loss that is only reached by diverging.
        """
        self.path, self.max_steps, self.scaled, self.hopeless = path, max_steps, scaled, hopeless
        self.full_rate, self.rate = full_rate, 0.0
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.exists() else []
        replace_text(path, "".join(line for line in lines if _step(line) < row["step"]))
        self.last_read, self.last_shown = row, time.monotonic()
        self.added: list[Row] = []
        self.unwritten: list[Row] = [row] if row["step"] else []  # complete but for its evaluation
        self.recent: collections.deque[float] = collections.deque(maxlen=100)
        hide = not sys.stderr.isatty()
        self.bar = tqdm(total=max_steps, initial=row["step"], unit="step", dynamic_ncols=True, disable=hide)

    def add(self, row: Row) -> None:
        self.added.append(row)

    def read(self) -> None:
        """Make numbers of the tensors; RunError for the first that no training comes back from."""
        before, last = self.last_read, self.added[-1]
        rate = self.rate = (last["tokens"] - before["tokens"]) / max(1e-9, last["seconds"] - before["seconds"])
        for row in self.added:
            loss, norm = float(row["train_loss"]), float(row["grad_norm"])
            if not (loss < self.hopeless and (math.isfinite(norm) or self.scaled)):
                raise RunError(
                    f"diverged at step {row['step']}: train loss {loss:.4g}, gradient norm {norm:.4g}, learning rate "
                    f"{row['lr']:.3g}; no checkpoint from here on was written; a lower learning rate usually helps"
                )
            # float16: an overflow is no number, the scaler skips the update
            row |= {"train_loss": loss, "grad_norm": norm if math.isfinite(norm) else None, "tokens_per_s": round(rate)}
            self.recent.append(loss)
        self.unwritten += self.added
        self.added, self.last_read = [], last
        self.bar.n = last["step"]
        self.bar.set_postfix_str(f"loss {self.loss:.4f}, lr {last['lr']:.2e}, {self.speed}")
        if self.bar.disable and time.monotonic() - self.last_shown > LINE_EVERY:
            left = (self.max_steps - last["step"]) * last["seconds"] / last["step"]
            self.say(f"{self.line(last)}  {self.speed}  {left:.0f} s left")

    def write(self, all_but_last: bool = False) -> None:
        """Append the rows that were read; all but the last, before a checkpoint that holds the last itself."""
        rows = self.unwritten[:-1] if all_but_last else self.unwritten
        with open(self.path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            if all_but_last:  # the checkpoint must not know of rows that a crash can lose
                file.flush()
                os.fsync(file.fileno())
        del self.unwritten[: len(rows)]

    @property
    def loss(self) -> float:
        """Mean train loss of the last 100 updates: that of a single one says little."""
        return sum(self.recent) / max(1, len(self.recent))

    @property
    def speed(self) -> str:
        """Tokens a second when last read; with full_rate also as a share of it, the model FLOP utilisation."""
        share = f" ({self.rate / self.full_rate:.0%} of peak)" if self.full_rate else ""
        return f"{self.rate:,.0f} tokens/s{share}"

    def line(self, row: Row) -> str:
        """The start of every line that is shown."""
        step = f"step {row['step']:>6,}/{self.max_steps:,}"
        return f"{step}  loss {self.loss:.4f}  lr {row['lr']:.2e}  {row['seconds']:.1f} s"

    def say(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        self.bar.write(text, file=sys.stdout)
        sys.stdout.flush()
        self.last_shown = time.monotonic()


def _step(line: str) -> float:
    """The step of a written row; beyond all for half a row, as a crash can leave it."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return float(json.loads(line)["step"])
    return math.inf


class _Lines:
    """stderr for a bar where there is no terminal: a line each time instead of one line drawn over."""

    def write(self, text: str) -> None:
        if text.strip():
            sys.stderr.write(text.strip() + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def progress(total: int, unit: str, what: str) -> tqdm:
    """A bar with rate and time left for work of more than two seconds; lines every ten seconds without a terminal."""
    if sys.stderr.isatty():
        return tqdm(total=total, unit=unit, unit_scale=True, desc=what, delay=2, leave=False, dynamic_ncols=True)
    bar = tqdm(
        total=total, unit=unit, unit_scale=True, desc=what, leave=False, ncols=100, delay=LINE_EVERY, file=_Lines()
    )
    bar.mininterval = bar.maxinterval = LINE_EVERY
    return bar
