"""DeepSeek-V3 in full size without its 1.37 TB: real names, shapes and headers over files of holes."""

from __future__ import annotations

import json
import re
import sys
from math import prod
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.tiny_families import Shape, units  # noqa: E402

CONFIG = ROOT / "mappings/configs/DeepseekV3ForCausalLM.full.json"
TENSORS = 46_183
PLAIN = re.compile(r"embed_tokens|lm_head|shared_head|mlp\.gate\.weight|eh_proj")  # bf16 in the FP8 release


def write_sparse(out: Path, shards: int, *, fp8: bool = False) -> Path:
    """A checkpoint directory of ``shards`` sparse files under the new folder ``out``; takes some megabytes of disk.

    ``fp8``: as published, block-scaled, 91,991 tensors.
    """
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
        stored = {name: spec for one in held for name, spec in _stored(one, tensors[one], fp8).items()}
        total += _write_shard(out / file, stored)
        weight_map |= dict.fromkeys(stored, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return out


def _stored(name: str, shape: Shape, fp8: bool) -> dict[str, tuple[str, Shape]]:
    if name.endswith("e_score_correction_bias"):
        return {name: ("F32", shape)}
    if not fp8 or len(shape) == 1 or PLAIN.search(name):
        return {name: ("BF16", shape)}
    scales = (-(-shape[0] // 128), -(-shape[1] // 128))
    return {name: ("F8_E4M3", shape), name + "_scale_inv": ("F32", scales)}


def _write_shard(path: Path, tensors: dict[str, tuple[str, Shape]]) -> int:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * {"F32": 4, "BF16": 2, "F8_E4M3": 1}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + offset)
    return offset
