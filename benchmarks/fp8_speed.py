"""FP8 -> bf16 against a plain torch dequantisation of the same checkpoint, and the way back: ratios, peak memory.

    python benchmarks/fp8_speed.py [--layers 4] [--rounds 5] [--folder DIR]

The yardstick is what a user would run instead: every weight times its scales with torch, saved with safetensors, all
cores, ending durable. Every run starts a new process; the source is in the page cache. No figure includes an audit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from checkpoints import write_llama
from measure import MTPCONVERT, Goal, alternate, clear, command_line, new_folder, rows_against, table

GOALS = {"hf2mcore": Goal(1.0, 600e6)}  # no longer than torch

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
    of_layers = "4 layers are 1.4 GB of FP8 and bf16, 2.3 GB in bf16"
    options = command_line(__doc__, layers=4, of_layers=of_layers, rounds=5).parse_args()
    with new_folder(options.folder) as folder:
        return run(folder, options.layers, options.rounds)


def run(folder: Path, layers: int, rounds: int) -> int:
    source, there, back, plain = folder / "hf", folder / "mcore", folder / "back", folder / "torch"
    total = write_llama(source, layers, 1 << 30, fp8=True)
    commands = {
        "torch": [sys.executable, "-c", BY_TORCH, str(source), str(plain)],
        "hf2mcore": [*MTPCONVERT, "hf2mcore", str(source), str(there), "--audit", "none"],
        "mcore2hf": [*MTPCONVERT, "mcore2hf", str(there), str(back), "--audit", "none"],
    }
    targets = {"torch": plain, "hf2mcore": there, "mcore2hf": back}
    os.environ.pop("OMP_NUM_THREADS", None)  # torch may use every core
    costs = alternate(commands, rounds, lambda name: clear(targets[name]))
    for file in sorted(source.iterdir()):
        subprocess.run(["cmp", file, back / file.name], check=True)
    rows, missed = rows_against(
        "torch", costs, GOALS, lambda cost: [f"{cost.cpu:.2f} s", f"{total / 1e9 / cost.wall:.2f} GB/s of FP8"]
    )
    title = f"{total / 1e9:.2f} GB of block-scaled FP8, {rounds} rounds, {os.cpu_count()} cores"
    columns = ["run", "median", "processor", "rate", "ratio: median (quartiles)", "at most", "peak memory"]
    print(table(title, columns, rows))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
