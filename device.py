"""Where and how a run computes: device, then dtype, then gradient scaler, then compile, each by the one before."""

import contextlib
from collections.abc import Callable
from typing import Any

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


def compile_model(
    model: torch.nn.Module, wanted: str | bool, device: torch.device, trial: Callable[[Callable[..., Tensor]], None]
) -> tuple[Callable[..., Tensor], str]:
    """(what to call for training, a word on it). `trial` runs it once forward and backward, since compiling is lazy.

    auto compiles on CUDA; on a CPU a run of minutes does not earn back the minute that compiling takes. Where compiling
    fails, auto goes on without (the word says so) and true raises UsageError.
    """
    if wanted is False or (wanted == "auto" and device.type != "cuda"):
        return model, "off"
    try:
        compiled = torch.compile(model)
        trial(compiled)
    except Exception as error:  # whatever the compiler stack raises where a part of it is missing
        reason = str(error).strip().split("\n")[0][:200]
        if wanted is True:
            raise UsageError(f"train.compile=true, but compiling fails here ({reason}); use auto or false") from None
        return model, f"off, because compiling fails here ({reason})"
    return compiled, "on"
