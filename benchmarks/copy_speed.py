"""hf2mcore and mcore2hf against a durable ``cp``, in alternating runs: ratios, peak memory, a table.

    python benchmarks/copy_speed.py [--layers 8] [--rounds 7] [--folder DIR] [--without-audit]

The yardstick is ``cp -r --reflink=never SRC OUT && sync OUT/*``; a plain ``cp`` that leaves the syncing to later is
reported beside it. Every run starts a new process and ends durable; the source is in the page cache. The goal is not
met when the lower quartile of a ratio is above it, since disks are noisy.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from checkpoints import write_llama
from measure import MTPCONVERT, Goal, alternate, clear, command_line, new_folder, rows_against, table

PEAK = 128e6  # bytes
GOALS = {
    "hf2mcore": Goal(1.1, PEAK), "mcore2hf": Goal(1.1, PEAK),
    "hf2mcore, audited": Goal(1.5, PEAK), "mcore2hf, audited": Goal(1.5, PEAK),
}  # fmt: skip


def main() -> int:
    parser = command_line(__doc__, layers=8, of_layers="8 layers are 4.0 GB", rounds=7)
    parser.add_argument("--without-audit", action="store_true", help="leave out the runs with the default audit")
    options = parser.parse_args()
    with new_folder(options.folder) as folder:
        return run(folder, options.layers, options.rounds, audited=not options.without_audit)


def run(folder: Path, layers: int, rounds: int, *, audited: bool) -> int:
    source = folder / "hf"
    total = write_llama(source, layers)
    there, back, copy = folder / "mcore", folder / "back", folder / "copy"
    copying = f"cp -r --reflink=never {source} {copy}"
    to_mcore = [*MTPCONVERT, "hf2mcore", str(source), str(there)]
    to_hf = [*MTPCONVERT, "mcore2hf", str(there), str(back)]
    commands = {
        "cp && sync": ["sh", "-c", f"{copying} && sync {copy}/*"],
        "cp": ["sh", "-c", copying],
        "hf2mcore": [*to_mcore, "--audit", "none"],
        "mcore2hf": [*to_hf, "--audit", "none"],
    }
    if audited:
        commands |= {"hf2mcore, audited": to_mcore, "mcore2hf, audited": to_hf}
    targets = {"c": copy, "h": there, "m": back}  # by the first letter of the command
    costs = alternate(commands, rounds, lambda name: clear(targets[name[0]]))
    for file in sorted(source.iterdir()):
        subprocess.run(["cmp", file, back / file.name], check=True)
    rows, missed = rows_against("cp && sync", costs, GOALS, lambda cost: [f"{total / 1e9 / cost.wall:.2f} GB/s"])
    title = f"{total / 1e9:.2f} GB of bf16, {rounds} rounds, {os.cpu_count()} cores"
    print(table(title, ["run", "median", "rate", "ratio: median (quartiles)", "at most", "peak memory"], rows))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
