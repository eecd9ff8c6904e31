"""hf2mcore and mcore2hf against a durable ``cp``, in alternating runs: ratios, peak memory, a table.

    python benchmarks/copy_speed.py [--layers 8] [--pairs 7] [--folder DIR] [--without-audit]

The yardstick is ``cp -r --reflink=never SRC OUT && sync OUT/*``; a plain ``cp`` that leaves the syncing to later is
reported beside it. Every run starts a new process and ends durable; the source is in the page cache. The goal is not
met when the lower quartile of a ratio is above it, since disks are noisy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from checkpoints import write_llama
from measure import MTPCONVERT, alternate, table

GOALS = {"hf2mcore": 1.1, "mcore2hf": 1.1, "hf2mcore, audited": 1.5, "mcore2hf, audited": 1.5}
PEAK = 128e6  # bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8, help="8 layers are 4.0 GB")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--without-audit", action="store_true", help="leave out the runs with the default audit")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mtpconvert-bench-", dir=options.folder) as folder:
        return run(Path(folder), options.layers, options.pairs, audited=not options.without_audit)


def run(folder: Path, layers: int, pairs: int, *, audited: bool) -> int:
    source = folder / "hf"
    total = write_llama(source, layers)
    there, back, copy = folder / "mcore", folder / "back", folder / "copy"
    copying = f"cp -r --reflink=never {source} {copy}"
    to_mcore, to_hf = (
        [*MTPCONVERT, "hf2mcore", str(source), str(there)],
        [*MTPCONVERT, "mcore2hf", str(there), str(back)],
    )
    runs: dict[str, tuple[Path, list[str]]] = {
        "cp && sync": (copy, ["sh", "-c", f"{copying} && sync {copy}/*"]),
        "cp": (copy, ["sh", "-c", copying]),
        "hf2mcore": (there, [*to_mcore, "--audit", "none"]),
        "mcore2hf": (back, [*to_hf, "--audit", "none"]),
    }
    if audited:
        runs |= {"hf2mcore, audited": (there, to_mcore), "mcore2hf, audited": (back, to_hf)}
    costs = alternate(runs, pairs)
    for file in sorted(source.iterdir()):
        subprocess.run(["cmp", file, back / file.name], check=True)
    rows, failed = [], False
    for name, of_one in costs.items():
        ratios = [one.wall / base.wall for one, base in zip(of_one, costs["cp && sync"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        wall, peak = statistics.median(cost.wall for cost in of_one), max(cost.peak for cost in of_one)
        goal = GOALS.get(name)
        failed |= goal is not None and (low > goal or peak > PEAK)
        rows.append(
            [name, f"{wall:.2f} s", f"{total / 1e9 / wall:.2f} GB/s", f"{middle:.2f} ({low:.2f}-{high:.2f})",
             "" if goal is None else f"{goal}", f"{peak / 1e6:.0f} MB"]
        )  # fmt: skip
    title = f"{total / 1e9:.2f} GB of bf16, {pairs} rounds, {os.cpu_count()} cores"
    print(table(title, ["run", "median", "rate", "ratio: median (quartiles)", "at most", "peak memory"], rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
