"""What the benchmarks share: which machine it is, and the median of repeated times."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


def describe() -> str:
    """The machine in a line: processor, cores, threads, GPU, versions."""
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        cpu = next((line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), cpu)
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"machine  {cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads{gpu}; {platform.system()}, "
        f"Python {platform.python_version()}, PyTorch {torch.__version__}"
    )


def count(text: str) -> int:
    """The type of an option that is a number of things, at least one."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def seconds_of(functions: dict[str, Callable[[], object]], calls: int, rounds: int = 7) -> dict[str, float]:
    """Median seconds of a call of each function. They take turns, so that a busy minute slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():  # the first calls allocate
        function()
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                function()
            times[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(values) for name, values in times.items()}
