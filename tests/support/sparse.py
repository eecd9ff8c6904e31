"""A Hugging Face directory with real headers and files of holes: as large as a test needs, at once."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from tests.support.tiny_families import CONFIGS, units

_BYTES = {"BF16": 2, "F32": 4, "I64": 8, "BOOL": 1, "F8_E4M3": 1}


def write_sparse(out: Path, **overrides: Any) -> Path:
    """Write a Qwen3 checkpoint in one BF16 file whose data are zeros that take no room on disk; returns ``out``."""
    config = copy.deepcopy(CONFIGS["qwen3"]) | {"dtype": "bfloat16"} | overrides
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    shapes = {name: shape for unit in units(config, 0, copies=False) for name, shape in unit.items()}
    return write_headers(out, config, shapes)


def write_headers(
    out: Path, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str] | None = None
) -> Path:
    """Write config.json and one file of holes with these tensors, BF16 unless ``dtypes`` has them; returns ``out``."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        dtype = (dtypes or {}).get(name, "BF16")
        end = offset + _BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config))
    with (out / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + offset)
    return out
