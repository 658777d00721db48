"""What a run survives: failing disks, damaged files, signals, numbers that are not finite, and a second training."""

import errno
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import MICRO, ROOT, SMALL, equal, files_of_at_most, metrics, weights, write
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoint
import corpus
import dataset
import device
import errors
import log
import optim
import runs
import sample
import train
from config import DataConfig, ModelConfig
from data import prepare

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


# ---------------------------------------------------------------------------------------------------------- the disk


@pytest.mark.parametrize(
    ("place", "name", "every"),
    [(checkpoint._HashingFile, "write", 53), (os, "fsync", 1), (os, "replace", 1)],
    ids=["write", "flush", "rename"],
)
def test_a_disk_that_fails_at_any_moment_leaves_a_loadable_run(call, monkeypatch, place, name, every):
    options = [*SMALL, "train.max_steps=4", "train.checkpoint_every=2", "train.eval_every=2"]
    assert call(train, MICRO, *options)[0] == 0
    real = getattr(place, name)
    for failing in range(1, 1000, every):
        calls = 0

        def faulty(*args, failing=failing):
            nonlocal calls
            calls += 1
            return real(*args) if calls != failing else no_space()

        monkeypatch.setattr(place, name, faulty)
        status, _, err = call(train, MICRO, *options)
        monkeypatch.setattr(place, name, real)
        if calls < failing:
            break  # it is not called that often, so nothing failed
        run = max(Path("runs").glob("*"), key=lambda path: path.stat().st_mtime_ns)
        assert status == 1 and len(err.splitlines()) == 1 and "No space left" in err
        assert not list(run.glob("*.tmp"))
        for file in run.glob("*.pt"):
            checkpoint.read(file)
        if (run / "config.yaml").exists():
            assert call(train, run, "--resume")[0] == 0
            assert metrics(run) == metrics("runs/micro")
    assert status == 0 and failing > 5


def no_space():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_size_limit_is_a_failed_save_and_not_a_damaged_one(call):
    with files_of_at_most(30_000):
        status, _, err = call(train, MICRO, *SMALL)
    assert status == 1 and "File too large" in err and "step-000010.pt" in err and len(err.splitlines()) == 1
    assert not list(Path("runs/micro").glob("*.pt*"))


def test_a_folder_that_cannot_be_written_is_one_line(call):
    Path("runs").write_text("a file")
    status, _, err = call(train, MICRO, *SMALL)
    assert status == 1 and len(err.splitlines()) == 1 and "runs" in err


def test_every_flipped_bit_and_every_truncation_is_noticed(call, trained):
    raw, rng = Path("runs/micro/step-000020.pt").read_bytes(), random.Random(0)
    for place in rng.sample(range(len(raw)), 200):
        Path("bad.pt").write_bytes(raw[:place] + bytes([raw[place] ^ 1 << rng.randrange(8)]) + raw[place + 1 :])
        with pytest.raises(errors.UsageError, match=r"bad\.pt"):
            checkpoint.read(Path("bad.pt"))
    for length in [0, 1, 39, 40, 41, *rng.sample(range(len(raw)), 45)]:
        Path("bad.pt").write_bytes(raw[:length])
        with pytest.raises(errors.UsageError, match=r"bad\.pt"):
            checkpoint.read(Path("bad.pt"))


# ------------------------------------------------------------------------------------------------------------- stops


def test_killed_runs_end_as_if_nothing_had_happened():
    command = [sys.executable, ROOT / "benchmarks" / "kill_resume.py", "--kills", "4", "--steps", "30"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"kills [4-9].*damaged loads 0, differing bits 0, differing rows 0", result.stdout)


def test_a_run_that_was_stopped_several_times_equals_the_one_that_was_not(call):
    options = [*SMALL, "model.dropout=0.3", "train.accumulation=2"]
    assert call(train, MICRO, *options)[0] == 0
    assert call(train, MICRO, *options, "train.checkpoint_every=1", "train.keep=99")[0] == 0
    for stop in (3, 10, 11):  # 10 was evaluated; the row of a stop that lies in the future is cut
        for later in range(stop + 1, 21):
            Path(f"runs/micro-2/step-{later:06d}.pt").unlink(missing_ok=True)
        assert call(train, "runs/micro-2", "--resume")[0] == 0
        assert metrics("runs/micro-2") == metrics("runs/micro")
    for file in ("step-000020.pt", "best.pt"):
        assert equal(weights(f"runs/micro-2/{file}"), weights(f"runs/micro/{file}"))


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_again(call, trained):
    before = metrics()
    for file in Path("runs/micro").glob("*.pt"):
        file.unlink()
    assert call(train, MICRO, "--resume")[0] == 0
    assert metrics() == before


