"""Planning and proving full-size DeepSeek-V3: from the config alone, and from the headers of 163 sparse files."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from full_size import CONFIG, ROOT, TENSORS, write_sparse
from measure import MTPCONVERT, median_cost, table

RUNS = 5
SHARDS = 163
WALL = 5.0  # seconds
PEAK = 500e6  # bytes
PROVE = """
import json, sys
from pathlib import Path
from mtpconvert.mapping.dims import Scope
from mtpconvert.mapping.expand import expand
from mtpconvert.mapping.load import load_mapping
from mtpconvert.mapping.prove import prove
mapping = load_mapping(Path(sys.argv[1]))
config = json.loads(Path(sys.argv[2]).read_text())
scope = Scope(config, mapping.defaults)
scope.symbols["mtp_layers"] = config["num_nextn_predict_layers"]
expansion = expand(mapping, scope, config["vocab_size"], None)
proof = prove(expansion.tiles, expansion.fills)
assert (proof.tiles, proof.mcore_tensors, proof.elements) == (46_181, 925, 682_636_487_424), proof
"""


def main() -> int:
    mapping = ROOT / "mappings/DeepseekV3ForCausalLM.toml"
    with tempfile.TemporaryDirectory(prefix="mtpconvert-bench-") as folder:
        tree = write_sparse(Path(folder) / "deepseek-v3", SHARDS)
        published = write_sparse(Path(folder) / "deepseek-v3-fp8", SHARDS, fp8=True)
        costs = {
            "expand and prove the mapping on the full config": median_cost(
                [sys.executable, "-c", PROVE, str(mapping), str(CONFIG)], RUNS
            ),
            f"`plan` of {SHARDS} sparse files, {TENSORS:,} tensors": median_cost(
                [*MTPCONVERT, "plan", str(tree)], RUNS
            ),
            "`plan` of the same in FP8, scales beside the weights": median_cost(
                [*MTPCONVERT, "plan", str(published)], RUNS
            ),
        }
    rows = [
        [what, f"{cost.wall:.2f} s", f"{cost.cpu:.2f} s", f"{cost.peak / 1e6:.0f} MB"] for what, cost in costs.items()
    ]
    title = f"Planning DeepSeek-V3 (median of {RUNS}; at most {WALL:.0f} s and {PEAK / 1e6:.0f} MB)"
    print(table(title, ["what", "wall", "CPU", "peak memory"], rows))
    return int(any(cost.wall > WALL or cost.peak > PEAK for cost in costs.values()))


if __name__ == "__main__":
    sys.exit(main())
