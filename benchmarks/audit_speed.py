"""The auditor against ``cmp`` over the same bytes, and its ``headers`` level on full-size headers.

    python benchmarks/audit_speed.py [--layers 8] [--runs 5] [--folder DIR]

``cmp`` compares each file of a checkpoint with its copy. Warm: all in the page cache. Cold: the files are dropped from
it before every run (posix_fadvise, so only these files).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from checkpoints import write_llama
from full_size import TENSORS, write_sparse
from measure import MTPCONVERT, Cost, cost_of, table

GOALS = {("audit HF HF", "warm"): 0.8, ("audit HF Megatron", "warm"): 1.2,
         ("audit HF HF", "cold"): 1.2, ("audit HF Megatron", "cold"): 1.2}  # fmt: skip
PEAK = 128e6  # bytes
HEADERS_WALL = 1.5  # seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8, help="8 layers are 4.0 GB")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mtpconvert-bench-", dir=options.folder) as folder:
        failed = bits(Path(folder), options.layers, options.runs)
        return failed | headers(Path(folder), options.runs)


def bits(folder: Path, layers: int, runs: int) -> int:
    source, copy, there = folder / "hf", folder / "copy", folder / "mcore"
    total = write_llama(source, layers)
    shutil.copytree(source, copy)
    subprocess.run([*MTPCONVERT, "hf2mcore", source, there, "--audit", "none"], check=True, capture_output=True)
    os.sync()
    compare = " && ".join(f"cmp {file} {copy / file.name}" for file in sorted(source.glob("*.safetensors")))
    commands = {
        "cmp": ["sh", "-c", compare],
        "audit HF HF": [*MTPCONVERT, "audit", str(source), str(copy)],
        "audit HF Megatron": [*MTPCONVERT, "audit", str(source), str(there)],
    }
    rows, failed = [], False
    for state in ("warm", "cold"):
        costs: dict[str, list[Cost]] = {name: [] for name in commands}
        for number in range(runs + 1):
            for name, command in commands.items():
                if state == "cold":
                    forget(folder)
                cost = cost_of(command)
                if number:
                    costs[name].append(cost)
        for name, of_one in costs.items():
            ratios = [one.wall / base.wall for one, base in zip(of_one, costs["cmp"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            wall, peak = statistics.median(cost.wall for cost in of_one), max(cost.peak for cost in of_one)
            goal = GOALS.get((name, state))
            failed |= goal is not None and (low > goal or peak > PEAK)
            rows.append([f"{name}, {state}", f"{wall:.2f} s", f"{middle:.2f} ({low:.2f}-{high:.2f})",
                         "" if goal is None else f"{goal}", f"{peak / 1e6:.0f} MB"])  # fmt: skip
    title = f"Audit of 2 x {total / 1e9:.2f} GB, {runs} rounds, {os.cpu_count()} cores"
    print(table(title, ["run", "median", "ratio to cmp: median (quartiles)", "at most", "peak memory"], rows))
    return int(failed)


def forget(folder: Path) -> None:
    """Drop the folder's files from the page cache; they are on disk already."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def headers(folder: Path, runs: int) -> int:
    one, two = write_sparse(folder / "one", 100), write_sparse(folder / "two", 100)
    command = [*MTPCONVERT, "audit", "--level", "headers", str(one), str(two)]
    cost_of(command)
    costs = [cost_of(command) for _ in range(runs)]
    wall = statistics.median(cost.wall for cost in costs)
    cpu, peak = statistics.median(cost.cpu for cost in costs), max(cost.peak for cost in costs)
    row = [
        f"2 x {TENSORS:,} tensors in 100 files",
        f"{wall:.2f} s",
        f"{cpu:.2f} s",
        f"{HEADERS_WALL} s",
        f"{peak / 1e6:.0f} MB",
    ]
    print(table("Audit at level headers", ["run", "median", "CPU", "at most", "peak memory"], [row]))
    return int(wall > HEADERS_WALL)


if __name__ == "__main__":
    sys.exit(main())