def test_a_second_ctrl_c_stops_at_once_and_leaves_the_checkpoint_before_it(call, monkeypatch):
    real, calls = checkpoint._HashingFile.write, 0

    def slow(self, data):
        nonlocal calls
        calls += 1
        if calls == 900:  # in the middle of some save
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
        return real(self, data)

    monkeypatch.setattr(checkpoint._HashingFile, "write", slow)
    status, _, err = call(train, MICRO, *SMALL, "train.checkpoint_every=1")
    monkeypatch.setattr(checkpoint._HashingFile, "write", real)
    assert status == 130 and "stopped at once; go on with: python train.py runs/micro --resume" in err
    assert not list(Path("runs/micro").glob("*.tmp"))
    checkpoint.read(runs.step_files(Path("runs/micro"))[0])
    assert call(train, "runs/micro", "--resume")[0] == 0
    assert metrics()[-1]["step"] == 20


def test_the_time_limit_saves_and_says_so_in_its_status(call):
    status, _, err = call(train, MICRO, *SMALL, "train.max_steps=100000", "train.max_minutes=0.005")
    assert status == 143 and "go on with: python train.py runs/micro --resume" in err
    assert metrics()[-1]["step"] == checkpoint.read(runs.step_files(Path("runs/micro"))[0])["row"]["step"]


