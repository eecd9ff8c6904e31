"""DeepSeek-V3 in full size without its 1.37 TB: real names, shapes and headers over files of holes."""

from __future__ import annotations

import json
import shutil
import sys
from math import prod
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.tiny_families import Shape, units  # noqa: E402

CONFIG = ROOT / "mappings/configs/DeepseekV3ForCausalLM.full.json"
TENSORS = 46_183


def write_sparse(out: Path, shards: int) -> Path:
    """A checkpoint directory of ``shards`` sparse files under the new folder ``out``; takes some megabytes of disk."""
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    tensors: dict[str, Shape] = {}
    for unit in units(config, config["num_nextn_predict_layers"], copies=True):
        tensors |= unit
    assert len(tensors) == TENSORS, f"{len(tensors)} tensors instead of {TENSORS}"
    out.mkdir(parents=True)
    names, weight_map, total = list(tensors), {}, 0
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        held = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        total += _write_shard(out / file, {name: tensors[name] for name in held})
        weight_map |= dict.fromkeys(held, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    shutil.copyfile(CONFIG, out / "config.json")
    return out


def _write_shard(path: Path, tensors: dict[str, Shape]) -> int:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors.items():
        single = name.endswith("e_score_correction_bias")
        size = prod(shape) * (4 if single else 2)
        header[name] = {
            "dtype": "F32" if single else "BF16",
            "shape": shape,
            "data_offsets": [offset, offset + size],
        }
        offset += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + offset)
    return offset
