"""The shipped configs and the commands of README.md work as they stand there (cut down to a step or two)."""

import re
import shlex
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import config as configuration
import corpus
import sample
import train
from data import prepare
from model import GPT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
CUT = ["train.max_steps=2", "train.batch_size=2", "train.accumulation=1", "train.samples=1"]
SMALL = ["model.n_layers=1", "model.d_model=48", "model.block_size=16"]
SCRIPTS = {"train.py": train, "sample.py": sample, "data/prepare.py": prepare}
TEXT = "Call me Ishmael. Some years ago, never mind how long precisely, I thought I would sail about.\n" * 40


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_config_takes_a_step(call, tmp_path, file):
    name = configuration.load(file).data.name
    if name != "names":
        (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
        corpus.prepare(name, corpus.Source([tmp_path / "text.txt"]), "byte", 0.1, 0)
    assert call(train, file, *CUT, *SMALL)[0] == 0
    assert (tmp_path / "runs" / file.stem / "best.pt").exists()


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_config_says_what_it_is_for(file):
    assert file.read_text(encoding="utf-8").startswith("# ")
    assert re.search(r"`?configs/" + file.name, (ROOT / "README.md").read_text(encoding="utf-8")), file.name


@pytest.mark.parametrize(
    "name, vocabulary, parameters",
    # GPT-2 small's own count, as published with its weights; nanoGPT prints 0.80 M and 10.65 M, without positions
    [
        ("micro", 27, 4096),
        ("gpt2_124m", 50257, 124_439_808),
        ("shakespeare_cpu", 65, 804_096),
        ("shakespeare", 65, 10_745_088),
    ],
)
def test_the_models_have_the_size_they_are_known_for(name, vocabulary, parameters):
    with torch.device("meta"):  # nothing is allocated
        model = GPT(configuration.load(ROOT / "configs" / f"{name}.yaml").model, vocabulary)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_the_commands_for_your_own_text_work_as_they_stand_in_the_readme(call, tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = "".join(re.findall(r"^```bash\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)).splitlines()
    assert len(commands) >= 6
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "novel.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "companies.txt").write_text("".join(f"Müller & Söhne {i}\n" for i in range(50)), encoding="utf-8")
    (tmp_path / "notes").mkdir()
    for i in range(20):
        (tmp_path / "notes" / f"{i}.md").write_text(f"# Note {i}\n\nSome text.\n", encoding="utf-8")
    lines = "".join(f'{{"title": "t", "body": "Text number {i}."}}\n' for i in range(50))
    (tmp_path / "articles.jsonl").write_text(lines, encoding="utf-8")
    for command in commands:
        program, script, *args = shlex.split(command, comments=True)
        assert program == "python"
        cut = [*CUT, "model.n_layers=1"] if script == "train.py" else []
        if script == "sample.py":
            cut = ["--max-new-tokens", "20"]
        assert call(SCRIPTS[script], *args, *cut)[0] == 0, command


@pytest.mark.slow
def test_the_benchmark_of_preparation_prints_its_figures():
    command = [sys.executable, ROOT / "benchmarks" / "prepare.py", "--megabytes", "3", "--documents", "20000"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("MB/s, peak") == 2 and result.stdout.count("bytes a document") == 2
