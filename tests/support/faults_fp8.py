# ruff: noqa: E501 (the table)
"""Faults in block-scaled FP8: wrong scales on the way to bf16, and FP8 files that are not what they were.

The Megatron side is torch's own arithmetic (tests/support/tiny_fp8.py ``dequantised``) in hand-written layouts
(tests/support/handmade.py). What each fault must be called was written down from what it does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from tests.support.handmade import Arrays, megatron_args, megatron_arrays, write_torch_dist
from tests.support.sabotage import edit_json, reindex
from tests.support.tiny import write_tiny
from tests.support.tiny_fp8 import dequantised, pack_fp8, read, read_all

BLOCK = (16, 16)
Tensors = dict[str, torch.Tensor]
Harm = Callable[[Tensors, dict[str, Any]], Any]
TO_MEGATRON, TO_HF, BETWEEN = "to Megatron", "to FP8", "FP8 to FP8"
L0, L3, S = "model.layers.0.", "model.layers.3.", "_scale_inv"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
MTP_PROJ = "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight"


class Fault(NamedTuple):
    """``way``: which sides are compared; the right one is harmed. ``words`` of the finding on ``tensor``."""

    way: str
    harm: Harm
    code: str
    tensor: str | None
    words: str = ""


def scale(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Harm:
    def harm(t: Tensors, c: dict[str, Any]) -> None:
        t[name + S] = change(t[name + S].clone()).contiguous()

    return harm


def code(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Harm:
    def harm(t: Tensors, c: dict[str, Any]) -> None:
        t[name] = change(t[name].view(torch.uint8).clone()).contiguous().view(torch.float8_e4m3fn)

    return harm


def at(row: int, column: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(x: torch.Tensor) -> torch.Tensor:
        x[row, column] = change(x[row : row + 1, column : column + 1])[0, 0]
        return x

    return edit


def flipped(bit: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: (x.contiguous().view(torch.int32) ^ (1 << bit)).view(torch.float32)


def neighbour(x: torch.Tensor) -> torch.Tensor:
    """Block [1, 1] by the scale of [1, 2]."""
    x[1, 1] = x[1, 2]
    return x


def drop(match: Callable[[str], bool]) -> Harm:
    return lambda t, c: [t.pop(name) for name in list(t) if match(name)]


def plain(match: Callable[[str], bool]) -> Harm:
    """Dequantised rightly, in FP8 files."""

    def harm(t: Tensors, c: dict[str, Any]) -> None:
        whole = dequantised(t, BLOCK)
        for name in [name for name in t if match(name) and name + S in t]:
            t[name] = whole[name]
            del t[name + S]

    return harm


def same_values(name: str) -> Harm:
    """Scales halved and codes doubled: other bytes for equal numbers. No code leaves the normal range."""

    def harm(t: Tensors, c: dict[str, Any]) -> None:
        t[name + S] = t[name + S] / 2
        t[name] = (t[name].float() * 2).to(torch.float8_e4m3fn)

    return harm


FAULTS: dict[str, Fault] = {
    "scale of a neighbour block": Fault(TO_MEGATRON, scale(L0 + "self_attn.o_proj.weight", neighbour), "bytes-differ", "decoder.layers.0.self_attention.linear_proj.weight", "cause: scales of a neighbour block (of the next block column)"),
    "scales a block row off": Fault(TO_MEGATRON, scale(L0 + "self_attn.q_b_proj.weight", lambda x: torch.cat([x[:1], x[:-1]])), "bytes-differ", "decoder.layers.0.self_attention.linear_q_up_proj.weight", "cause: scales of a neighbour block (of the previous block row)"),
    "scale of a neighbour block, MTP": Fault(TO_MEGATRON, scale(L3 + "self_attn.o_proj.weight", neighbour), "bytes-differ", MTP_PROJ, "cause: scales of a neighbour block"),
    "transposed scales": Fault(TO_MEGATRON, scale(L0 + "mlp.down_proj.weight", torch.t), "bytes-differ", "decoder.layers.0.mlp.linear_fc2.weight", "cause: transposed scales"),
    "transposed scales, not square, MTP": Fault(TO_MEGATRON, scale(L3 + "self_attn.o_proj.weight", lambda x: x.t().reshape(x.shape)), "bytes-differ", MTP_PROJ, "cause: transposed scales"),
    "plain cast": Fault(TO_MEGATRON, drop(lambda n: n == L0 + "self_attn.o_proj.weight" + S), "bytes-differ", "decoder.layers.0.self_attention.linear_proj.weight", "cause: plain cast: the codes' values without their scales"),
    "plain cast of MTP": Fault(TO_MEGATRON, drop(lambda n: n.startswith(L3) and n.endswith(S)), "bytes-differ", "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight", "cause: plain cast"),
    "up by the scales of gate": Fault(TO_MEGATRON, lambda t, c: t.update({L0 + "mlp.up_proj.weight" + S: t[L0 + "mlp.gate_proj.weight" + S]}), "bytes-differ", FC1, f"cause: scales of another tensor ({L0}mlp.gate_proj.weight_scale_inv)"),
    "gate and up by each other's scales": Fault(TO_MEGATRON, lambda t, c: t.update({L0 + "mlp.up_proj.weight" + S: t[L0 + "mlp.gate_proj.weight" + S], L0 + "mlp.gate_proj.weight" + S: t[L0 + "mlp.up_proj.weight" + S]}), "bytes-differ", FC1, f"cause: scales of another tensor ({L0}mlp.gate_proj.weight_scale_inv); scales of another tensor ({L0}mlp.up_proj.weight_scale_inv)"),
    "an MTP expert by the scales of another": Fault(TO_MEGATRON, lambda t, c: t.update({L3 + "mlp.experts.2.up_proj.weight" + S: t[L3 + "mlp.experts.1.up_proj.weight" + S]}), "bytes-differ", "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight", "cause: scales of another tensor"),
    "scales rounded to bf16": Fault(TO_MEGATRON, scale(L0 + "self_attn.o_proj.weight", lambda x: x.bfloat16().float()), "bytes-differ", "decoder.layers.0.self_attention.linear_proj.weight", "cause: scales rounded to bfloat16 first"),
    "one bit of a scale": Fault(TO_MEGATRON, scale(L0 + "self_attn.o_proj.weight", at(2, 3, flipped(22))), "bytes-differ", "decoder.layers.0.self_attention.linear_proj.weight", "cause: one bit flipped in one scale, model.layers.0.self_attn.o_proj.weight_scale_inv at [2, 3]"),
    "one code": Fault(TO_MEGATRON, code(L0 + "self_attn.o_proj.weight", at(20, 40, lambda x: x ^ 4)), "bytes-differ", "decoder.layers.0.self_attention.linear_proj.weight", "1 of 2016 elements differ once dequantised, the first at row 20, column 40"),
    "one bit of a scale, way back": Fault(TO_HF, scale(L3 + "self_attn.o_proj.weight", at(0, 1, flipped(23))), "bytes-differ", L3 + "self_attn.o_proj.weight", "cause: one bit flipped in one scale"),
    "one code, way back": Fault(TO_HF, code(L3 + "self_attn.o_proj.weight", at(35, 55, lambda x: x ^ 1)), "bytes-differ", L3 + "self_attn.o_proj.weight", "the first at row 35, column 55"),
    "scale of MTP dropped, way back": Fault(TO_HF, drop(lambda n: n == L3 + "self_attn.o_proj.weight" + S), "scale-missing", L3 + "self_attn.o_proj.weight"),
    "MTP dropped with its scales": Fault(TO_HF, drop(lambda n: n.startswith(L3)), "mtp-layer-missing", L3 + "*", "0 of 30 tensors present"),
    "MTP and its scales dropped": Fault(BETWEEN, drop(lambda n: n.startswith(L3)), "mtp-layer-missing", L3 + "*", "52 tensors"),
    "scale of MTP dropped": Fault(BETWEEN, drop(lambda n: n == L3 + "self_attn.o_proj.weight" + S), "mtp-tensor-missing", L3 + "self_attn.o_proj.weight" + S),
    "weight of MTP dropped, scale left": Fault(BETWEEN, drop(lambda n: n == L3 + "self_attn.o_proj.weight"), "scale-orphan", L3 + "self_attn.o_proj.weight" + S),
    "MTP dequantised in FP8 files": Fault(BETWEEN, plain(lambda n: n.startswith(L3)), "quant-mtp-plain", L3 + "mlp.experts.0.down_proj.weight", "add to quantization_config.modules_to_not_convert: \"model.layers.3.*\""),
    "everything dequantised, config kept": Fault(BETWEEN, plain(lambda n: True), "quant-stale-config", None, "remove quantization_config"),
    "config lost": Fault(BETWEEN, lambda t, c: c.pop("quantization_config"), "quant-undeclared", L0 + "mlp.down_proj"),
    "block size lost": Fault(BETWEEN, lambda t, c: c["quantization_config"].pop("weight_block_size"), "quant-no-block-size", L0 + "mlp.down_proj.weight"),
    "another block size": Fault(BETWEEN, lambda t, c: c["quantization_config"].update(weight_block_size=[8, 16]), "scale-shape", L3 + "self_attn.o_proj.weight" + S, "has scales [5, 4]"),
    "a block row of scales lost": Fault(BETWEEN, scale(L3 + "self_attn.o_proj.weight", lambda x: x[:-1]), "scale-shape", L3 + "self_attn.o_proj.weight" + S, "[2, 4]; a weight [36, 56] in blocks of 16 x 16 has scales [3, 4]"),
    "scale of zero": Fault(BETWEEN, scale(L3 + "self_attn.o_proj.weight", at(1, 2, torch.zeros_like)), "scale-invalid", L3 + "self_attn.o_proj.weight" + S, "the first is 0, at row 1, column 2"),
    "scale of NaN": Fault(TO_HF, scale(L3 + "self_attn.o_proj.weight", at(1, 2, lambda x: x * torch.nan)), "scale-invalid", L3 + "self_attn.o_proj.weight" + S, "the first is nan, at row 1, column 2"),
    "last bit of a scale": Fault(BETWEEN, scale(L3 + "self_attn.o_proj.weight", at(1, 2, flipped(0))), "bytes-differ", L3 + "self_attn.o_proj.weight" + S, "one bit flipped"),
    "eh_proj quantised": Fault(TO_HF, lambda t, c: t.update({L3 + "eh_proj.weight": t[L3 + "eh_proj.weight"].to(torch.float8_e4m3fn), L3 + "eh_proj.weight" + S: torch.ones(3, 5)}), "quant-never-packed", L3 + "eh_proj.weight"),
}  # fmt: skip


class Sides:
    """The clean FP8 directory and its Megatron side below ``root``, made once; harmed copies on demand."""

    def __init__(self, root: Path) -> None:
        self.fp8 = pack_fp8(write_tiny("deepseek_v3", root / "fp8"), block=BLOCK, extreme=False)
        self.tensors = read_all(self.fp8)
        self.config: dict[str, Any] = json.loads((self.fp8 / "config.json").read_text())
        self.megatron = self.write_megatron(root / "megatron", self.tensors)

    def pair(self, fault: Fault, folder: Path) -> tuple[Path, Path]:
        """Left and right: the right harmed. AssertionError where the fault changed nothing."""
        tensors, config = dict(self.tensors), json.loads(json.dumps(self.config))
        fault.harm(tensors, config)
        assert config != self.config or tensors.keys() != self.tensors.keys() or any(
            tensors[n].shape != t.shape or tensors[n].dtype != t.dtype or bytes(_raw(tensors[n])) != bytes(_raw(t))
            for n, t in self.tensors.items()
        ), "no fault"  # fmt: skip
        if fault.way == TO_MEGATRON:
            return self.fp8, self.write_megatron(folder, tensors)
        left = self.megatron if fault.way == TO_HF else self.fp8
        return left, self.write_fp8(folder, tensors, config)

    def write_megatron(self, folder: Path, tensors: Tensors) -> Path:
        whole = dequantised(tensors, BLOCK)
        whole = {n: t.float().bfloat16() if t.dtype == torch.float8_e4m3fn else t for n, t in whole.items()}
        arrays: Arrays = {n: _raw(t) for n, t in whole.items()}
        made = megatron_arrays(arrays, self.config, rows=128)
        write_torch_dist(folder, made, megatron_args(self.config, 128))
        return folder

    def write_fp8(self, folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
        shutil.copytree(self.fp8, folder)
        for file in sorted(folder.glob("*.safetensors")):
            kept = {n: tensors[n] for n in read(file) if n in tensors}
            new = {n + S: tensors[n + S] for n in kept if n + S in tensors}
            save_file(kept | new, file, metadata={"format": "pt"})
        reindex(folder)
        edit_json(folder / "config.json", lambda c: (c.clear(), c.update(config)))
        return folder


def _raw(tensor: torch.Tensor) -> np.ndarray:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    array: np.ndarray = tensor.contiguous().view(kinds[tensor.element_size()]).numpy()
    return array.view({1: "u1", 2: "<u2", 4: "<u4"}[array.itemsize])
