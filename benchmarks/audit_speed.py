"""The auditor against ``cmp`` over the same bytes, and its ``headers`` level on full-size headers.

    python benchmarks/audit_speed.py [--layers 8] [--rounds 5] [--folder DIR]

``cmp`` compares each file of a checkpoint with its copy. Warm: all in the page cache. Cold: the files are dropped from
it before every run (posix_fadvise, so only these files).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from checkpoints import write_llama
from full_size import TENSORS, write_sparse
from measure import MTPCONVERT, Goal, alternate, command_line, median_cost, new_folder, rows_against, table

PEAK = 128e6  # bytes
GOALS = {
    "warm": {"HF against HF": Goal(0.8, PEAK), "HF against Megatron": Goal(1.2, PEAK)},
    "cold": {"HF against HF": Goal(1.2, PEAK), "HF against Megatron": Goal(1.2, PEAK)},
}
HEADERS_WALL = 1.5  # seconds


def main() -> int:
    options = command_line(__doc__, layers=8, of_layers="8 layers are 4.0 GB", rounds=5).parse_args()
    with new_folder(options.folder) as folder:
        failed = bits(folder, options.layers, options.rounds)
        return failed | headers(folder, options.rounds)


def bits(folder: Path, layers: int, rounds: int) -> int:
    source, copy, there = folder / "hf", folder / "copy", folder / "mcore"
    total = write_llama(source, layers)
    shutil.copytree(source, copy)
    subprocess.run([*MTPCONVERT, "hf2mcore", source, there, "--audit", "none"], check=True, capture_output=True)
    os.sync()
    compare = " && ".join(f"cmp {file} {copy / file.name}" for file in sorted(source.glob("*.safetensors")))
    commands = {
        "cmp": ["sh", "-c", compare],
        "HF against HF": [*MTPCONVERT, "audit", str(source), str(copy)],
        "HF against Megatron": [*MTPCONVERT, "audit", str(source), str(there)],
    }
    rows, failed = [], False
    for state, goals in GOALS.items():
        costs = alternate(commands, rounds, lambda _, cold=state == "cold": forget(folder) if cold else None)
        of_state, missed = rows_against("cmp", costs, goals, lambda _: [])
        rows += [[f"{name}, {state}", *cells] for name, *cells in of_state]
        failed |= missed
    title = f"Audit of 2 x {total / 1e9:.2f} GB, {rounds} rounds, {os.cpu_count()} cores"
    print(table(title, ["run", "median", "ratio to `cmp`: median (quartiles)", "at most", "peak memory"], rows))
    return int(failed)


def forget(folder: Path) -> None:
    """Drop the folder's files from the page cache; they are on disk already."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def headers(folder: Path, rounds: int) -> int:
    one, two = write_sparse(folder / "one", 100), write_sparse(folder / "two", 100)
    cost = median_cost([*MTPCONVERT, "audit", "--level", "headers", str(one), str(two)], rounds)
    row = [
        f"2 x {TENSORS:,} tensors in 100 files",
        f"{cost.wall:.2f} s",
        f"{cost.cpu:.2f} s",
        f"{HEADERS_WALL} s",
        f"{cost.peak / 1e6:.0f} MB",
    ]
    print(table("Audit at level headers", ["run", "median", "CPU", "at most", "peak memory"], [row]))
    return int(cost.wall > HEADERS_WALL)


if __name__ == "__main__":
    sys.exit(main())
