import os
import signal
import sys

import pytest
import torch

import corpus
import errors

# models this small gain nothing from a second thread, and lose much when the machine is busy
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the scripts that tests start


@pytest.fixture
def call(monkeypatch, capfd):
    """call(train, "configs/micro.yaml", ...) → (exit status, stdout, stderr)"""

    def call(script, *args):
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, args)])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        with pytest.raises(SystemExit) as stopped:
            errors.run(script.main)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return (stopped.value.code, *capfd.readouterr())

    return call


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """An empty place for prepared sets, where the text of `names` is tmp_path/names.txt; returns that file."""
    monkeypatch.setattr(corpus, "PREPARED", tmp_path / "prepared")
    monkeypatch.setattr(corpus, "EMBEDDED", {"names": tmp_path / "names.txt"})
    return tmp_path / "names.txt"
