"""How fast a corpus is prepared, in how much memory, and how that compares with a plain Python loop.

    python benchmarks/prepare.py [--megabytes 1000] [--documents 2000000]

The plain text is the names over and over, the documents are numbered names. Each preparation runs in a process of its
own, whose peak memory is read from the operating system. The loop does the same a character or document at a time: it
looks each character up in a dictionary (of a hundredth of the text), and each document in a set of hashes.
"""

import argparse
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
CHILD = """
import resource, sys, time, pathlib
import corpus
corpus.PREPARED = pathlib.Path(sys.argv[1])
source = corpus.Source([pathlib.Path(sys.argv[2])], None if sys.argv[3] == "text" else "lines")
start = time.perf_counter()
meta = corpus.prepare("bench", source, sys.argv[4], 0.1, 0)
seconds = time.perf_counter() - start
if sys.platform == "linux":  # ru_maxrss would be that of the parent, if that is larger
    peak = int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
print(seconds, peak)
"""


def prepared(place: Path, file: Path, kind: str, tokens: str) -> tuple[float, float]:
    """(seconds, peak MB) of a preparation in a new process."""
    command = [sys.executable, "-c", CHILD, str(place / "prepared"), str(file), kind, tokens]
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    seconds, peak = map(float, result.stdout.split())
    return seconds, peak


def loop_over_characters(text: str) -> float:
    """Seconds that a plain loop takes for the text."""
    start = time.perf_counter()
    id_of = {c: i for i, c in enumerate(sorted(set(text)))}
    bytearray(id_of[c] for c in text)
    return time.perf_counter() - start


def loop_over_documents(text: str) -> float:
    start = time.perf_counter()
    seen, ids = set(), bytearray()
    for document in text.split("\n"):
        digest = hashlib.blake2b(document.encode(), digest_size=16).digest()
        if document.strip() and digest not in seen:
            seen.add(digest)
            for c in document:
                ids.append(ord(c))
            ids.append(255)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--documents", type=int, default=2_000_000)
    args = parser.parse_args()
    names = (ROOT / "data" / "names.txt").read_text(encoding="utf-8")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with open(place / "text", "w", encoding="utf-8") as file:
            for _ in range(args.megabytes * 1_000_000 // len(names)):
                file.write(names)
        size = (place / "text").stat().st_size / 1e6
        part = names * max(1, int(size * 1e4 / len(names)))
        loop = len(part) / 1e6 / loop_over_characters(part)
        for tokens in ("byte", "char"):
            seconds, peak = prepared(place, place / "text", "text", tokens)
            rate = f"{size:,.0f} MB in {seconds:.1f} s = {size / seconds:.0f} MB/s, peak {peak:.0f} MB"
            print(f"plain text, {tokens}: {rate}; {size / seconds / loop:.1f} times the plain loop ({loop:.1f} MB/s)")
        lines = names.split()
        with open(place / "documents", "w", encoding="utf-8") as file:
            for i in range(args.documents):
                file.write(f"{lines[i % len(lines)]}{i // len(lines)}\n")
        loop = args.documents / loop_over_documents((place / "documents").read_text(encoding="utf-8"))
        _, base = prepared(place, ROOT / "data" / "names.txt", "documents", "byte")
        for tokens in ("byte", "char"):
            seconds, peak = prepared(place, place / "documents", "documents", tokens)
            each = (peak - base) * 1e6 / args.documents
            rate = f"{args.documents:,} in {seconds:.1f} s = {args.documents / seconds:,.0f} a second"
            print(f"documents, {tokens}: {rate}, peak {peak:.0f} MB = {each:.0f} bytes a document", end="; ")
            print(f"{args.documents / seconds / loop:.1f} times the plain loop ({loop:,.0f} a second)")


if __name__ == "__main__":
    main()