def test_two_trainings_never_write_one_run(call, trained):
    while runs._locks:  # as another process would see it
        os.close(runs._locks.popitem()[1])
    other = os.open("runs/micro", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    status, _, err = call(train, MICRO, "--resume", "train.max_steps=30")
    assert status == 2 and "being written by another training" in err
    os.close(other)
    assert call(train, MICRO, "--resume", "train.max_steps=30")[0] == 0


def test_extending_a_run_says_how_the_schedule_changes_and_shortening_is_refused(call):
    assert call(train, MICRO, *SMALL, "optim.warmup_steps=0")[0] == 0
    status, _, err = call(train, MICRO, "--resume", "train.max_steps=15")
    assert status == 2 and "train.max_steps=15 is behind" in err
    status, out, _ = call(train, MICRO, "--resume", "train.max_steps=40", "train.keep=1")
    assert status == 0
    assert "train.max_steps was 20, now 40" in out and "train.keep was 2, now 1" in out
    assert "the next learning rate would have been 0, it is 0.02" in out  # half of 0.04 is left at half the way
    assert [row["lr"] for row in metrics()][20] == pytest.approx(0.02)


# -------------------------------------------------------------------------------------------------- numbers, precision


def test_an_infinite_gradient_stops_the_run_before_anything_is_overwritten(call, monkeypatch):
    real, calls = optim.clip, 0

    def poisoned(grads, *args):
        nonlocal calls
        calls += 1
        if calls == 17:
            grads["wte.weight"][0, 0] = float("inf")
        return real(grads, *args)

    monkeypatch.setattr(optim, "clip", poisoned)
    status, _, err = call(train, MICRO, *SMALL, "train.checkpoint_every=5")
    assert status == 1 and "diverged at step 17" in err and "gradient norm inf" in err and "learning rate" in err
    assert checkpoint.read(runs.step_files(Path("runs/micro"))[0])["row"]["step"] == 15
    assert checkpoint.read(Path("runs/micro/best.pt"))["row"]["step"] == 10
    assert metrics()[-1]["step"] <= 16


def test_a_loss_that_explodes_without_becoming_infinite_stops_the_run_too(call):
    status, _, err = call(train, MICRO, *SMALL, "optim.lr=100", "optim.warmup_steps=0")
    assert status == 1 and "diverged at step" in err and "learning rate" in err and "inf" not in err
    assert not Path("runs/micro/best.pt").exists() and not runs.step_files(Path("runs/micro"))


def test_a_validation_loss_that_is_no_number_is_never_best(call, monkeypatch):
    import evaluate

    monkeypatch.setattr(evaluate, "total_loss", lambda *_: (float("nan"), 1))
    status, _, err = call(train, MICRO, *SMALL)
    assert not Path("runs/micro/best.pt").exists()
    assert status == 1 and "validation loss is nan" in err and len(err.splitlines()) == 1


class Recorder:
    """A gradient scaler that notes what is asked of it, and scales by 2."""

    def __init__(self):
        self.asked, self.loaded = [], None

    def __getattr__(self, name):
        return lambda *args: self.asked.append(name)

    def is_enabled(self):
        return True

    def scale(self, loss):
        self.asked.append("scale")
        return loss * 2

    def unscale_(self, optimizer):
        self.asked.append("unscale_")
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad /= 2

    def step(self, optimizer):
        self.asked.append("step")
        optimizer.step()

    def state_dict(self):
        return {"scale": 512.0}

    def load_state_dict(self, state):
        self.loaded = state


def test_scaled_gradients_are_unscaled_then_clipped_and_the_scaler_is_saved(call, monkeypatch):
    assert call(train, MICRO, *SMALL, "train.accumulation=2")[0] == 0
    scaler, clip = Recorder(), optim.clip
    monkeypatch.setattr(device, "make_scaler", lambda *_: scaler)
    monkeypatch.setattr(optim, "clip", lambda *args: (scaler.asked.append("clip"), clip(*args))[1])
    assert call(train, MICRO, *SMALL, "train.accumulation=2")[0] == 0
    assert scaler.asked == ["scale", "scale", "unscale_", "clip", "step", "update"] * 20
    assert metrics("runs/micro-2") == metrics("runs/micro")
    assert call(train, "runs/micro-2", "--resume", "train.max_steps=21")[0] == 0
    assert scaler.loaded == {"scale": 512.0}


def test_a_change_of_precision_is_announced(call, trained):
    status, out, _ = call(train, MICRO, "--resume", "train.max_steps=21", "train.dtype=bfloat16")
    assert status == 0 and "the precision changes: torch.float32 until now, torch.bfloat16 from here on" in out


def test_out_of_memory_says_what_to_lower(call):
    # terabytes of weights: refused by the allocator at once
    status, _, err = call(train, MICRO, *SMALL, "model.d_model=1000000", "model.d_ff=null")
    assert status == 1 and len(err.splitlines()) == 1
    assert "out of memory with 16 rows of 8 tokens" in err and "train.batch_size" in err
    assert not Path("runs").exists()


# --------------------------------------------------------------------------------------------------------------- fuzz

FUZZ = settings(deadline=None, max_examples=60, derandomize=True)


def ends_in_order(script, *args):
    sys.argv = ["script", *args]
    with pytest.raises(SystemExit) as stopped:
        errors.run(script.main)
    return stopped.value.code


def test_any_prompt_is_continued_or_refused(call, trained):

    @FUZZ
    @given(st.text() | st.text("abcdefghijklmnopqrstuvwxyz") | st.binary().map(os.fsdecode))
    def check(prompt):
        known = set(prompt) <= set("abcdefghijklmnopqrstuvwxyz")
        status = ends_in_order(sample, "--num-samples=1", "--max-new-tokens=3", f"--prompt={prompt}")
        assert status == (0 if known else 2)

    check()


def test_any_command_line_ends_in_order():
    words = st.sampled_from([MICRO, "--resume", "--help", "runs", "optim.lr=", "train.seed=x", "=", "--", "-", "model"])

    @FUZZ
    @given(st.lists(words | st.text(st.characters(exclude_characters="\0")), max_size=4))
    def check(args):
        if MICRO in args and "--help" not in args:
            args.append("train.max_steps=0")  # so that nothing trains here
        assert ends_in_order(train, *args) in (0, 2)

    check()
    assert not Path("runs").exists()


def test_any_meta_and_any_token_file_is_used_or_refused(call):
    Path("mine.txt").write_text("".join(f"document {i}\n" for i in range(40)))
    corpus.prepare("mine", corpus.Source([Path("mine.txt")], "lines"), "char", 0.1, 0)
    meta, tokens = (corpus.PREPARED / "mine" / name for name in ("meta.json", "train.bin"))
    good, ids = json.loads(meta.read_text()), tokens.read_bytes()
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*good, "val"]), inner, max_size=3),
    )

    def opens():
        try:
            dataset.Data(DataConfig(name="mine"), ModelConfig(), 0).train.batch(0, 4)
        except errors.UsageError as error:
            assert len(str(error).splitlines()) == 1

    @FUZZ
    @given(st.sampled_from(sorted(good)), anything, st.binary(max_size=50))
    def check(key, value, raw):
        meta.write_text(json.dumps(good | {key: value}))
        opens()
        meta.write_text(json.dumps(value))
        opens()
        meta.write_text(json.dumps(good))
        tokens.write_bytes(raw + ids[len(raw) :])
        opens()
        tokens.write_bytes(ids)

    check()


