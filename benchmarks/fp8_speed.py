"""FP8 -> bf16 against a plain torch dequantisation of the same checkpoint, and the way back: ratios, peak memory.

    python benchmarks/fp8_speed.py [--layers 4] [--pairs 5] [--folder DIR]

The yardstick is what a user would run instead: every weight times its scales with torch, saved with safetensors, all
cores, ending durable. Every run starts a new process; the source is in the page cache. No figure includes an audit.
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

GOAL = 1.0  # hf2mcore takes no longer than torch
PEAK = 600e6  # bytes

BY_TORCH = """
import os, sys
from pathlib import Path
from safetensors import safe_open
from safetensors.torch import save_file
import torch

source, target = map(Path, sys.argv[1:])
target.mkdir()
for file in sorted(source.glob("*.safetensors")):
    with safe_open(file, "pt") as opened:
        names, tensors = set(opened.keys()), {}
        for name in names:
            if name.endswith("_scale_inv"):
                continue
            tensors[name] = opened.get_tensor(name)
            if name + "_scale_inv" in names:
                rows, columns = tensors[name].shape
                scales = opened.get_tensor(name + "_scale_inv")
                wide = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
                tensors[name] = (tensors[name].float() * wide).bfloat16()
    save_file(tensors, target / file.name)
    with (target / file.name).open("rb") as written:
        os.fsync(written.fileno())
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4, help="4 layers are 1.4 GB of FP8 and bf16, 2.3 GB in bf16")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mtpconvert-bench-", dir=options.folder) as folder:
        return run(Path(folder), options.layers, options.pairs)


def run(folder: Path, layers: int, pairs: int) -> int:
    source, there, back, plain = folder / "hf", folder / "mcore", folder / "back", folder / "torch"
    total = write_llama(source, layers, 1 << 30, fp8=True)
    runs: dict[str, tuple[Path, list[str]]] = {
        "torch": (plain, [sys.executable, "-c", BY_TORCH, str(source), str(plain)]),
        "hf2mcore": (there, [*MTPCONVERT, "hf2mcore", str(source), str(there), "--audit", "none"]),
        "mcore2hf": (back, [*MTPCONVERT, "mcore2hf", str(there), str(back), "--audit", "none"]),
    }
    os.environ.pop("OMP_NUM_THREADS", None)  # torch may use every core
    costs = alternate(runs, pairs)
    for file in sorted(source.iterdir()):
        subprocess.run(["cmp", file, back / file.name], check=True)
    rows, failed = [], False
    for name, of_one in costs.items():
        ratios = [one.wall / base.wall for one, base in zip(of_one, costs["torch"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        wall, peak = statistics.median(cost.wall for cost in of_one), max(cost.peak for cost in of_one)
        cpu = statistics.median(cost.cpu for cost in of_one)
        if name == "hf2mcore":
            failed |= low > GOAL or peak > PEAK
        rows.append(
            [name, f"{wall:.2f} s", f"{cpu:.2f} s", f"{total / 1e9 / wall:.2f} GB/s of FP8",
             f"{middle:.2f} ({low:.2f}-{high:.2f})", f"{peak / 1e6:.0f} MB"]
        )  # fmt: skip
    title = f"{total / 1e9:.2f} GB of block-scaled FP8, {pairs} rounds, {os.cpu_count()} cores"
    print(table(title, ["run", "median", "processor", "rate", "ratio: median (quartiles)", "peak memory"], rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
