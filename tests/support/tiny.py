"""Tiny, complete Hugging Face checkpoints whose every element can be told apart; no torch, nothing of mtpconvert."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny_families import CONFIGS, Shape, units

INDEX = "model.safetensors.index.json"
DTYPE_NAMES = {"BF16": "bfloat16", "F32": "float32"}
ITEMSIZE = {"BF16": 2, "F32": 4}

SIDE_FILES: dict[str, bytes] = {
    "tokenizer.json": b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "\xc3\xa9": 1}}}\n',
    "tokenizer_config.json": b'{\n  "tokenizer_class": "PreTrainedTokenizerFast",\n  "model_max_length": 4096\n}\n',
    "generation_config.json": b'{\n  "transformers_version": "5.24.0",\n  "use_cache": true\n}\n',
    "chat_template.jinja": b"{% for message in messages %}{{ message.content }}{% endfor %}",
    "LICENSE": b"A licence of a tiny model.\r\nWith CR LF, and no newline at the end.",
    "README.md": b"---\nlicense: other\n---\n# Tiny\n",
    "modeling_x.py": b"raise RuntimeError('remote code was run')\n# \xff\xfe not utf-8\n",
}


def write_tiny(
    family: str,
    out: Path,
    *,
    dtype: str = "BF16",
    shards: int = 3,
    mtp_layers: int | None = None,
    copies: bool = True,
    config_overrides: Mapping[str, Any] | None = None,
    fill: str = "counter",
    seed: int = 0,
) -> Path:
    """Write a checkpoint of ``family`` (a key of ``CONFIGS``) to the new directory ``out`` and return ``out``.

    ``fill="counter"``: every element of the checkpoint is a bit pattern of its own (copies aside): 0x3C000001 + n for
    F32; for BF16 the n-th 16-bit pattern that is neither +0 nor NaN nor Inf, wrapping round after 65,279 elements.
    ``fill="normal"``: seeded random values fit for a forward pass (matrices scaled by fan-in, norms near 1).
    The last of ``shards`` shards mixes the last trunk layer, final norm and head with the MTP layers.
    ``config_overrides`` change shapes too; the value ``...`` removes a key from the written config only.
    """
    overrides = dict(config_overrides or {})
    removed = [key for key, value in overrides.items() if value is ...]
    config = copy.deepcopy(CONFIGS[family]) | {k: v for k, v in overrides.items() if v is not ...}
    config["dtype"] = DTYPE_NAMES[dtype]
    if "num_hidden_layers" in overrides and "layer_types" in config and "layer_types" not in overrides:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    if family == "deepseek_v3":
        if mtp_layers is None:
            mtp_layers = config["num_nextn_predict_layers"]
        elif "num_nextn_predict_layers" not in overrides:  # overridden: a config that contradicts its tensors
            config["num_nextn_predict_layers"] = mtp_layers
    elif mtp_layers:
        raise ValueError(f"{family} has no MTP layers")

    placed = _place(units(config, mtp_layers or 0, copies=copies), shards)
    dtypes = {name: _dtype_of(name, dtype) for names in placed for name in names}
    values = _values({k: v for names in placed for k, v in names.items()}, dtypes, fill, seed)
    out.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(placed, start=1):
        file = "model.safetensors" if shards == 1 else f"model-{number:05d}-of-{shards:05d}.safetensors"
        # the order that safetensors.serialize chooses: widest dtype first, then by name
        order = sorted(names, key=lambda name: (-ITEMSIZE[dtypes[name]], name))
        write_safetensors(out / file, {name: (dtypes[name], names[name], values[name]) for name in order})
        weight_map |= dict.fromkeys(names, file)
    if shards > 1:
        metadata = {
            "total_parameters": sum(prod(shape) for names in placed for shape in names.values()),
            "total_size": sum(len(value) for value in values.values()),
        }
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for key in removed:
        config.pop(key, None)
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for name, content in SIDE_FILES.items():
        (out / name).write_bytes(content)
    return out


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[str, Shape, bytes]],
    metadata: Mapping[str, str] | None = {"format": "pt"},
) -> None:
    """Write one file with ``tensors`` (name -> dtype, shape, bytes) in the order given, header padded to 8 bytes."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(data for _, _, data in tensors.values()))


