"""Does this GPU compute what a CPU does, and how fast does it train? A line for every check: ok or FAILED, and figures.

    python benchmarks/gpu_check.py [--device cuda:1] [--small]

Compared with the CPU: losses and gradients, the cache, checkpoints, and trainings that go on with each other's. Then
configs/gpt2_124m.yaml trains for some updates on random text, in which anything that makes the CPU wait for the GPU
raises, and samples. Takes some minutes, downloads nothing and leaves nothing behind. --small cuts the models down and
does not compile; so it also runs with --device cpu, where it says little. Rates are reported, not judged.
"""

import argparse
import contextlib
import copy
import io
import json
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import checkpoint  # noqa: E402
import config as configuration  # noqa: E402
import corpus  # noqa: E402
import device as devices  # noqa: E402
import errors  # noqa: E402
import log  # noqa: E402
import optim  # noqa: E402
import tokenizer as tokenizers  # noqa: E402
import train  # noqa: E402
from config import Config, ModelConfig  # noqa: E402
from errors import RunError, UsageError  # noqa: E402
from generate import Sampling, generate  # noqa: E402
from model import GPT, flops_per_token  # noqa: E402
from reader import Source  # noqa: E402

SHAPE: dict[str, Any] = {"d_model": 64, "n_layers": 2, "n_heads": 4, "block_size": 64, "final_norm": True}
MODELS = {
    "GPT-2's parts": ModelConfig(norm="layernorm", mlp="gelu_tanh", tie_weights=True, bias=True, **SHAPE),
    "newer parts": ModelConfig(mlp="swiglu", position="rope", qk_norm=True, **SHAPE),
}
CUT = ["model.d_model=32", "model.n_layers=2", "model.n_heads=2", "model.block_size=32"]
Check = Iterator[tuple[bool, str]]  # (passed, what was found), a line each


def difference(a: Tensor, b: Tensor) -> float:
    """|a − b| / |b|"""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).norm() / b.norm())


def word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def low_precision(device: torch.device) -> torch.dtype:
    """What training uses on a GPU."""
    return torch.bfloat16 if device.type == "cpu" else devices.choose_dtype(device, "auto")[0]


def fresh(model_config: ModelConfig, device: torch.device) -> tuple[GPT, GPT, Tensor, Tensor]:
    """(a model on the CPU, the same on the device, ids, targets)."""
    torch.manual_seed(0)
    model = GPT(model_config, tokenizers.byte().vocab_size)
    ids, targets = torch.randint(0, model.vocab_size, (2, 4, model_config.block_size))
    return model, copy.deepcopy(model).to(device), ids, targets


