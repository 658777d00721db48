"""The scripts as a user runs them: what they print, write and return. Most run in this process, which saves seconds."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import MICRO, ROOT, SMALL, equal, metrics, weights

import checkpoint
import corpus
import device
import errors
import evaluate
import log
import sample
import train

ALL_NAMES = corpus.EMBEDDED

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def run(*command, **options):
    """A script in a process of its own."""
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, encoding="utf-8", timeout=120, **options
    )


# ----------------------------------------------------------------------------------------------------------- training


def test_training_tells_what_it_does_and_leaves_a_run_that_can_be_sampled(call, monkeypatch):
    monkeypatch.setattr(corpus, "EMBEDDED", ALL_NAMES)
    status, out, err = call(train, MICRO, *SMALL, "train.samples=2")
    assert (status, err) == (0, "")
    for fact in (
        "26,785 documents",
        "4,096",
        "16 rows of 8 = 128 tokens",
        "cpu, float32, gradient scaler off, compile off",
    ):
        assert fact in out
    assert len(re.findall(r"val loss \d\.\d{4} nats per character", out)) == 3  # two evaluations and the end
    assert sorted(p.name for p in Path("runs/micro").iterdir()) == [
        "best.pt",
        "config.yaml",
        "metrics.jsonl",
        "step-000010.pt",
        "step-000020.pt",
    ]
    rows = metrics("runs/micro")
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["step"] for row in rows if row["val_loss"] is not None] == [10, 20]
    assert abs(rows[0]["train_loss"] - 3.296) < 0.02

    command = re.search(r"sample  python (sample\.py .*)", out).group(1).split()
    status, out, err = call(sample, *command[1:], "--num-samples", 5, "--temperature", 0.8)
    assert status == 0 and len(out.splitlines()) == 5
    assert "runs/micro/best.pt, step 20" in err


def test_a_new_run_never_overwrites_an_older_one(call, trained):
    assert call(train, MICRO, *SMALL)[0] == 0
    assert metrics("runs/micro") == metrics("runs/micro-2")
    assert equal(weights("runs/micro/step-000020.pt"), weights("runs/micro-2/step-000020.pt"))


@pytest.mark.parametrize("options", [[], ["model.dropout=0.2", "train.accumulation=4"], ["data.mode=stream"]])
def test_a_resumed_run_equals_the_one_that_was_never_stopped(call, options):
    options = [*SMALL, *options, "optim.schedule=constant"]
    assert call(train, MICRO, *options)[0] == 0
    # at step 13 nothing is due but the end of that run
    assert call(train, MICRO, *options, "train.max_steps=13")[0] == 0
    status, out, _ = call(train, "runs/micro-2", "--resume", "train.max_steps=20")
    assert status == 0 and "train.max_steps was 13, now 20" in out
    assert metrics("runs/micro-2") == metrics("runs/micro")
    for file in ("step-000020.pt", "best.pt"):
        assert equal(weights(f"runs/micro-2/{file}"), weights(f"runs/micro/{file}"))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_is_saved_and_says_how_to_go_on(call, monkeypatch, trained, number, status):
    real = log.Log.add

    def add(self, row):
        if row["step"] == 7:
            os.kill(os.getpid(), number)
        real(self, row)

    monkeypatch.setattr(log.Log, "add", add)
    stopped, _, err = call(train, MICRO, *SMALL)
    monkeypatch.setattr(log.Log, "add", real)
    file, again = re.fullmatch(r"stopped after step 7 and saved (.*); go on with: python train.py (.*)\n", err).groups()
    assert stopped == status and checkpoint.read(Path(file))["row"]["step"] == 7 == len(metrics("runs/micro-2"))
    assert call(train, *again.split())[0] == 0
    assert metrics("runs/micro-2") == metrics("runs/micro")


@pytest.mark.slow
def test_ctrl_c_stops_a_training_in_a_process_of_its_own():
    process = subprocess.Popen(
        [sys.executable, ROOT / "train.py", MICRO, "train.max_steps=100000", "train.batch_size=8"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    written = Path("runs/micro/metrics.jsonl")
    while process.poll() is None and not (written.exists() and written.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and len(err.splitlines()) == 1
    step = int(re.match(r"stopped after step (\d+) and saved", err).group(1))
    assert [row["step"] for row in metrics()] == list(range(1, step + 1))


def test_resume_takes_the_newest_run_of_the_config_and_keeps_its_own_values(call, trained):
    assert call(train, MICRO, *SMALL, "optim.lr=0.03")[0] == 0
    status, out, _ = call(train, MICRO, "--resume", "train.max_steps=25")
    assert status == 0 and "run     runs/micro-2, after step 20 of 25" in out
    assert "optim.lr" in out and "keeps its 0.03" in out
    assert "the schedule changes" in out
    assert len(metrics("runs/micro-2")) == 25 and len(metrics("runs/micro")) == 20


def test_a_finished_run_that_is_resumed_says_its_result_again(call, trained):
    before = metrics()
    status, out, _ = call(train, "runs/micro", "--resume")
    assert status == 0 and "done    val loss" in out
    assert metrics() == before


@pytest.mark.parametrize("override", ["model.d_model=32", "model.mlp=gelu", "data.split_seed=1", "data.mode=stream"])
def test_resuming_refuses_another_model_and_other_data(call, trained, override):
    status, _, err = call(train, "runs/micro", "--resume", "train.max_steps=30", override)
    assert status == 2 and len(err.splitlines()) == 1 and override in err
    assert len(metrics("runs/micro")) == 20


def test_resuming_refuses_a_checkpoint_without_optimizer_state(call, trained):
    os.replace("runs/micro/best.pt", "runs/micro/step-000020.pt")
    status, _, err = call(train, "runs/micro", "--resume")
    assert status == 2 and "no optimizer state" in err


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(call, trained):
    before, newest = metrics(), trained / "step-000020.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    status, out, err = call(train, "runs/micro", "--resume")
    assert status == 0 and str(newest) in err and "after step 10" in out
    assert metrics("runs/micro") == before


@pytest.mark.parametrize("steps, every", [(5, 2000), (20, 3)])
def test_the_last_step_is_always_saved_and_only_the_newest_are_kept(call, steps, every):
    options = [f"train.max_steps={steps}", f"train.checkpoint_every={every}", "train.batch_size=4", "train.keep=3"]
    assert call(train, MICRO, *options)[0] == 0
    expected = [5] if steps == 5 else [15, 18, 20]
    assert sorted(p.name for p in Path("runs/micro").glob("step-*.pt")) == [f"step-{n:06d}.pt" for n in expected]


def test_the_weights_are_on_the_disk_before_they_are_evaluated(call, monkeypatch):
    def fails(*_):
        raise errors.RunError("the evaluation fails")

    monkeypatch.setattr(evaluate, "total_loss", fails)
    status, _, err = call(train, MICRO, *SMALL)
    assert status == 1 and "the evaluation fails" in err
    assert checkpoint.read(Path("runs/micro/step-000010.pt"))["row"]["step"] == 10


def test_slices_of_an_update_make_no_difference(call):
    # rows of 2 to 9 letters: a mean of means would weigh the letters of short names more
    for slices in (1, 2, 8):
        assert call(train, MICRO, *SMALL, f"train.accumulation={slices}", "train.max_steps=8")[0] == 0
    whole = metrics("runs/micro")
    for other in ("runs/micro-2", "runs/micro-3"):
        for a, b in zip(whole, metrics(other), strict=True):
            assert (a["step"], a["lr"], a["tokens"]) == (b["step"], b["lr"], b["tokens"])
            assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-6)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


def test_evaluation_changes_nothing_in_the_training(call):
    for every in (1, 7):
        assert call(train, MICRO, *SMALL, "train.max_steps=7", f"train.eval_every={every}", "model.dropout=0.1")[0] == 0
    assert equal(weights("runs/micro/step-000007.pt"), weights("runs/micro-2/step-000007.pt"))


def test_a_trained_micro_beats_the_bigram_counts_clearly(call, monkeypatch):
    monkeypatch.setattr(corpus, "EMBEDDED", ALL_NAMES)
    assert call(train, MICRO, "train.max_steps=100", "optim.warmup_steps=20", "train.samples=0")[0] == 0
    assert metrics()[-1]["val_loss"] < 2.30  # bigram counts: 2.45 (benchmarks/count_models.py)


def test_a_diverging_run_stops_with_its_step_and_saves_nothing_bad(call):
    status, _, err = call(train, MICRO, *SMALL, "optim.lr=1e30", "optim.warmup_steps=0", "optim.schedule=constant")
    assert status == 1 and "diverged at step" in err and "learning rate 1e+30" in err
    assert len(err.splitlines()) == 1
    assert not list(Path("runs/micro").glob("*.pt"))


# ------------------------------------------------------------------------------------------------------- usage errors


@pytest.mark.parametrize(
    "args, words",
    [
        ([], ["config"]),
        (["configs/nothing.yaml"], ["configs/nothing.yaml", "No such file"]),
        (["."], ["folder", "--resume"]),
        ([MICRO, "--resume"], ["no run of", "without --resume"]),
        (["runs/nothing", "--resume"], ["runs/nothing"]),
        (["best.pt", "--resume"], ["best.pt", "give its run"]),
        ([MICRO, "max_steps=10"], ["max_steps", "train.max_steps"]),
        ([MICRO, "train.max_steps"], ["train.max_steps", "section.key=value"]),
        ([MICRO, "train.max_steps=0"], ["train.max_steps=0", "at least 1"]),
        ([MICRO, "model.n_heads=3"], ["n_heads=3", "d_model=16", "1, 2, 4, 8, 16"]),
        ([MICRO, "data.name=nothing"], ["data.name=nothing", "no prepared set", "python data/prepare.py"]),
        ([MICRO, "train.device=gpu"], ["train.device", "gpu", "cuda"]),
        ([MICRO, "train.device=cuda:99"], ["cuda:99 does not exist", "use auto or cpu"]),
        ([MICRO, "train.dtype=float16", "train.device=cpu"], ["float16", "cpu", "float32 or bfloat16"]),
        ([MICRO, "data.mode=stream", "model.block_size=500000"], ["block_size=500000", "it can be at most"]),
        ([MICRO, "--unknown"], ["--unknown", "--help"]),
    ],
)
def test_a_training_that_cannot_start_says_why_in_one_line(call, args, words):
    status, out, err = call(train, *args)
    assert status == 2 and out == ""
    assert len(err.splitlines()) == 1 and all(word in err for word in words), err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "args, words",
    [
        (["--prompt", "Zoë?"], ["'?'", "'Z'", "'ë'", "abcdefghijklmnopqrstuvwxyz"]),
        (["--temperature", "-1"], ["temperature -1.0"]),
        (["--temperature", "nan"], ["temperature nan"]),
        (["--temperature", "hot"], ["--temperature", "hot"]),
        (["--top-k", "0"], ["top-k 0"]),
        (["--top-p", "0"], ["top-p 0.0"]),
        (["--min-p", "1.5"], ["min-p 1.5"]),
        (["--num-samples", "0"], ["--num-samples 0"]),
        (["--max-new-tokens", "-3"], ["--max-new-tokens -3"]),
        (["--seed", "-1"], ["--seed -1"]),
        (["--device", "tpu"], ["tpu"]),
        (["--checkpoint", "nothing"], ["nothing"]),
        (["--checkpoint", "empty"], ["empty", "no checkpoint"]),
        (["--checkpoint", "zero.pt"], ["zero.pt", "not a checkpoint of this project"]),
        (["--prompt-file", "nothing.txt"], ["nothing.txt", "No such file"]),
        (["--prompt-file", "latin1.txt"], ["latin1.txt", "not UTF-8"]),
        (["--prompt", "a", "--prompt-file", "-"], ["--prompt", "--prompt-file"]),
    ],
)
def test_a_sample_that_cannot_be_drawn_says_why_in_one_line(call, trained, args, words):
    Path("empty").mkdir()
    Path("zero.pt").touch()
    Path("latin1.txt").write_bytes("é".encode("latin1"))
    status, out, err = call(sample, *args)
    assert status == 2 and out == ""
    assert len(err.splitlines()) == 1 and all(word in err for word in words), err


def test_sampling_without_any_run_says_how_to_train_one(call):
    status, _, err = call(sample)
    assert status == 2 and "python train.py configs/micro.yaml" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("script", ["train.py", "sample.py", "evaluate.py", "data/prepare.py"])
def test_help_comes_before_torch(script):
    result = run("-X", "importtime", ROOT / script, "--help")
    assert result.returncode == 0 and "usage:" in result.stdout
    assert " torch" not in result.stderr
    if script == "train.py":
        assert "model" in result.stdout and "norm_eps" in result.stdout and "1.0e-05" in result.stdout


def test_usage_errors_come_before_torch():
    for command in ([ROOT / "train.py", MICRO, "model.d_model=17"], [ROOT / "sample.py", "--checkpoint", "nothing"]):
        result = run("-X", "importtime", *command)
        assert result.returncode == 2 and "import time:" in result.stderr and " torch" not in result.stderr


# ------------------------------------------------------------------------------------------------------------ sampling


def test_the_same_seed_gives_the_same_samples_and_another_seed_others(call, trained):
    first, again, other = (call(sample, "--seed", seed)[1] for seed in (1, 1, 2))
    assert first == again != other
    assert call(sample, "--seed", 1, "--num-samples", 3)[1] == "".join(first.splitlines(keepends=True)[:3])


def test_many_samples_are_drawn_in_parts_that_make_no_difference(call, trained, monkeypatch):
    whole = call(sample, "--seed", 5, "--num-samples", 20)[1]
    monkeypatch.setattr(sample, "ROWS_AT_ONCE", 7)
    assert call(sample, "--seed", 5, "--num-samples", 20)[1] == whole


def test_the_prompt_stays_in_the_output(call, trained):
    long = "abcdefghijklm" * 3  # longer than the context
    for prompt in ("em", long):
        assert all(line.startswith(prompt) for line in call(sample, "--prompt", prompt)[1].splitlines())
    Path("prompt.txt").write_text("em", encoding="utf-8")
    from_file = call(sample, "--prompt-file", "prompt.txt", "--seed", 3)
    assert from_file[:2] == call(sample, "--prompt", "em", "--seed", 3)[:2]


def test_temperature_zero_is_repeatable_without_a_seed(call, trained):
    assert call(sample, "--temperature", 0)[1] == call(sample, "--temperature", 0)[1]


def test_a_checkpoint_is_sampled_with_its_own_tokenizer(call, trained, monkeypatch, tmp_path):
    names = corpus.EMBEDDED["names"].read_text(encoding="utf-8")
    other = tmp_path / "other.txt"
    other.write_text(names.upper(), encoding="utf-8")  # as many characters, but others
    before = call(sample, "--seed", 1)[1]
    monkeypatch.setitem(corpus.EMBEDDED, "names", other)
    corpus.prepare("names", corpus.Source([other], "lines"), "char", 0.1, 0)
    assert call(sample, "--seed", 1)[1] == before
    status, _, err = call(train, "runs/micro", "--resume", "train.max_steps=30")
    assert status == 2 and "not the data of" in err


def test_damaged_weights_are_an_error_and_not_a_text(call, trained):
    content = checkpoint.read(Path("runs/micro/best.pt"))
    bad = {**content["model"], "lm_head.weight": content["model"]["lm_head.weight"] * float("nan")}
    checkpoint.save(Path("bad.pt"), content | {"model": bad})
    status, out, err = call(sample, "--checkpoint", "bad.pt")
    assert (status, out) == (1, "") and "logits are not finite" in err


@pytest.fixture(scope="module")
def left_by_its_reader(a_run):
    """sample.py in a process of its own, whose reader has enough after a line; what it imports is on stderr."""
    script = f'"{sys.executable}" -X importtime "{ROOT / "sample.py"}" --num-samples 2100 | head -n 1'
    command = ["bash", "-c", f"{script}; exit ${{PIPESTATUS[0]}}"]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}  # so that something is left to write when Python ends
    return subprocess.run(command, cwd=a_run, env=buffered, capture_output=True, text=True, timeout=120)


def test_a_reader_that_has_enough_is_no_error(left_by_its_reader):
    assert left_by_its_reader.returncode == 0 and len(left_by_its_reader.stdout.splitlines()) == 1
    assert "Traceback" not in left_by_its_reader.stderr and "Broken" not in left_by_its_reader.stderr


def test_sampling_imports_no_optimizer(left_by_its_reader):
    imported = {line.rpartition("|")[2].strip() for line in left_by_its_reader.stderr.splitlines()}
    assert {"torch", "model", "generate"} <= imported and not {"optim", "torch._dynamo"} & imported


def test_a_prompt_is_utf8_whatever_the_platform_says(call, trained, monkeypatch):
    # what Python makes of the bytes of "é" where the locale is C
    monkeypatch.setattr(os, "fsencode", lambda text: text.encode("ascii", "surrogateescape"))
    status, _, err = call(sample, "--prompt", "é".encode().decode("ascii", "surrogateescape"))
    assert status == 2 and "'é' cannot be encoded" in err


def test_messages_are_utf8_whatever_the_platform_says():
    Path("a.jsonl").write_text('{"é": 1}', encoding="utf-8")
    bare = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    result = run(ROOT / "data" / "prepare.py", "a.jsonl", "--field", "text", env=bare)
    assert result.returncode == 2 and "its fields: é" in result.stderr


# ------------------------------------------------------------------------------------------------- device and compile


def test_compiling_without_a_compiler_is_an_error_where_it_was_asked_for(call, monkeypatch):
    import torch._inductor.config

    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "/nonexistent"))
    status, _, err = call(train, MICRO, *SMALL, "train.compile=true")
    assert status == 2 and "train.compile=true, but compiling fails here" in err
    assert len(err.splitlines()) == 1 and not Path("runs").exists()


def test_compiling_that_fails_is_given_up_where_it_was_not_asked_for(call, monkeypatch):
    def fail(function):
        raise RuntimeError("no C++ compiler\nand more")

    monkeypatch.setattr(torch, "compile", fail)
    monkeypatch.setattr(device, "worth_compiling", lambda *_: True)
    assert call(train, MICRO, *SMALL, "train.compile=false")[0] == 0
    for accumulation in (1, 2):  # a whole update, or the model alone
        status, out, _ = call(train, MICRO, *SMALL, f"train.accumulation={accumulation}")
        assert status == 0 and "compile off, because compiling fails here (no C++ compiler)" in out
    assert metrics("runs/micro-2") == metrics("runs/micro")  # trying left nothing behind


@pytest.mark.slow
@pytest.mark.parametrize("options", [["optim.name=muon", "model.tie_weights=true"], ["train.accumulation=2"]])
def test_the_compiled_model_learns_what_the_eager_one_learns(call, options):
    for choice in ("false", "true"):
        assert call(train, MICRO, *SMALL, *options, f"train.compile={choice}")[0] == 0
    for a, b in zip(metrics("runs/micro"), metrics("runs/micro-2"), strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    compiled = checkpoint.read(Path("runs/micro-2/best.pt"))["model"]
    assert compiled.keys() == weights("runs/micro/best.pt").keys()  # no wrapper's prefix


@pytest.mark.slow
def test_a_compiled_run_resumes_compiled_and_bit_for_bit(call, monkeypatch):
    monkeypatch.setattr(device, "worth_compiling", lambda *_: True)
    options = ["model.dropout=0.1", "optim.name=muon", "train.checkpoint_every=10"]
    assert call(train, MICRO, *SMALL, *options)[0] == 0
    last = Path("runs/micro/step-000020.pt")
    straight, rows = checkpoint.read(last), metrics("runs/micro")
    last.unlink()
    monkeypatch.setattr(device, "worth_compiling", lambda *_: False)
    status, out, _ = call(train, "runs/micro", "--resume")
    assert status == 0 and "compile on" in out and metrics("runs/micro") == rows
    for name, tensor in checkpoint.read(last)["model"].items():
        assert torch.equal(tensor, straight["model"][name])
