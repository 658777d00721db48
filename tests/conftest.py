import base64
import contextlib
import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import checkpoint
import config
import corpus
import errors
import reader
import tokenizer as tokenizers
import train

# models this small gain nothing from a second thread, and lose much when the machine is busy
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the scripts that tests start
os.fsync = lambda file: None  # it protects from power cuts alone, and waiting for a slow disk would take minutes

ROOT = Path(__file__).resolve().parent.parent
MICRO = str(ROOT / "configs" / "micro.yaml")
WORDS = [f"{a}{b}{c}" for a in "klm" for b in "aeiou" for c in "nrst"]
# `prepared` is an empty folder or one that earlier examples have left a set in: both are as good
REPEATABLE = settings(
    deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SMALL = ["train.max_steps=20", "train.batch_size=16", "train.samples=0", "train.eval_every=10"]


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


@pytest.fixture
def ranks(tmp_path):
    """A small file of GPT-2 ranks: all bytes and a few merges."""
    pieces = [bytes([b]) for b in range(256)] + [b"th", b"the", b" the", b"\n\n"]
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces)]
    (tmp_path / "gpt2.tiktoken").write_text("".join(lines))
    return tmp_path / "gpt2.tiktoken"


@pytest.fixture(scope="session")
def some_names(tmp_path_factory):
    """A file with every tenth name: a tenth of the time for preparing and evaluating, and still every letter."""
    names = corpus.EMBEDDED["names"].read_text(encoding="utf-8").splitlines()
    return write(tmp_path_factory.mktemp("names") / "names.txt", names[::10])


@pytest.fixture
def in_an_empty_folder(tmp_path, monkeypatch, some_names):
    """The working directory of a test, where sets are prepared as well; `names` is every tenth name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus, "PREPARED", tmp_path / "prepared")
    monkeypatch.setattr(corpus, "EMBEDDED", {"names": some_names})


@pytest.fixture(scope="session")
def a_run(tmp_path_factory, some_names):
    place = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(corpus, "PREPARED", place / "prepared")
        patch.setattr(corpus, "EMBEDDED", {"names": some_names})
        train.train(config.load(MICRO, SMALL), "micro")
    return place


@pytest.fixture
def trained(in_an_empty_folder, a_run):
    """runs/micro, as `train.py configs/micro.yaml` leaves it with the options of SMALL, and its data."""
    for folder in ("runs", "prepared"):
        shutil.copytree(a_run / folder, folder)
    return Path("runs/micro")


def write(path, documents):
    path.write_bytes("".join(f"{document}\n" for document in documents).encode())
    return path


def refusal(function, *args):
    """The message of the UsageError, which is one line."""
    with pytest.raises(errors.UsageError) as error:
        function(*args)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@contextlib.contextmanager
def files_of_at_most(size):
    """Writing more bytes than this to a file fails, with the errors of a full disk."""
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, allowed[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)


def metrics(run="runs/micro"):
    """The rows of a run without what depends on the machine."""
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("tokens_per_s", "seconds")} for row in rows]


def weights(file):
    return {name: value.clone() for name, value in checkpoint.read(Path(file))["model"].items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Prepared sets


def meta(name="mine"):
    return json.loads((corpus.PREPARED / name / "meta.json").read_text(encoding="utf-8"))


def stored(split, name="mine"):
    return np.fromfile(corpus.PREPARED / name / f"{split}.bin", dtype=meta(name)["dtype"]).tolist()


def documents_of(split, name="mine"):
    """The documents of a token file, whatever its tokens."""
    ids, documents, document, tokenizer = stored(split, name), [], [], tokenizers.from_dict(meta(name)["tokenizer"])
    assert ids[0] == ids[-1] == tokenizer.bos_id
    for i in ids[1:]:
        document.append(i)
        if i == tokenizer.bos_id:
            documents.append(tokenizer.decode(document))
            document = []
    return documents


def text_of(split, name="mine"):
    """The plain text of a token file, whatever its tokens."""
    return tokenizers.from_dict(meta(name)["tokenizer"]).decode(stored(split, name))


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def skip_without_the_package_of(tokens):
    for kind, package in (("bpe", "tokenizers"), ("gpt2", "tiktoken")):
        if tokens.startswith(kind):
            pytest.importorskip(package)


@contextlib.contextmanager
def chunks_of(size):
    """Files are read this many bytes at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "CHUNK", size)
        yield