# ------------------------------------------------------------------------------------------------- what newcomers do


def test_a_resume_that_fails_leaves_the_configuration_of_the_run(call, trained):
    before = Path("runs/micro/config.yaml").read_text()
    status, _, err = call(train, "runs/micro", "--resume", "train.max_steps=30", "optim.lr=1e38", "optim.grad_clip=0")
    assert status == 1 and "diverged" in err
    assert Path("runs/micro/config.yaml").read_text() == before
    assert call(train, "runs/micro", "--resume", "train.max_steps=22")[0] == 0


def test_a_library_that_catches_every_exception_does_not_catch_the_end(call, monkeypatch):
    def terminate(thread):
        os.kill(os.getpid(), signal.SIGTERM)

    write(Path("mine.txt"), [f"document {i}" for i in range(60)])
    monkeypatch.setattr(threading.Thread, "start", terminate)  # tqdm starts one, and does without if that fails
    monkeypatch.setattr(log.tqdm, "monitor", None)
    assert call(prepare, "mine.txt")[::2] == (143, "terminated\n")
    assert list(Path("prepared").glob("*")) == []


PREPARE = """
import pathlib, runpy, sys, corpus
corpus.PREPARED, sys.argv = pathlib.Path("sets"), sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_failure(closed):
    write(Path("mine.txt"), [f"document {i}" for i in range(60)])
    script = f'"{sys.executable}" -c \'{PREPARE}\' "{ROOT / "data" / "prepare.py"}" mine.txt {closed}'
    place = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, env=place)
    assert result.returncode == 0 and result.stderr == "" and Path("sets/mine/meta.json").exists()
    assert ("train with data.name=mine" in result.stdout) == (closed in ("<&-", "2>&-"))


def test_a_training_whose_output_nobody_reads_says_so(call, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    status, _, err = call(train, MICRO, *SMALL)
    assert status == 1 and "nobody reads the output" in err and len(err.splitlines()) == 1


def test_a_text_that_was_moved_can_still_be_resumed(call):
    Path("mine.txt").write_text("".join(f"document {i}\n" for i in range(60)))
    assert call(train, MICRO, *SMALL, "data.name=mine.txt")[0] == 0
    Path("mine.txt").unlink()
    status, _, err = call(train, MICRO, "--resume", "train.max_steps=25")
    assert status == 0 and "mine.txt is not there any more" in err


@pytest.mark.parametrize("args", [["--max-new-tokens", "9" * 15], ["--num-samples", "9" * 15], ["--checkpoint", ""]])
def test_sample_refuses_what_cannot_be(call, trained, args):
    status, out, err = call(sample, *args)
    assert status == 2 and out == "" and len(err.splitlines()) == 1


def test_a_prompt_file_may_end_its_line(call, trained):
    Path("prompt.txt").write_bytes(b"\xef\xbb\xbfmar\r\n")
    status, out, _ = call(sample, "--prompt-file", "prompt.txt", "--num-samples", 2)
    assert status == 0 and all(line.startswith("mar") for line in out.splitlines())


def test_a_damaged_newest_checkpoint_does_not_outlive_the_ones_that_follow(call, trained):
    newest = trained / "step-000020.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    options = ["train.checkpoint_every=5", "train.keep=1", "train.max_steps=15", "optim.schedule=constant"]
    assert call(train, "runs/micro", "--resume", *options)[0] == 0
    assert [path.name for path in runs.step_files(Path("runs/micro"))] == ["step-000015.pt"]
    assert checkpoint.read(Path("runs/micro/step-000015.pt"))["row"]["step"] == 15
    assert newest.with_suffix(".damaged").exists()
