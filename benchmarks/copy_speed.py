"""hf2mcore and mcore2hf against a durable ``cp``, in alternating runs: ratios, peak memory, a table.

    python benchmarks/copy_speed.py [--layers 8] [--pairs 7] [--folder DIR]

The yardstick is ``cp -r --reflink=never SRC OUT && sync OUT/*``; a plain ``cp`` that leaves the syncing to later is
reported beside it. Conversions run without audit. Every run starts a new process and ends durable.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from checkpoints import write_llama


def measure(command: list[str] | str) -> tuple[float, int]:
    """Seconds and peak memory (bytes, of the largest process) of a command that must succeed."""
    began = time.monotonic()
    child = subprocess.Popen(command, shell=isinstance(command, str), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{command} failed with {child.returncode}")
    return time.monotonic() - began, usage.ru_maxrss * 1024


def tool(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "mtpconvert", *map(str, arguments)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8, help="8 layers are 4.0 GB")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mtpconvert-bench-", dir=options.folder))
    try:
        run(folder, options.layers, options.pairs)
    finally:
        shutil.rmtree(folder)


def run(folder: Path, layers: int, pairs: int) -> None:
    source = folder / "hf"
    total = write_llama(source, layers)
    os.sync()
    there, back, copy = folder / "mcore", folder / "back", folder / "copy"
    runs = {
        "cp && sync": f"cp -r --reflink=never {source} {copy} && sync {copy}/*",
        "cp": f"cp -r --reflink=never {source} {copy}",
        "hf2mcore": tool("hf2mcore", source, there, "--audit", "none", "--overwrite"),
        "mcore2hf": tool("mcore2hf", there, back, "--audit", "none", "--overwrite"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    memory: dict[str, int] = dict.fromkeys(runs, 0)
    for number in range(pairs + 1):
        for name, command in runs.items():
            for left in {"hf2mcore": (there,), "mcore2hf": (back,)}.get(name, (copy,)):
                shutil.rmtree(left, ignore_errors=True)
            os.sync()
            taken, peak = measure(command)
            memory[name] = max(memory[name], peak)
            if number:  # the first round warms the cache
                seconds[name].append(taken)
        print(f"round {number}: " + ", ".join(f"{n} {s[-1]:.2f} s" for n, s in seconds.items() if s), file=sys.stderr)
    for file in sorted(source.iterdir()):
        subprocess.run(["cmp", file, back / file.name], check=True)
    print(f"{total / 1e9:.2f} GB, {pairs} rounds, {resource.getpagesize()}-byte pages, {os.cpu_count()} cores")
    print("| run | median s | GB/s | ratio to cp && sync: median (quartiles) | peak MB |")
    print("|---|---|---|---|---|")
    for name, taken in seconds.items():
        ratios = sorted(one / base for one, base in zip(taken, seconds["cp && sync"], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        median = statistics.median(taken)
        print(
            f"| {name} | {median:.2f} | {total / 1e9 / median:.2f} | {middle:.2f} ({low:.2f}-{high:.2f})"
            f" | {memory[name] / 1e6:.0f} |"
        )


if __name__ == "__main__":
    main()
