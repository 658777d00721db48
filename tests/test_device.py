"""Where a run computes: device, dtype, gradient scaler, compile."""

import contextlib
import itertools
import time

import numpy as np
import pytest
import torch

import device
from errors import UsageError
from log import Log


def refusal(function, *args) -> str:
    with pytest.raises(UsageError) as error:
        function(*args)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.fixture
def machine(monkeypatch):
    """Makes PyTorch see this many CUDA devices, with or without bfloat16, and Apple's GPU or none."""

    def have(cuda: int = 0, bfloat16: bool = True, mps: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        # emulated bfloat16 is there on every GPU
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or bfloat16
        )
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return have


DEVICES = {
    (0, False): {"auto": "cpu", "cpu": "cpu", "cuda": None, "cuda:1": None, "mps": None},
    (1, False): {"auto": "cuda", "cpu": "cpu", "cuda": "cuda", "cuda:1": None, "mps": None},
    (2, True): {"auto": "cuda", "cpu": "cpu", "cuda": "cuda", "cuda:1": "cuda:1", "mps": "mps"},
    (0, True): {"auto": "mps", "cpu": "cpu", "cuda": None, "cuda:1": None, "mps": "mps"},
}


@pytest.mark.parametrize(("cuda", "mps"), DEVICES)
def test_a_device_is_chosen_or_refused_by_what_there_is(machine, cuda, mps):
    machine(cuda=cuda, mps=mps)
    for name, chosen in DEVICES[cuda, mps].items():
        if chosen:
            assert device.choose_device(name) == torch.device(chosen)
        else:
            message = refusal(device.choose_device, name)
            assert f"device {name} does not exist" in message and "use auto or cpu" in message


f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = {
    ("cpu", True): {"auto": f32, "float32": f32, "bfloat16": bf16, "float16": None},
    ("mps", True): {"auto": f32, "float32": f32, "bfloat16": None, "float16": None},
    ("cuda", True): {"auto": bf16, "float32": f32, "bfloat16": bf16, "float16": f16},
    ("cuda", False): {"auto": f16, "float32": f32, "bfloat16": None, "float16": f16},
}
# what a CUDA device can do says nothing about the others
DTYPES |= {("cpu", False): DTYPES["cpu", True], ("mps", False): DTYPES["mps", True]}


@pytest.mark.parametrize(("kind", "bfloat16"), DTYPES)
def test_a_dtype_is_chosen_or_refused_by_the_device(machine, kind, bfloat16):
    machine(cuda=1, bfloat16=bfloat16)
    for name, chosen in DTYPES[kind, bfloat16].items():
        if chosen:
            dtype, notice = device.choose_dtype(torch.device(kind), name)
            assert dtype == chosen
            assert bool(notice) == (name == "auto" and chosen == f16)
        else:
            message = refusal(device.choose_dtype, torch.device(kind), name)
            assert f"dtype {name} " in message and "float32" in message


def test_gradients_are_scaled_for_float16_on_cuda_alone(monkeypatch):
    # the scaler itself switches off where there is no GPU, so what it is asked for is looked at
    monkeypatch.setattr(torch.amp, "GradScaler", lambda kind, enabled: (kind, enabled))
    for kind in ("cpu", "cuda", "mps"):
        for dtype in (f32, bf16, f16):
            scaler = device.make_scaler(torch.device(kind), dtype)
            assert scaler == (kind, kind == "cuda" and dtype == f16)


def test_matrix_products_are_in_the_dtype_and_float32_means_nothing_is_touched():
    x, cpu = torch.ones(2, 2), torch.device("cpu")
    with device.autocast(cpu, bf16):
        assert (x @ x).dtype == bf16
    for kind in ("cpu", "cuda", "mps"):
        assert isinstance(device.autocast(torch.device(kind), f32), contextlib.nullcontext)
    assert not device.make_scaler(cpu, bf16).is_enabled()


def test_float32_products_on_a_gpu_are_exact_only_where_float32_was_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    for kind in ("cpu", "mps", "cuda"):
        for dtype in (f32, bf16, f16):
            device.set_float32_products(torch.device(kind), dtype)
    assert asked == ["highest", "high", "high"]  # and nothing for the others


def test_rows_go_to_a_gpu_in_one_piece_from_page_locked_memory_without_waiting(monkeypatch):
    pinned, copies = [], []

    def pin(tensor):
        pinned.append(tensor)
        return tensor

    def to(tensor, kind, non_blocking=False):
        copies.append((tensor is pinned[-1], tensor.is_contiguous(), kind, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    window, gpu = np.arange(12).reshape(3, 4), torch.device("cuda")
    for rows in (window, window[:, :-1]):  # as they come in documents and in stream mode
        assert (device.put(rows, gpu).numpy() == rows).all()
    assert copies == [(True, True, gpu, True)] * 2


def test_rows_on_the_cpu_are_not_copied():
    rows = np.arange(12).reshape(3, 4)[:, :-1]
    sent = device.put(rows, torch.device("cpu"))
    assert (sent.numpy() == rows).all() and sent.data_ptr() == rows.ctypes.data


def test_the_peak_of_a_known_gpu_is_that_of_its_data_sheet(monkeypatch):
    cuda = torch.device("cuda")
    # H200 (1,979 with sparsity), A100, T4
    for name, dtype, peak in (("H200", bf16, 1979 / 2), ("A100-SXM4-80GB", bf16, 312), ("T4", f16, 65)):
        full = ("Tesla " if name == "T4" else "NVIDIA ") + name
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, full=full: full)
        found, source = device.peak_flops(cuda, dtype)
        assert found == pytest.approx(peak * 1e12, rel=1e-3) and source == "data sheet"
    # a slice of a GPU and a laptop's do not have the peak of the card they are called after
    for other in ("NVIDIA H200 MIG 1g.18gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A10G"):
        assert other not in device.PEAKS


def test_the_peak_of_another_device_is_that_of_the_fastest_product(monkeypatch):
    # the clock says that the products take 2, 3, 4, ... seconds
    clock = itertools.accumulate(seconds for n in itertools.count(2) for seconds in (0, n))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert device.peak_flops(torch.device("cpu"), f32) == (2 * 1024**3 / 2, "measured")


def test_the_rate_is_a_share_of_the_peak_where_that_is_known(tmp_path):
    for full_rate, shown in ((None, "500 tokens/s"), (2000.0, "500 tokens/s (25% of peak)")):
        log = Log(tmp_path / "metrics.jsonl", {"step": 0, "tokens": 0, "seconds": 0.0}, 2, False, full_rate)
        log.add({"step": 1, "train_loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens": 1000, "seconds": 2.0})
        log.read()
        assert log.speed == shown


def test_auto_compiles_a_run_of_more_than_two_minutes():
    cpu, cuda, mps = (torch.device(kind) for kind in ("cpu", "cuda", "mps"))
    for device_, flops, steps in ((cpu, 1e10, 594), (cpu, 0.0, 60_000), (cuda, 0.0, 24_000), (cuda, 6e12, 960)):
        assert device.worth_compiling(device_, flops, round(1.01 * steps))
        assert not device.worth_compiling(device_, flops, round(0.99 * steps))
    assert not device.worth_compiling(mps, 1e10, 1_000_000)


def test_tiny_models_and_single_rows_take_one_thread(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    tiny, large = torch.nn.Linear(100, 100), torch.nn.Linear(300, 300)
    for model, rows in ((large, None), (large, 2)):
        device.limit_threads(model, rows)
    assert not asked
    for model, rows in ((large, 1), (tiny, 2), (tiny, None)):
        device.limit_threads(model, rows)
    assert asked == [1, 1, 1]
