"""Where a run computes: device, dtype, gradient scaler, compile."""

import contextlib

import pytest
import torch

import device
from errors import UsageError


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


def test_auto_compiles_on_cuda_and_on_a_cpu_for_a_run_of_more_than_ten_minutes():
    cpu, cuda, mps = (torch.device(kind) for kind in ("cpu", "cuda", "mps"))
    assert device.worth_compiling(cuda, 1.0, 1)
    assert not device.worth_compiling(cpu, 1e10, 2_000)  # 0.2 s each
    assert device.worth_compiling(cpu, 1e10, 3_000)
    assert device.worth_compiling(cpu, 0.0, 300_001) and not device.worth_compiling(cpu, 0.0, 299_999)
    assert not device.worth_compiling(mps, 1e10, 1_000_000)
