"""What one waits for before anything happens: ``--help``, and ``inspect`` of a large checkpoint's headers."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from full_size import TENSORS, write_sparse
from measure import MTPCONVERT, median_cost, table

RUNS = 7
SHARDS = 100
HELP_CPU = 0.3  # seconds
INSPECT_WALL = 1.2  # seconds


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="mtpconvert-bench-") as folder:
        tree = write_sparse(Path(folder) / "deepseek-v3", SHARDS)
        start = median_cost([*MTPCONVERT, "--help"], RUNS)
        inspect = median_cost([*MTPCONVERT, "inspect", str(tree)], RUNS)
    rows = [
        ["`--help`", f"{start.wall:.2f} s", f"{start.cpu:.2f} s", f"{start.peak / 1e6:.0f} MB", f"CPU {HELP_CPU} s"],
        [
            f"`inspect`, {SHARDS} shards, {TENSORS:,} tensors",
            f"{inspect.wall:.2f} s",
            f"{inspect.cpu:.2f} s",
            f"{inspect.peak / 1e6:.0f} MB",
            f"wall {INSPECT_WALL} s",
        ],
    ]
    print(table(f"Starting up (median of {RUNS})", ["command", "wall", "CPU", "peak memory", "at most"], rows))
    return int(start.cpu > HELP_CPU or inspect.wall > INSPECT_WALL)


if __name__ == "__main__":
    sys.exit(main())
