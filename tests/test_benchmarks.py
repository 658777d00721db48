"""The benchmarks run and print their figures; what they say of a machine is not judged here."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import time_to_loss  # noqa: E402


def test_a_loss_is_reached_where_the_line_between_two_evaluations_crosses_it():
    curve = [(10.0, 3.0), (20.0, 2.0), (30.0, 2.5), (40.0, 1.5)]
    for loss, seconds in (
        (4.0, 10.0),
        (3.0, 10.0),
        (2.5, 15.0),
        (2.0, 20.0),
        (1.75, 37.5),
        (1.5, 40.0),
        (1.0, math.inf),
    ):
        assert time_to_loss.seconds_to(curve, loss) == pytest.approx(seconds)
    for seconds, loss in ((5.0, math.inf), (10.0, 3.0), (35.0, 2.0), (100.0, 1.5)):
        assert time_to_loss.loss_at(curve, seconds) == loss


@pytest.mark.slow
def test_two_configurations_are_compared_side_by_side(tmp_path):
    a, b = (f"{ROOT}/configs/micro.yaml,train.max_steps={steps},optim.warmup_steps=5" for steps in (20, 40))
    command = [sys.executable, ROOT / "benchmarks/time_to_loss.py", a, b, "--runs", "1", "--evaluations", "4"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert re.search(r"result .* A after \d+\.\d s, B after \d+\.\d s, \d+\.\d times as fast", result.stdout)
    assert "machine" in result.stdout and result.stdout.count("curve") == 2


@pytest.mark.slow
def test_an_update_is_compared_with_a_plain_loop():
    command = [sys.executable, ROOT / "benchmarks/step.py", "micro"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("× the plain loop") == 3
