"""The check of a GPU, on a CPU: that it runs, and that it notices."""

import pytest
import torch

from benchmarks import gpu_check
from model import GPT, KVCache

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_check.corpus, "PREPARED", tmp_path / "prepared")


def passed(check) -> list[bool]:
    return [ok for ok, _ in check(CPU, small=True)]


def test_every_check_passes_on_a_cpu(call):
    status, out, err = call(gpu_check, "--device", "cpu", "--small")
    assert status == 0, out + err
    lines = out.splitlines()[1:-1]  # between the device and the time
    assert len(lines) == 18 and all(line.startswith("ok ") for line in lines), out


def test_without_a_gpu_it_is_one_line(call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    status, out, err = call(gpu_check)
    assert (status, out) == (2, "")
    assert err.startswith("error: device cuda does not exist") and len(err.splitlines()) == 1


def test_after_a_check_that_fails_or_raises_the_others_go_on_and_the_status_is_1(call, monkeypatch):
    def raises(device, small):
        yield 1 / 0

    def fails(device, small):
        yield False, "a figure"
        yield True, "another"

    monkeypatch.setattr(gpu_check, "CHECKS", [raises, fails])
    status, out, err = call(gpu_check, "--device", "cpu")
    assert status == 1 and err.splitlines()[-1] == "error: 2 checks failed"
    assert out.splitlines()[1:-1] == [
        "FAILED  raises: ZeroDivisionError: division by zero",
        "FAILED  a figure",
        "ok      another",
    ]


def test_a_device_that_computes_otherwise_is_noticed(monkeypatch):
    fresh = gpu_check.fresh

    def otherwise(*args):
        reference, model, ids, targets = fresh(*args)
        with torch.no_grad():
            model.blocks[0].attn.qkv.weight.mul_(1.001)
        return reference, model, ids, targets

    monkeypatch.setattr(gpu_check, "fresh", otherwise)
    assert passed(gpu_check.gradients) == [False, True] * 2  # within what bfloat16 changes anyway


def test_a_cache_that_gives_back_something_else_is_noticed(monkeypatch):
    append = KVCache.append
    monkeypatch.setattr(KVCache, "append", lambda self, k, v, room: append(self, k, 1.01 * v, room))
    assert passed(gpu_check.cached) == [False, False]


def test_a_checkpoint_of_other_weights_is_noticed(monkeypatch):
    weights_of = gpu_check.checkpoint.weights_of
    monkeypatch.setattr(
        gpu_check.checkpoint, "weights_of", lambda model: {name: 2 * w for name, w in weights_of(model).items()}
    )
    assert passed(gpu_check.checkpoints) == [False, False]


def test_an_update_that_reads_a_value_back_is_noticed_and_the_rest_measured_without_watching(monkeypatch):
    forward = GPT.forward

    def reading(self, *args, **kwargs):
        result = forward(self, *args, **kwargs)
        return result + 0 * result.mean().item()

    monkeypatch.setattr(GPT, "forward", reading)
    assert passed(gpu_check.training) == [False, True, True]
