"""Train a GPT. The run is written to runs/<name of the config>: config.yaml, metrics.jsonl, step-*.pt and best.pt."""

import argparse
import math
import re
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import config as configuration
import errors
import runs
from config import Config
from errors import Interrupted, RunError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from model import GPT
    from optim import Optimizer

READ_EVERY = 0.5  # seconds between reading losses back from the device, which waits for it each time


def main() -> None:
    parser = errors.Parser(
        description=__doc__,
        epilog=configuration.describe_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "config", nargs="?", help="a YAML file, such as configs/micro.yaml; to resume, also a run: runs/micro"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="on top of the file")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the newest run of the config, or the given run"
    )
    args = parser.parse_intermixed_args()
    if args.config is None:
        raise UsageError("give a config, such as configs/micro.yaml (--help shows what can be given)")
    path, run, notes = Path(args.config), None, list[str]()
    if args.resume:
        run = run_to_resume(path)
        if (run / "config.yaml").is_file() and not (run / "config.yaml").stat().st_size:
            raise UsageError(f"{run / 'config.yaml'} is empty: copy the file of the config this run was started with")
        config = configuration.load(run / "config.yaml", args.overrides)
        if path.is_file():
            notes = differences(path, config, args.overrides)
    elif path.is_dir():
        raise UsageError(f"{path} is a folder: add --resume to go on with a run, or give a YAML file to start one")
    else:
        config = configuration.load(path, args.overrides)
    try:
        train(config, path.stem, run, notes)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not re.search(r"out of memory|allocate memory", str(error)):
            raise
        rows, block = config.train.batch_size // config.train.accumulation, config.model.block_size
        raise RunError(
            f"out of memory with {rows} rows of {block} tokens at once: raise train.accumulation, or lower "
            f"train.batch_size, model.block_size or the size of the model"
        ) from None


def run_to_resume(path: Path) -> Path:
    """The run that --resume means: the folder itself, or the newest run of a config file."""
    if path.suffix == ".pt":
        raise UsageError(f"{path} is one checkpoint: to resume, give its run, {path.parent}")
    if path.is_dir():
        return path
    configuration.load(path)
    if not (found := runs.runs_of(path.stem)):
        raise UsageError(f"there is no run of {path} in {runs.RUNS.resolve()}: start one without --resume")
    return found[-1]


def differences(path: Path, config: Config, overrides: list[str]) -> list[str]:
    """Where the file of a resumed run differs from the run, which keeps its own values."""
    given, own = {override.partition("=")[0] for override in overrides}, config.flat()
    return [
        f"{path} has {key}={value}, but the run keeps its {own[key]}"
        for key, value in configuration.load(path).flat().items()
        if key not in given and value != own[key]
    ]


