"""Checkpoint files, whole or refused; runs on the disk; the state of the optimizer by name."""

import errno
import hashlib
import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
import runs
import tokenizer as tokenizers
from checkpoint import load, load_weights, read, read_first, save, weights_of
from config import Config, ModelConfig, OptimConfig
from errors import RunError, UsageError
from model import BLOCKS, GPT, MLPS, NORMS, POSITIONS
from optim import Optimizer


def example(**keys):
    """(model, content of its checkpoint): no weight has the value that it starts with."""
    torch.manual_seed(0)
    config = Config(ModelConfig(**({"d_model": 8, "n_heads": 2, "n_layers": 2} | keys)))
    tokenizer = tokenizers.char("añb中")
    model = GPT(config.model, tokenizer.vocab_size)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    content = {"config": config.to_yaml(), "tokenizer": tokenizer.to_dict(), "fingerprint": "0", "documents": "lines"}
    return model, content | {"row": {"step": 3}, "model": weights_of(model)}


def saved(path, **keys):
    model, content = example(**keys)
    save(path, content)
    return model


def sealed(path, data):
    """Write a file whose trailer is right, whatever it holds."""
    path.write_bytes(data + b"microgpt" + hashlib.sha256(data).digest())
    return path


def torch_file(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@torch.no_grad()
def logits_of(model):
    return model.eval()(torch.arange(5)[None])


TABLES = {"norm": NORMS, "mlp": MLPS, "position": POSITIONS, "block": BLOCKS}
CHOICES = [
    *({key: choice} for key, table in TABLES.items() for choice in table),
    {"tie_weights": True},
    {"norm": "layernorm", "bias": True, "final_norm": True},
    {"qk_norm": True, "position": "rope", "tie_weights": True, "dropout": 0.5},
]


@pytest.mark.parametrize("keys", CHOICES, ids=str)
def test_what_is_loaded_is_what_was_saved(tmp_path, keys):
    model, (loaded, tokenizer, config) = saved(tmp_path / "a.pt", **keys), load(tmp_path / "a.pt")
    own, stored = weights_of(model), weights_of(loaded)
    assert own.keys() == stored.keys() and all(torch.equal(own[name], stored[name]) for name in own)
    assert not any(module.training for module in loaded.modules())
    assert torch.equal(logits_of(model), logits_of(loaded))
    assert config == Config(model.config) and loaded.config == model.config
    assert tokenizer.to_dict() == tokenizers.char("abñ中").to_dict() and tokenizer.vocab_size == 5
    assert tokenizer.decode(tokenizer.encode("中ñab")) == "中ñab"


def test_a_tied_matrix_is_stored_once_and_tied_again(tmp_path):
    saved(tmp_path / "tied.pt", tie_weights=True)
    names = list(read(tmp_path / "tied.pt")["model"])
    assert "wte.weight" in names and "lm_head.weight" not in names
    model, _, _ = load(tmp_path / "tied.pt")
    assert model.lm_head.weight is model.wte.weight


def test_any_flipped_bit_is_noticed(tmp_path):
    saved(tmp_path / "a.pt")
    whole, flipped = (tmp_path / "a.pt").read_bytes(), tmp_path / "flipped.pt"
    for bit in np.linspace(0, 8 * len(whole) - 1, 60).astype(int).tolist() + [8 * (len(whole) - n) for n in (33, 41)]:
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        flipped.write_bytes(data)
        with pytest.raises(UsageError, match=r"flipped\.pt"):
            load(flipped)


def test_a_file_that_is_cut_short_or_too_long_is_refused(tmp_path):
    saved(tmp_path / "a.pt")
    whole, path = (tmp_path / "a.pt").read_bytes(), tmp_path / "b.pt"
    lengths = {0, 1, 39, 40, 41, -41, -40, -39, -1, *range(0, len(whole), len(whole) // 20)}
    for data in [*(whole[:length] for length in lengths), whole + b"\0", whole + b"\n" * 100, whole + whole[-40:]]:
        path.write_bytes(data)
        with pytest.raises(UsageError, match=r"b\.pt"):
            load(path)


FOREIGN = torch_file({"a": torch.zeros(1)})


def changed(**parts):
    """A checkpoint in which some parts are others, or missing where None is given."""
    return {key: part for key, part in (example()[1] | {"format": 1} | parts).items() if part is not None}


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (lambda path: path.write_bytes(FOREIGN), "SHA-256"),
        (lambda path: path.write_bytes(b""), "SHA-256"),
        (lambda path: path.write_bytes(b"text " * 100), "SHA-256"),
        (lambda path: sealed(path, b""), "cannot read"),
        (lambda path: sealed(path, b"text " * 100), "cannot read"),
        (lambda path: sealed(path, FOREIGN), "format 1"),
        (lambda path: sealed(path, torch_file([1, 2])), "format 1"),
        *((lambda path, other=other: save(path, changed(format=other)), "format 1") for other in (0, 2, "1")),
        *((lambda path, key=key: save(path, changed(**{key: None})), f"no {key}") for key in ("config", "tokenizer")),
        (lambda path: save(path, changed(model=None, row=None)), "no row, model"),
        (lambda path: save(path, changed(model={})), "wte.weight"),
        (lambda path: save(path, changed(tokenizer={"type": "other"})), "unknown tokenizer"),
    ],
)
def test_a_foreign_file_is_refused_with_what_is_missing(tmp_path, make, missing):
    make(path := tmp_path / "foreign.pt")
    with pytest.raises(UsageError, match=rf"foreign\.pt is not a checkpoint of this project.*{missing}"):
        load(path)


def test_a_path_without_a_checkpoint_is_named_with_the_reason(tmp_path):
    for path, reason in [("gone.pt", "gone.pt does not exist"), (".", "has no checkpoint: neither best.pt nor step-")]:
        with pytest.raises(UsageError, match=reason):
            load(tmp_path / path)
        with pytest.raises(UsageError, match="cannot be read"):
            read(tmp_path / path)


class Malicious(str):
    """Creates the file of this name when it is unpickled."""

    def __reduce__(self):
        return os.open, (str(self), os.O_CREAT)


@pytest.mark.parametrize("place", ["whole", "config", "model"])
def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path, place):
    owned = tmp_path / "owned"
    content = Malicious(owned) if place == "whole" else changed(**{place: Malicious(owned)})
    path = sealed(tmp_path / "evil.pt", torch_file(content))
    with pytest.raises(UsageError, match=r"evil\.pt is not a checkpoint of this project"):
        load(path)
    assert not owned.exists()
    torch.load(path, weights_only=False)
    assert owned.exists()  # so there was something to refuse


