"""A tiny checkpoint as DeepSeek and Qwen publish theirs: block-scaled FP8, made with torch and safetensors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.tiny import INDEX

# DeepSeek-V3's published files: everything 2-D is FP8 but embeddings, head, router, eh_proj.
_PLAIN = re.compile(r"norm|embed_tokens|lm_head|shared_head|\.gate\.weight|eh_proj|bias$")
FINITE = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
SMALLEST, LARGEST = 2.0**-124, 2.0**119


def is_packed(name: str) -> bool:
    return name.endswith(".weight") and _PLAIN.search(name) is None


def pack_fp8(
    folder: Path, *, block: tuple[int, int] = (16, 16), scale_dtype: torch.dtype = torch.float32, extreme: bool = True,
    plain: str = " ",
) -> Path:  # fmt: skip
    """Replace the weights of ``folder`` (a tiny checkpoint) by random FP8 codes, every finite one among them, and
    scales over the whole exact range (or near 2^-8, not ``extreme``). Config and index are adapted. ``plain``: part of
    the names that stay as they are beside those that always do."""
    draw = torch.Generator().manual_seed(5)
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        tensors, packed = read(file), {}
        for name, tensor in tensors.items():
            packed[name] = tensor
            if is_packed(name) and plain not in name:
                packed[name], packed[name + "_scale_inv"] = _random(tensor.shape, block, scale_dtype, extreme, draw)
        save_file(packed, file, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in packed.values())
    _adapt(folder, block, total)
    return folder


def read(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in read(file).items()}


def dequantised(tensors: dict[str, torch.Tensor], block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The plain reference: value times scale in float32, rounded to bf16."""
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}
    for name in [name for name in found if name + "_scale_inv" in tensors]:
        rows, columns = found[name].shape
        scale = tensors[name + "_scale_inv"].float()
        wide = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
        found[name] = (found[name].float() * wide).bfloat16()
    return found


def _random(
    shape: torch.Size, block: tuple[int, int], scale_dtype: torch.dtype, extreme: bool, draw: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    count = shape.numel()
    codes = FINITE[torch.randint(len(FINITE), (count,), generator=draw)]
    codes[: len(FINITE)] = FINITE[:count]
    grid = [-(-extent // size) for extent, size in zip(shape, block, strict=True)]
    exponents = torch.randint(-124, 118, grid, generator=draw) if extreme else torch.full(grid, -12)
    scale = (1 + torch.rand(grid, generator=draw)).mul(torch.tensor(2.0) ** exponents).clamp(SMALLEST, LARGEST * 0.99)
    return codes.view(torch.float8_e4m3fn).reshape(shape), scale.to(scale_dtype)


def _adapt(folder: Path, block: tuple[int, int], total: int) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] = {name: file.name for file in sorted(folder.glob("*.safetensors")) for name in read(file)}
        index["metadata"] = {"total_size": total}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