def train(config: Config, name: str, resume: Path | None = None, notes: Iterable[str] = ()) -> None:
    """Train as configured, in a new run called `name`, or going on with the run `resume`; `notes` are printed first."""
    # only now, with a valid configuration: importing torch takes seconds
    import torch

    import checkpoint
    import device as devices
    from dataset import Data
    from evaluate import total_loss
    from generate import Sampling, generate, start_of_text
    from log import Log
    from model import GPT, flops_per_token, parameter_table
    from optim import Optimizer, learning_rate

    settings, max_steps = config.train, config.train.max_steps
    deadline = time.monotonic() + 60 * (settings.max_minutes or float("inf"))
    device = devices.choose_device(settings.device)
    dtype, notice = devices.choose_dtype(device, settings.dtype)
    devices.set_float32_products(device, dtype)
    scaler = devices.make_scaler(device, dtype)
    saved: dict[str, Any] = {}
    damaged: list[Path] = []
    if resume:
        runs.lock(resume)
        if files := runs.step_files(resume):  # else it was stopped before its first checkpoint: from the beginning
            file, saved = checkpoint.read_first(files)
            damaged = files[: files.index(file)]
            notes = [*notes, *check_resumable(config, saved, file, str(dtype))]
    data = Data(config.data, config.model, settings.seed)
    tokenizer = data.tokenizer

    # model and optimizer, fresh or as the run's newest whole checkpoint has them
    torch.manual_seed(settings.seed)
    with torch.device(device):
        model = GPT(config.model, tokenizer.vocab_size)
    devices.limit_threads(model)
    optimizer = Optimizer(model, config.optim)

    if saved and saved["fingerprint"] != data.fingerprint:
        raise UsageError(f"data.name={config.data.name} is not the data of {file}: prepare that text again")
    flops = flops_per_token(model) * settings.batch_size * config.model.block_size
    compiled = settings.compile
    if compiled == "auto":  # a run that goes on is compiled if it was, whatever its length is now
        compiled = saved["compiled"] if saved else devices.worth_compiling(device, flops, max_steps)

    def prepare(step: int) -> tuple[list[torch.Tensor], int]:
        """What update `step` learns from: inputs and targets on the device, and how many of the targets count."""
        rows = data.train.batch(step, settings.batch_size)
        return [devices.put(array, device) for array in rows], int((rows[1] >= 0).sum())

    done = saved["row"]["step"] if saved else 0
    rows, n_targets = prepare(done)
    autocast = devices.autocast(device, dtype)
    update, compiling = make_update(model, optimizer, scaler, config, autocast, compiled, rows)
    best = float("inf")
    row: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0}
    if saved:
        checkpoint.load_weights(model, saved["model"], file)
        optimizer.load_state_dict(saved["optimizer"])
        if scaler.is_enabled() and saved["scaler"]:
            scaler.load_state_dict(saved["scaler"])
        best, row = saved["best"], saved["row"]
        saved.clear()  # the rest of it is not needed any more

    # everything fits together: from here on something is written
    tokens = row["tokens"]
    run = resume or runs.new_run(name)
    if not resume:
        runs.lock(run)
        runs.replace_text(run / "config.yaml", config.to_yaml())
    for newer in damaged:  # by its name it would outlive the checkpoints that are to come
        newer.replace(newer.with_suffix(".damaged"))
    for note in notes:
        print(f"resume  {note}")
    print(f"run     {run}" + (f", after step {done:,} of {max_steps:,}" if resume else f", {max_steps:,} steps"))
    print(data.describe())
    for part, shape, count in (table := parameter_table(model)):
        print(f"model   {part:<22} {shape!s:<14} {count:>13,}")
    print(f"model   {'total':<37} {sum(count for _, _, count in table):>13,}")
    precision, scaling = str(dtype).removeprefix("torch."), "on" if scaler.is_enabled() else "off"
    print(f"device  {devices.describe(device)}, {precision}, gradient scaler {scaling}, compile {compiling}{notice}")
    size = settings.batch_size * config.model.block_size
    slices = f", in {settings.accumulation} slices" if settings.accumulation > 1 else ""
    print(f"update  {settings.batch_size} rows of {config.model.block_size} = {size:,} tokens{slices}", flush=True)

    full_rate = None
    if device.type == "cuda":
        peak, source = devices.peak_flops(device, dtype)
        full_rate = peak / flops_per_token(model)
        print(f"peak    {peak / 1e12:,.0f} TFLOP/s ({source}), which would be {full_rate:,.0f} tokens/s", flush=True)

    hopeless = 100 + 100 * math.log(tokenizer.vocab_size)  # a hundred times the loss of guessing
    log = Log(run / "metrics.jsonl", row, max_steps, scaler.is_enabled(), full_rate, hopeless)

    def to_sample_from(row: dict[str, Any]) -> dict[str, Any]:
        """What best.pt holds: the model after update row["step"], and all that is needed to use it."""
        return {
            "config": config.to_yaml(),
            "tokenizer": tokenizer.to_dict(),
            "documents": data.meta["documents"],
            "fingerprint": data.fingerprint,
            "row": row,
            "model": checkpoint.weights_of(model),
        }

    def save(row: dict[str, Any]) -> Path:
        """Save everything that the rest of the run depends on, as it is after update row["step"]."""
        state = {
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "dtype": str(dtype),
            "compiled": compiling == "on",
            "best": best,
        }
        file = run / f"step-{row['step']:06d}.pt"
        runs.drop_old(run, settings.keep)  # before as well: the disk may be full of them
        checkpoint.save(file, to_sample_from(row) | state)
        runs.replace_text(run / "config.yaml", config.to_yaml())  # not before: a resume with new values may fail
        runs.drop_old(run, settings.keep)
        return file

    def settle(row: dict[str, Any]) -> None:
        """What follows a save: evaluation and samples where they are due, and the update's row in the log."""
        nonlocal best
        if row["step"] % settings.eval_every == 0 or row["step"] == max_steps:
            total, _ = total_loss(model, data.val, autocast)
            row["val_loss"] = total / data.val_characters
            if not math.isfinite(row["val_loss"]):
                raise RunError(f"the validation loss is {row['val_loss']} at step {row['step']}: the run has diverged")
            speed = f"  {log.speed}" if full_rate and log.rate else ""
            log.say(f"{log.line(row)}{speed}  val loss {row['val_loss']:.4f} nats per character")
            if row["val_loss"] < best:
                best = row["val_loss"]
                checkpoint.save(run / "best.pt", to_sample_from(row))
            if settings.samples:
                prompts = [start_of_text(tokenizer, data.meta["documents"], "")] * settings.samples
                length = max(64, config.model.block_size)
                for new in generate(model, prompts, length, Sampling(), settings.seed, tokenizer.bos_id):
                    log.say("    " + tokenizer.decode(new).replace("\n", "\n    "))
        log.write()

    with Stop(run) as stop:
        if row["step"]:
            settle(row)  # the run may have been killed between the save and this
        start = time.perf_counter() - row["seconds"]  # as if there had been nothing but training
        while done < max_steps:
            lr = learning_rate(done, config.optim, max_steps)
            optimizer.lr.fill_(lr)
            if config.model.dropout:
                torch.manual_seed(settings.seed + 1_000_003 * (done + 1))  # so there is no random state to save
            train_loss, grad_norm = update(*rows)  # nothing in it waits for a GPU, which is still at work afterwards
            done, tokens = done + 1, tokens + n_targets
            rows, n_targets = prepare(done)  # meanwhile
            row = {"step": done, "train_loss": train_loss, "val_loss": None, "lr": lr, "grad_norm": grad_norm}
            row |= {"tokens": tokens, "tokens_per_s": None, "seconds": time.perf_counter() - start}
            log.add(row)
            stopping = stop.status or (143 if time.monotonic() > deadline else 0)
            due = done == max_steps or done % settings.eval_every == 0 or done % settings.checkpoint_every == 0
            if due or stopping:
                log.read()
                row["seconds"] = paused = time.perf_counter() - start
                log.write(all_but_last=True)
                file = save(row)
                settle(row)
                start = time.perf_counter() - paused
                if stopping:
                    log.bar.close()
                    again = f"python train.py {run} --resume"
                    raise Interrupted(f"stopped after step {done} and saved {file}; go on with: {again}", stopping)
            elif row["seconds"] - log.last_read["seconds"] > READ_EVERY:
                log.read()
                log.write()
    log.bar.close()
    print(f"done    val loss {row['val_loss']:.4f} nats per character at step {done:,}, best {best:.4f}, in {run}")
    print(f"sample  python sample.py --checkpoint {run}")