@pytest.mark.parametrize("keys", [{"n_layers": 1}, {"n_layers": 3}, {"d_ff": 16}, {"block_size": 9}, {"bias": True}])
def test_weights_that_do_not_fit_the_configuration_are_refused(tmp_path, keys):
    save(tmp_path / "a.pt", changed(config=example(**keys)[1]["config"]))
    with pytest.raises(UsageError, match=r"a\.pt does not fit its own configuration"):
        load(tmp_path / "a.pt")


def no_space(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullDisk(io.FileIO):
    """A file on a disk with room for this many bytes."""

    room = 0

    def write(self, data):
        return super().write(data) if self.tell() + len(data) <= self.room else no_space()


@pytest.mark.parametrize("failing", ["fsync", "replace", "first byte", "middle", "trailer"])
def test_a_save_that_fails_says_why_and_leaves_the_previous_file(tmp_path, monkeypatch, failing):
    path = tmp_path / "step-000001.pt"
    before = saved(path)
    size = path.stat().st_size
    with monkeypatch.context() as patch:
        if failing in ("fsync", "replace"):
            patch.setattr(os, failing, no_space)
        else:
            patch.setattr(FullDisk, "room", {"first byte": 0, "middle": size // 2, "trailer": size - 1}[failing])
            patch.setattr(checkpoint, "open", FullDisk, raising=False)
        with pytest.raises(RunError, match=r"step-000001\.pt could not be saved: No space left on device"):
            save(path, changed(row={"step": 4}))
    assert read(path)["row"] == {"step": 3} and torch.equal(logits_of(load(path)[0]), logits_of(before))
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_newest_file_is_named_and_the_one_before_it_used(tmp_path, capsys):
    for step, layers in ((1, 1), (2, 2), (3, 3)):
        saved(tmp_path / f"step-{step:06d}.pt", n_layers=layers)
    with open(tmp_path / "step-000003.pt", "r+b") as file:
        file.truncate(1000)
    found, _ = read_first(runs.step_files(tmp_path))
    assert found.name == "step-000002.pt"
    warning = capsys.readouterr().err
    assert "step-000003.pt" in warning and "step-000001.pt" not in warning and warning.count("\n") == 1
    assert load(tmp_path)[2].model.n_layers == 2
    for path in runs.step_files(tmp_path):
        path.write_bytes(b"")
    with pytest.raises(UsageError, match="step-000001"):
        load(tmp_path)


def test_a_compiled_or_wrapped_model_is_saved_under_its_plain_names(tmp_path):
    model, content = example()
    with torch.no_grad():
        for wrapper in (torch.compile(model), torch.nn.ModuleDict({"module": model})):
            next(wrapper.parameters()).add_(1)  # what trains the wrapper trains the model
    save(tmp_path / "a.pt", content | {"model": weights_of(model)})
    assert read(tmp_path / "a.pt")["model"].keys() == dict(model.named_parameters()).keys() >= {"wte.weight"}
    assert torch.equal(logits_of(load(tmp_path / "a.pt")[0]), logits_of(model))


def update(model, optimizer, step):
    ids = torch.from_numpy(np.random.default_rng(step).integers(5, size=(4, 9)))
    model(ids[:, :-1], ids[:, 1:]).mean().backward()
    optimizer.lr.fill_(1e-2)
    optimizer.step()
    model.zero_grad()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_optimizer_goes_on_from_its_file_as_if_never_stopped(tmp_path, name):
    keys = {"tie_weights": True, "bias": True, "norm": "layernorm"}
    (model, content), (again, _) = example(**keys), example(**keys)
    optimizer, optimizer_again = (Optimizer(m, OptimConfig(name=name)) for m in (model, again))
    for step in range(3):
        update(model, optimizer, step)
    state = optimizer.state_dict()
    in_another_order = dict(reversed(state.items()))
    save(tmp_path / "a.pt", content | {"model": weights_of(model), "optimizer": in_another_order})

    content = read(tmp_path / "a.pt")
    load_weights(again, content["model"], tmp_path / "a.pt")
    optimizer_again.load_state_dict(content["optimizer"])
    assert optimizer_again.steps == 3
    for m, o in ((model, optimizer), (again, optimizer_again)):
        update(m, o, step=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    del content["optimizer"]["wte.weight"]
    with pytest.raises(KeyError, match="wte"):
        optimizer_again.load_state_dict(content["optimizer"])


def touch(*names):
    """Files in runs/ of the working directory, each newer than the one before."""
    for time, path in enumerate(Path("runs", name) for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (time, time))


def test_a_new_run_never_takes_the_folder_of_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [runs.new_run(name) for name in ("micro", "micro", "other", "micro")]
    assert made == [Path("runs", name) for name in ("micro", "micro-2", "other", "micro-3")]
    assert all(run.is_dir() for run in runs.runs_of("micro"))


def test_the_runs_of_a_configuration_are_in_the_order_they_were_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for other in ("micro-x", "micromega", "micro-2-3", "micro-2.old", "a-micro", "mi.ro"):
        touch(f"{other}/config.yaml")
    touch("micro-11")  # a file is no run
    assert runs.runs_of("micro") == []
    for name in ("micro-10", "micro-9", "micro", "micro-2"):
        touch(f"{name}/config.yaml")
    assert [run.name for run in runs.runs_of("micro")] == ["micro", "micro-2", "micro-9", "micro-10"]
    assert [run.name for run in runs.runs_of("mi.ro")] == ["mi.ro"]


def test_the_newest_run_is_the_one_with_the_newest_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"there is no run in .*runs: .*python train\.py configs/micro\.yaml"):
            runs.newest_run()
        touch("empty/config.yaml")  # without a checkpoint there is nothing to sample from
    touch("b/best.pt", "a/step-000500.pt", "z/best.pt", "a/step-001000.pt", "z/config.yaml")
    assert runs.newest_run() == Path("runs/a")


def test_the_steps_of_a_run_are_newest_first_and_the_best_is_sampled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["step-1000000.pt", "step-999999.pt", "step-000500.pt", "step-000010.pt"]
    touch(*(f"micro/{name}" for name in ["step-x.pt", "step-000700.pt.tmp", *sorted(names)]))
    run = Path("runs/micro")
    assert [path.name for path in runs.step_files(run)] == names
    assert [path.name for path in runs.files_to_sample(run)] == names
    touch("micro/best.pt")
    assert [path.name for path in runs.files_to_sample(run)] == ["best.pt", *names]
    assert runs.files_to_sample(run / names[2]) == [run / names[2]]