def read_safetensors(path: Path) -> dict[str, tuple[str, Shape, bytes]]:
    """Name -> (dtype, shape, bytes) of one file, or of every ``*.safetensors`` file of a directory; checks nothing."""
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in read_safetensors(file).items()}
    blob = path.read_bytes()
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        tensors[name] = (entry["dtype"], tuple(entry["shape"]), blob[start + first : start + last])
    return tensors


def sha256_tree(root: Path) -> dict[str, str]:
    """Relative path -> SHA-256 of every file under ``root``."""
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _place(parts: list[dict[str, Shape]], shards: int) -> list[dict[str, Shape]]:
    """Units to shards: the last unit alone in the last shard, the others evenly over the ones before."""
    if not 1 <= shards <= len(parts):
        raise ValueError(f"{len(parts)} units cannot fill {shards} shards")
    if shards == 1:
        return [{name: shape for part in parts for name, shape in part.items()}]
    placed: list[dict[str, Shape]] = [{} for _ in range(shards)]
    for number, part in enumerate(parts[:-1]):
        placed[number * (shards - 1) // (len(parts) - 1)] |= part
    placed[-1] |= parts[-1]
    return placed


def _dtype_of(name: str, dtype: str) -> str:
    return "F32" if name.endswith("e_score_correction_bias") else dtype


def _copy_source(name: str) -> str | None:
    """The trunk tensor that an MTP layer's own tensor repeats, as DeepSeek-V3's README_WEIGHTS.md lists them."""
    if name.startswith("model.layers."):
        if name.endswith(".embed_tokens.weight"):
            return "model.embed_tokens.weight"
        if name.endswith(".shared_head.head.weight"):
            return "lm_head.weight"
    return None


def _values(shapes: dict[str, Shape], dtypes: dict[str, str], fill: str, seed: int) -> dict[str, bytes]:
    make: Callable[[str, Shape, str], bytes] = _Counter() if fill == "counter" else _Normal(seed)
    values = {name: make(name, shape, dtypes[name]) for name, shape in shapes.items() if _copy_source(name) is None}
    for name in shapes:
        source = _copy_source(name)
        if source is not None:
            values[name] = values.get(source, values["model.embed_tokens.weight"])  # tied: the head is the embedding
    return values


class _Counter:
    """The next patterns of one counter over the whole checkpoint."""

    def __init__(self) -> None:
        self.at = 0
        patterns = np.arange(0x10000, dtype=np.uint16)
        self.patterns = patterns[((patterns & 0x7F80) != 0x7F80) & (patterns != 0)]

    def __call__(self, name: str, shape: Shape, dtype: str) -> bytes:
        numbers = np.arange(self.at, self.at + prod(shape), dtype=np.int64)
        self.at += len(numbers)
        if dtype == "F32":
            return (numbers + 0x3C000001).astype("<u4").tobytes()
        return self.patterns[numbers % len(self.patterns)].astype("<u2").tobytes()


class _Normal:
    """Seeded normal values on a scale that keeps activations near 1 through the layers."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def __call__(self, name: str, shape: Shape, dtype: str) -> bytes:
        values = self.random.standard_normal(shape)
        if len(shape) > 1:
            if not name.endswith("embed_tokens.weight"):
                values /= np.sqrt(shape[-1])
        elif "norm" in name:
            values = 1 + 0.1 * values
        else:
            values *= 0.1
        single = values.astype("<f4")
        if dtype == "F32":
            return single.tobytes()
        bits = single.view("<u4")
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # to nearest, ties to even
        return (rounded >> 16).astype("<u2").tobytes()