def make_update(
    model: "GPT",
    optimizer: "Optimizer",
    scaler: "torch.amp.GradScaler",
    config: Config,
    autocast: AbstractContextManager[Any],
    compiled: bool,
    example: "list[Tensor]",
) -> "tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], str]":
    """(the function that makes an update, a word on how it is compiled).

    The function takes the inputs and targets of all rows, (batch_size, T) each, and returns the loss per target and the
    norm of its gradient, as tensors of the device. `example` is what it is tried with where it is to be compiled.
    """
    import torch
    from torch import Tensor
    from torch.func import functional_call, grad_and_value

    import device as devices
    from optim import clip

    forward: Any = model

    def by_slices(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Slice after slice forward and backward, then one step of the optimizer."""
        n_targets, train_loss = (targets >= 0).sum(), torch.zeros((), device=inputs.device)
        size = config.train.batch_size // config.train.accumulation
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            with autocast:
                loss = forward(x, y).sum() / n_targets  # of the whole update, so that slicing changes nothing
            scaler.scale(loss).backward()
            train_loss += loss.detach()
        scaler.unscale_(optimizer)  # type: ignore[arg-type]  # the order matters: unscale, clip, step, update
        grad_norm = clip(optimizer.gradients(), config.optim.grad_clip)
        scaler.step(optimizer)  # type: ignore[arg-type]
        scaler.update()
        model.zero_grad()
        return train_loss, grad_norm

    def at_once(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The same in one function of tensors, of which torch.compile makes one piece of code."""

        def loss_of(weights: dict[str, Tensor]) -> Tensor:
            with autocast:
                return functional_call(model, weights, (inputs, targets)).sum() / (targets >= 0).sum()

        grads, train_loss = grad_and_value(loss_of)(optimizer.weights)
        grad_norm = clip(grads, config.optim.grad_clip)
        optimizer.update(grads)
        return train_loss, grad_norm

    if not compiled:
        return by_slices, "off"
    print("compile for half a minute, less when it was compiled before …", flush=True)
    # a tiny model waits for Python most, and one piece has least of it; a larger one would only compile longer
    tiny = sum(p.numel() for p in model.parameters()) < devices.TINY
    whole = tiny and example[0].device.type == "cpu" and config.train.accumulation == 1
    update = at_once if whole else by_slices
    try:
        if whole:
            update = torch.compile(at_once)
        else:
            forward = torch.compile(model)
        update(*example)  # compiling is lazy; the learning rate is still 0, so that no weight changes
        word = "on"
    except Exception as error:  # whatever the compiler stack raises where a part of it is missing
        reason = str(error).strip().split("\n")[0][:200]
        if config.train.compile is True:
            raise UsageError(f"train.compile=true, but compiling fails here ({reason}); use auto or false") from None
        forward, update, word = model, by_slices, f"off, because compiling fails here ({reason})"
    model.zero_grad()
    optimizer.reset()
    return update, word


def check_resumable(config: Config, saved: dict[str, Any], file: Path, dtype: str) -> list[str]:
    """What changes on resuming; UsageError for what would make it another model, other data or another optimizer."""
    from optim import learning_rate

    needed = {"optimizer", "scaler", "dtype", "compiled", "best"}
    if not needed <= saved.keys() or set(saved["optimizer"]) != {*saved["model"], "steps"}:
        raise UsageError(f"{file} has weights but no optimizer state: it can be sampled, not resumed")
    before, done = configuration.parse(saved["config"], str(file)), saved["row"]["step"]
    old, new, notes = before.flat(), config.flat(), list[str]()
    for key in (key for key in new if new[key] != old[key]):
        if key.startswith(("model.", "data.")) or key == "optim.name":
            raise UsageError(f"{key}={new[key]} does not fit {file}, which has {old[key]}: start a new run for it")
        notes.append(f"{key} was {old[key]}, now {new[key]}")
    if config.train.max_steps < done:
        raise UsageError(f"train.max_steps={config.train.max_steps} is behind {file}: give at least {done}")
    steps = before.train.max_steps
    was = learning_rate(done, before.optim, steps) if done < steps else 0.0
    if done < config.train.max_steps and was != (now := learning_rate(done, config.optim, config.train.max_steps)):
        notes.append(f"the schedule changes: the next learning rate would have been {was:.3g}, it is {now:.3g}")
    if saved["dtype"] != dtype:
        notes.append(f"the precision changes: {saved['dtype']} until now, {dtype} from here on")
    return notes


class Stop:
    """Ctrl-C, or the SIGTERM of a job scheduler: remembered until the update is done. A second Ctrl-C stops at once."""

    def __init__(self, run: Path) -> None:
        self.run, self.status = run, 0

    def __enter__(self) -> "Stop":
        self.before = {number: signal.signal(number, self.caught) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def caught(self, number: int, frame: FrameType | None) -> None:
        if self.status and number == signal.SIGINT:
            raise Interrupted(f"stopped at once; go on with: python train.py {self.run} --resume", 130)
        self.status = 128 + number  # 130 and 143, as shells have it


if __name__ == "__main__":
    errors.run(main)
