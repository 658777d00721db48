"""Where and how a run computes: device, then dtype, then gradient scaler, then compile, each by the one before."""

import contextlib
import math
import time
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from errors import UsageError

# what autocast is used with, by device type; the first is for what `auto` cannot have. Apple's GPU counts as none of
# the others, and float16 is for CUDA alone because it needs the gradient scaler
DTYPES = {"cuda": ("float32", "bfloat16", "float16"), "cpu": ("float32", "bfloat16"), "mps": ("float32",)}

TINY = 50_000  # parameters, below which a step is mostly Python and waiting

# dense teraflop/s in bfloat16 (T4 and V100: float16), summed in float32, by the names that PyTorch gives; from NVIDIA's
# data sheets and architecture papers, half of what they list "with sparsity"
PEAKS = {
    "NVIDIA B200": 2250,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A10": 125,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181,
    "NVIDIA L40S": 362,
    "NVIDIA RTX A6000": 155,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 4090": 165,
    "NVIDIA GeForce RTX 5090": 209,
    "Tesla T4": 65,
    "Tesla V100-SXM2-16GB": 125,
    "Tesla V100-SXM2-32GB": 125,
    "Tesla V100-PCIE-16GB": 112,
}


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


def set_float32_products(device: torch.device, dtype: torch.dtype) -> None:
    """The float32 matrix products of a GPU: exact where float32 was asked for, else in TensorFloat-32 where it has that
    (10 bits of mantissa, 8 times as fast on an A100). On other devices nothing changes."""
    if device.type == "cuda":
        # PyTorch 2.9 calls this the old way, but its compiler refuses the new one; all compilers advise against exact
        warnings.filterwarnings("ignore", "Please use the new API settings|TensorFloat32 tensor cores")
        torch.set_float32_matmul_precision("highest" if dtype == torch.float32 else "high")


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(operations a second that the device can do at most in matrix products of `dtype`, where that is from): from the
    data sheet, or, for another device or float32, from the fastest of ten products of large matrices."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if dtype != torch.float32 and name in PEAKS:
        return PEAKS[name] * 1e12, "data sheet"
    n, fastest = 8192 if device.type == "cuda" else 1024, math.inf
    x = torch.randn(n, n, device=device, dtype=dtype)  # of zeros a GPU computes faster, at less power
    for _ in range(10):
        start = time.perf_counter()
        (x @ x)[0, 0].item()  # waits for the device
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * n**3 / fastest, "measured"


def put(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor of the device. To a GPU it goes from page-locked memory, so that the CPU need not wait for
    the copy; PyTorch hands that memory out again only when the copy is done."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)  # rows with gaps would go by ordinary memory


def limit_threads(model: torch.nn.Module, rows: int | None = None) -> None:
    """One CPU thread for a tiny model, and to sample a single row: there is too little to share, and on a busy machine
    what waits for a second thread takes ten times as long. The results are the same."""
    if rows == 1 or sum(p.numel() for p in model.parameters()) < TINY:
        torch.set_num_threads(1)


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Run matrix products in `dtype` (weights and sums stay float32); nothing at all for float32."""
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def make_scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """The gradient scaler, which does nothing except for float16 on CUDA: float16 gradients underflow without it."""
    return torch.amp.GradScaler(device.type, enabled=device.type == "cuda" and dtype == torch.float16)


def worth_compiling(device: torch.device, flops: float, steps: int) -> bool:
    """What `compile: auto` means: compile if the run would take more than two minutes without.

    Compiling takes half a minute and then saves a quarter of an update or more. An update is taken to cost 2 ms and a
    second for every 50 GFLOP, on CUDA 5 ms and a second for every 50 TFLOP: by the configuration alone, so that a run
    that is started again is compiled again.
    """
    if device.type == "cuda":
        return steps * (0.005 + flops / 50e12) > 120
    return device.type == "cpu" and steps * (0.002 + flops / 50e9) > 120