def gradients(device: torch.device, small: bool) -> Check:
    """Loss and gradient of a batch against those of the CPU in float32."""

    def loss_and_gradient(model: GPT, function: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        here = model.wte.weight.device
        devices.set_float32_products(here, dtype)
        with devices.autocast(here, dtype):
            loss = function(ids.to(here), targets.to(here)).mean()
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        return loss, gradient

    for name, model_config in MODELS.items():
        reference, model, ids, targets = fresh(model_config, device)
        expected = loss_and_gradient(reference, reference, torch.float32)
        low = low_precision(device)
        trials = [(torch.float32, model, "", 1e-5, 1e-4), (low, model, "", 1e-2, 5e-2)]
        if not small:
            trials.append((low, torch.compile(model), ", compiled", 1e-2, 5e-2))
        for dtype, function, how, most_loss, most_gradient in trials:
            loss, gradient = map(difference, loss_and_gradient(model, function, dtype), expected)
            ok = loss < most_loss and gradient < most_gradient
            figures = f"loss {loss:.1e} off, at most {most_loss:g}, gradient {gradient:.1e}, at most {most_gradient:g}"
            yield ok, f"{name}, {word(dtype)}{how}: {figures}"


def flash(device: torch.device, small: bool) -> Check:
    """PyTorch's flash kernel takes the model's queries, keys and values (on GPUs from Ampere on); else this raises."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return
    for name, model_config in MODELS.items():
        _, model, ids, targets = fresh(model_config, device)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), devices.autocast(device, low_precision(device)):
            model(ids.to(device), targets.to(device)).mean().backward()
        yield True, f"{name}, flash attention"


@torch.no_grad()
def cached(device: torch.device, small: bool) -> Check:
    """Logits from the cache, of many, several and single new tokens, against those of the whole window."""
    devices.set_float32_products(device, torch.float32)
    for name, model_config in MODELS.items():
        _, model, ids, _ = fresh(model_config, device)
        ids, cache, half = ids.to(device), model.new_cache(), model_config.block_size // 2
        whole, start, off = model(ids), 0, 0.0
        for n in (half, half // 2, *[1] * (half - half // 2)):
            off = max(off, difference(model(ids[:, start : start + n], cache=cache), whole[:, start + n - 1]))
            start += n
        yield off < 1e-4, f"{name}, logits with the cache: {off:.1e} off, at most 1e-4"


def checkpoints(device: torch.device, small: bool) -> Check:
    """Saved on one device, loaded on the other."""
    model_config = MODELS["newer parts"]
    for source, target in ((device, torch.device("cpu")), (torch.device("cpu"), device)):
        model = fresh(model_config, source)[1]
        content = {"config": Config(model_config).to_yaml(), "tokenizer": tokenizers.byte().to_dict()}
        content |= {"documents": None, "fingerprint": "", "row": {"step": 0}}
        checkpoint.save(Path("model.pt"), content | {"model": checkpoint.weights_of(model)})
        loaded = checkpoint.load("model.pt", target)[0]
        pairs = list(zip(model.parameters(), loaded.parameters(), strict=True))
        same = sum(torch.equal(a.cpu(), b.cpu()) and b.device.type == target.type for a, b in pairs)
        yield same == len(pairs), f"saved on {source}, loaded on {target}: {same} of {len(pairs)} tensors the same"


def trained(config: Config, name: str, resume: Path | None = None) -> list[dict[str, Any]]:
    """Train without printing; the rows of metrics.jsonl. The run is runs/<name>, or the one that is resumed."""
    with contextlib.redirect_stdout(io.StringIO()):
        train.train(config, name, resume)
    file = (resume or Path("runs", name)) / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def going_on(device: torch.device, small: bool) -> Check:
    """Trainings that go on with one of the CPU's, on the CPU and on the device, and the other way round."""
    common = ["train.eval_every=100", "train.checkpoint_every=5", "train.samples=0", "train.batch_size=32"]
    start = configuration.load(
        ROOT / "configs" / "micro.yaml", [*common, "train.max_steps=10", "train.device=cpu", "train.compile=false"]
    )
    trained(start, "start")

    def on(source: str, name: str, until: int, *overrides: str) -> Tensor:
        """The losses of a copy of runs/<source>, called `name`, that goes on."""
        run = Path("runs", name)
        shutil.copytree(Path("runs", source), run)
        overrides = (f"train.max_steps={until}", *overrides)
        return torch.tensor([row["train_loss"] for row in trained(at(run, *overrides), name, run)])

    def at(run: Path, *overrides: str) -> Config:
        return configuration.load(run / "config.yaml", overrides)

    here = (f"train.device={device}", "train.dtype=float32")
    expected = on("start", "cpu", 20)
    off = difference(on("start", "device", 20, *here), expected)
    yield off < 1e-5, f"a training of the CPU goes on, float32: losses {off:.1e} off, at most 1e-5"
    low = word(low_precision(device))
    faster = (f"train.dtype={low}", f"train.compile={'false' if small else 'true'}")
    off = difference(on("start", "faster", 20, here[0], *faster), expected)
    yield off < 1e-3, f"a training of the CPU goes on, {low}: losses {off:.1e} off, at most 1e-3"
    off = difference(on("device", "back", 25, "train.device=cpu"), on("device", "forth", 25, *here))
    yield off < 1e-5, f"a training of {device} goes on, on the CPU: losses {off:.1e} off, at most 1e-5"
    shutil.copytree("runs/device", "runs/resumed")
    Path("runs/resumed/step-000020.pt").unlink()
    trained(at(Path("runs/resumed")), "resumed", Path("runs/resumed"))
    first, second = (checkpoint.load(f"runs/{name}/step-000020.pt")[0] for name in ("device", "resumed"))
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    off = max(difference(a, b) for a, b in pairs)
    exact = "bit for bit" if all(torch.equal(a, b) for a, b in pairs) else "not bit for bit"
    yield off < 1e-3, f"resumed on {device} after 15 of 20 updates, {exact}: weights {off:.1e} off, at most 1e-3"


def random_text(vocab_size: int, length: int) -> str:
    """Of vocab_size − 1 different characters, the k-th of them with a probability of about 1 / k, as words have."""
    rng, n = np.random.default_rng(0), vocab_size - 1
    ranks = np.concatenate([rng.permutation(n), np.exp(rng.uniform(0, math.log(n), length)).astype(np.int64)])
    return (0x10000 + ranks).astype("<u4").tobytes().decode("utf-32-le")


def rows_that_fit(device: torch.device) -> int:
    """Rows of 1,024 tokens in one slice of GPT-2 small's training: about 1.5 GB each, besides 3 GB; a power of two."""
    memory = torch.cuda.get_device_properties(device).total_memory / 1e9
    return 1 << max(0, int(math.log2(max(1.0, (memory - 3) / 1.5))))


def training(device: torch.device, small: bool) -> Check:
    """GPT-2 small trains; the run stays for the samples. From its sixth update on, no update may wait for the GPU."""
    Path("random.txt").write_text(random_text(300 if small else 50_257, 20_000 if small else 2_000_000), "utf-8")
    corpus.prepare("random", Source([Path("random.txt")], None), "char", 0.1, 0)
    rows, on_gpu, first, steps = 8 if small else rows_that_fit(device), device.type == "cuda", 5, 20
    overrides = ["data.name=random", f"train.device={device}", f"train.max_steps={steps}", "train.samples=0"]
    overrides += [f"train.batch_size={4 * rows}", "train.accumulation=4", *(CUT if small else [])]
    overrides += ["optim.warmup_steps=2", f"train.compile={'false' if small else 'true'}"]
    config = configuration.load(ROOT / "configs" / "gpt2_124m.yaml", overrides)
    try:
        losses, seconds = timed(config, "random", first, watch=True)
        yield True, f"updates {first + 1} to {steps} do not wait for the GPU"
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        traceback.print_exc()
        yield False, "an update waits for the GPU, see above where"
        shutil.rmtree("runs/random")
        losses, seconds = timed(config, "random", first, watch=False)
    yield losses[-1] < losses[0], f"GPT-2 small, loss on random text: {losses[0]:.3f}, then {losses[-1]:.3f}"
    dtype = devices.choose_dtype(device, "auto")[0]
    peak, source = devices.peak_flops(device, dtype)
    rate = (steps - first) * config.train.batch_size * config.model.block_size / seconds
    share = rate * flops_per_token(checkpoint.load("runs/random")[0]) / peak
    memory = f", {torch.cuda.max_memory_allocated(device) / 1e9:.0f} GB" if on_gpu else ""
    yield (
        True,
        f"GPT-2 small, {word(dtype)}, slices of {rows} rows: {rate:,.0f} tokens/s, "
        f"{share:.0%} of {peak / 1e12:,.2f} TFLOP/s ({source}){memory}",
    )


class NothingRead(TorchDispatchMode):
    """Raises where a value is read from a tensor, which on a GPU waits for it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError(f"{function} would be synchronizing")
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Raises RuntimeError where the CPU waits for the GPU, or on a CPU, where it would."""
    if device.type == "cpu":
        with NothingRead():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def timed(config: Config, name: str, first: int, watch: bool) -> tuple[list[float], float]:
    """(the losses of a training, the seconds of the updates after the first so many); watch: those must not wait."""
    times, watching = list[float](), contextlib.ExitStack()
    add, learning_rate = log.Log.add, optim.learning_rate

    def before_update(step: int, *args: Any) -> float:
        if watch and step >= first:
            watching.enter_context(no_waiting(torch.device(config.train.device)))
        return learning_rate(step, *args)

    def after_update(self: log.Log, row: dict[str, Any]) -> None:
        watching.close()
        if row["step"] in (first, config.train.max_steps):
            row["train_loss"].item()  # wait: until here it is asked for, not computed
            times.append(time.perf_counter())
        add(self, row)

    hooks = (mock.patch.object(optim, "learning_rate", before_update), mock.patch.object(log.Log, "add", after_update))
    with watching, hooks[0], hooks[1]:
        rows = trained(config, name)
    return [row["train_loss"] for row in rows], times[1] - times[0]


def sampling(device: torch.device, small: bool) -> Check:
    """Tokens a second with the cache and without."""
    devices.set_float32_products(device, torch.float32)
    model, length, rates, texts = checkpoint.load("runs/random", device)[0], 24 if small else 256, [], []
    generate(model, [[0]], 8, Sampling(), 0)
    for use_cache, rows in ((True, 1), (False, 1), (True, 64)):
        start = time.perf_counter()
        texts.append(generate(model, [[0]] * rows, length, Sampling(), 0, use_cache=use_cache)[0])
        rates.append(rows * length / (time.perf_counter() - start))
    one, naive, many = rates
    text = f"sampling {length} tokens: {one:,.0f} tokens/s with the cache, {naive:,.0f} without ({one / naive:.1f} ×)"
    same = sum(a == b for a, b in zip(texts[0], texts[1], strict=True))
    yield same == length, f"{text}, {same} of {length} the same; {many:,.0f} tokens/s in 64 rows"


CHECKS = [gradients, flash, cached, checkpoints, going_on, training, sampling]


def main() -> None:
    parser = errors.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda (default) | cuda:1 | cpu")
    parser.add_argument(
        "--small", action="store_true", help="cut-down models, not compiled: seconds (always so on a CPU)"
    )
    args = parser.parse_args()
    configuration.check_device("--device ", args.device)
    device = devices.choose_device(args.device)
    if device.type == "mps":
        raise UsageError(f"--device {args.device}: this is for CUDA; use cpu to try it")
    small = args.small or device.type == "cpu"
    print(f"PyTorch {torch.__version__}, {devices.describe(device)}", flush=True)
    warnings.filterwarnings("ignore", "Synchronization debug mode")  # is a prototype, it says
    failed, began, before = 0, time.perf_counter(), Path.cwd()
    with tempfile.TemporaryDirectory() as place, mock.patch.object(corpus, "PREPARED", Path(place, "prepared")):
        os.chdir(place)
        try:
            for check in CHECKS:
                try:
                    for ok, text in check(device, small):
                        failed += not ok
                        print(f"{'ok' if ok else 'FAILED':<8}{text}", flush=True)
                except Exception as error:  # the other checks may have something to say
                    failed += 1
                    traceback.print_exc()
                    reason = " ".join(str(error).split())[:200]
                    print(f"FAILED  {check.__name__}: {type(error).__name__}: {reason}", flush=True)
        finally:
            os.chdir(before)
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    if failed:
        raise RunError(f"{failed} checks failed")


if __name__ == "__main__":
    errors.run(main)
