"""Where and how a run computes: device, then dtype, then gradient scaler, then compile, each by the one before."""

import contextlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from errors import UsageError

# what autocast is used with, by device type; the first is for what `auto` cannot have. Apple's GPU counts as none of
# the others, and float16 is for CUDA alone because it needs the gradient scaler
DTYPES = {"cuda": ("float32", "bfloat16", "float16"), "cpu": ("float32", "bfloat16"), "mps": ("float32",)}


def choose_device(name: str) -> torch.device:
    """The device of `auto`, `cpu`, `cuda`, `cuda:N` or `mps`; UsageError where it does not exist."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise UsageError(f"device {name} does not exist: PyTorch sees {count} CUDA devices; use auto or cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError("device mps does not exist on this machine; use auto or cpu")
    return device


def describe(device: torch.device) -> str:
    """The device as a reader knows it."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def choose_dtype(device: torch.device, name: str) -> tuple[torch.dtype, str]:
    """The dtype of matrix products, and a notice where `auto` had to do without bfloat16; UsageError if impossible."""
    notice = ""
    # emulated bfloat16 counts as none: it is slower than float32
    has_bfloat16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto":
        name = "float32" if device.type != "cuda" else "bfloat16" if has_bfloat16 else "float16"
        if name == "float16":
            notice = ", because this GPU has no bfloat16"
    elif name not in DTYPES[device.type]:
        raise UsageError(f"dtype {name} cannot be used on {device.type}: choose {' or '.join(DTYPES[device.type])}")
    elif name == "bfloat16" and not has_bfloat16:
        raise UsageError("dtype bfloat16 is not supported by this GPU: choose float16 or float32")
    return getattr(torch, name), notice


def put(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor of the device."""
    return torch.from_numpy(array).to(device)


def limit_threads(model: torch.nn.Module) -> None:
    """One CPU thread below 50,000 parameters: there is too little to share, and on a busy machine a step that waits
    for its second thread takes ten times as long. The results are the same."""
    if sum(p.numel() for p in model.parameters()) < 50_000:
        torch.set_num_threads(1)


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Run matrix products in `dtype` (weights and sums stay float32); nothing at all for float32."""
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def make_scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """The gradient scaler, which does nothing except for float16 on CUDA: float16 gradients underflow without it."""
    return torch.amp.GradScaler(device.type, enabled=device.type == "cuda" and dtype == torch.float16)


def worth_compiling(device: torch.device, flops: float, steps: int) -> bool:
    """What `compile: auto` means: always on CUDA; on a CPU, where compiling takes about a minute and then saves a fifth
    of a large step and half of a tiny one, if the run would take more than ten minutes without.

    An update is taken to cost 2 ms and a second for every 50 GFLOP: by the configuration alone, so that a run that is
    started again is compiled again.
    """
    return device.type == "cuda" or (device.type == "cpu" and steps * (0.002 + flops / 50e9) > 600)
