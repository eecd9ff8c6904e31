"""The trained fixtures, damaged copies of them, and how many of their drafts are accepted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny import read_safetensors, write_safetensors

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
DEEPSEEK = FIXTURES / "tiny-deepseek-v3-mtp"
GLM = FIXTURES / "tiny-glm4-moe-mtp"
TRAINED = {"deepseek_v3": DEEPSEEK, "glm4_moe": GLM}

Tensors = dict[str, np.ndarray]  # bit patterns: uint16 of a BF16 tensor, uint32 of an F32 one
Damage = Callable[[Tensors], None]
MTP = "model.layers.3."  # of DeepSeek's one MTP layer and of GLM's first
SECOND = "model.layers.4."  # GLM's second


def damaged(source: Path, out: Path, damage: Damage) -> Path:
    """A copy of ``source`` at ``out`` with ``damage`` done. Raises AssertionError where nothing changed."""
    shutil.copytree(source, out)
    stored = read_safetensors(source)
    kinds = {"BF16": "<u2", "F32": "<u4"}
    values = {name: np.frombuffer(data, kinds[d]).reshape(shape).copy() for name, (d, shape, data) in stored.items()}
    damage(values)
    after = {name: (stored[name][0], value.shape, value.tobytes()) for name, value in values.items()}
    assert after != stored, "the damage changed nothing"
    write_safetensors(out / "model.safetensors", after)
    return out


def exchange(values: Tensors, one: str, other: str) -> None:
    values[one], values[other] = values[other].copy(), values[one].copy()


def halves(name: str, axis: int) -> Damage:
    """The two halves of a tensor along ``axis`` exchanged."""

    def damage(values: Tensors) -> None:
        values[name] = np.roll(values[name], values[name].shape[axis] // 2, axis=axis)

    return damage


def exchange_norms(values: Tensors) -> None:
    exchange(values, f"{MTP}enorm.weight", f"{MTP}hnorm.weight")


def experts_of(values: Tensors, prefix: str) -> int:
    return len([name for name in values if name.startswith(f"{prefix}mlp.experts.") and "gate_proj" in name])


def gate_and_up(prefix: str) -> Damage:
    def damage(values: Tensors) -> None:
        for expert in range(experts_of(values, prefix)):
            one = f"{prefix}mlp.experts.{expert}."
            exchange(values, f"{one}gate_proj.weight", f"{one}up_proj.weight")

    return damage


def reverse_experts(values: Tensors) -> None:
    count = experts_of(values, MTP)
    for expert in range(count // 2):
        for part in ("gate_proj", "up_proj", "down_proj"):
            names = (f"{MTP}mlp.experts.{number}.{part}.weight" for number in (expert, count - 1 - expert))
            exchange(values, *names)


def fresh(values: Tensors) -> None:
    """The MTP layer as a new model has it: normal with standard deviation 0.02, norms one, router bias zero."""
    chooser = np.random.default_rng(0)
    for name, value in values.items():
        if not name.startswith(MTP) or name.endswith(("embed_tokens.weight", "shared_head.head.weight")):
            continue
        if name.endswith("correction_bias"):
            value[...] = 0
        elif value.ndim == 1:
            value[...] = 0x3F80  # 1.0
        else:
            value[...] = bf16(chooser.normal(0, 0.02, value.shape))


def bf16(numbers: np.ndarray) -> np.ndarray:
    """Bit patterns of float numbers, cut to bfloat16."""
    return (numbers.astype("<f4").view("<u4") >> 16).astype("<u2")


def floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype("<u4") << 16).view("<f4")


def constant(name: str, pattern: int) -> Damage:
    def damage(values: Tensors) -> None:
        values[name][...] = pattern

    return damage


def block_of_the_last_trunk_layer(values: Tensors) -> None:
    """Attention, norms and experts of MTP are those of the last trunk layer."""
    for name in values:
        if name.startswith(MTP) and (source := name.replace(MTP, "model.layers.2.")) in values:
            values[name] = values[source].copy()


def head_norm_of_the_trunk(values: Tensors) -> None:
    values[f"{MTP}shared_head.norm.weight"] = values["model.norm.weight"].copy()


def rotate_rows(name: str, by: int) -> Damage:
    def damage(values: Tensors) -> None:
        values[name] = np.roll(values[name], by, axis=0)

    return damage


def three_bits_of_mantissa(values: Tensors) -> None:
    """Every matrix of MTP rounded to the precision of FP8 (E4M3)."""
    for name, value in values.items():
        if name.startswith(MTP) and value.ndim == 2:
            value[...] = (value + 0x8) & 0xFFF0


def one_bit(name: str, bit: int) -> Damage:
    def damage(values: Tensors) -> None:
        values[name].flat[0] ^= 1 << bit

    return damage


def drop(prefix: str) -> Damage:
    def damage(values: Tensors) -> None:
        for name in [name for name in values if name.startswith(prefix)]:
            del values[name]

    return damage


def exchange_depths(values: Tensors) -> None:
    for name in [name for name in values if name.startswith(MTP)]:
        exchange(values, name, name.replace(MTP, SECOND))


def config_of(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


def architecture_of(path: Path) -> str:
    (name,) = config_of(path)["architectures"]
    return str(name)
