"""Weights kept as codes and scales, and the plain tensors that they stand for: which are there, and what is wrong.

FP8 in blocks (DeepSeek-V3 README_WEIGHTS.md, "FP8 weights"): ``X`` F8_E4M3, ``X_scale_inv`` one factor a block of
``quantization_config.weight_block_size``, the last blocks partial. MXFP4 (OCP Microscaling 1.0, as gpt-oss keeps it):
``X_blocks`` U8 [experts, rows, groups, 16] of two e2m1 codes a byte, ``X_scales`` U8 one e8m0 a group of 32, which
stand for ``X`` [experts, groups * 32, rows] (transformers 5.24.0, integrations/mxfp4.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.readers.side import Packed, Side
from mtpconvert.tensors import Shape, TensorSpec

SCALE_INV, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
GROUP = 32  # elements under one MXFP4 scale
_SCALE_DTYPES = {"F32", "BF16", "F16", "F8_E8M0"}
_PLAIN = {"BF16", "F16", "F32"}


def schemes(config: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, what it says) of every quantization_config, at whatever level of the config."""
    for key, value in config.items():
        if isinstance(value, dict):
            if key in ("quantization_config", "compression_config"):
                yield path + key, value
            else:
                yield from schemes(value, f"{path}{key}.")


def packed_of(side: Side) -> tuple[dict[str, Packed], list[Finding]]:
    """The tensors of ``side`` that can be decoded, by the name of what they stand for; what keeps others from it.

    A scale that is missing or that has no weight is found by ``quantised``.
    """
    if not side.is_huggingface:
        return {}, []
    packed: dict[str, Packed] = {}
    found: list[Finding] = []
    declared = list(schemes(side.config or {}))
    block, path = _block_size(declared)
    mxfp4 = any(str(scheme.get("quant_method", "")).lower() == "mxfp4" for _, scheme in declared)
    unsized: list[str] = []
    if not mxfp4 and not _has_fp8(side):
        return {}, []
    for name, spec in side.inventory.items():
        if spec.dtype == "F8_E4M3" and (scale := side.inventory.get(name + SCALE_INV)) is not None:
            blocks = _blocks(spec, scale, block)
            if blocks is None:
                unsized.append(name)
            elif why := _misfit(spec.shape, scale, blocks):
                found.append(finding("scale-shape", f"{scale.name}: {why}", side=side.label, tensor=scale.name))
            else:
                packed[name] = Packed(name, spec.shape, name, scale.name, blocks)
        elif mxfp4 and name.endswith(BLOCKS) and spec.dtype == "U8":
            stem = name.removesuffix(BLOCKS)
            scale = side.inventory.get(stem + SCALES)
            if scale is None:
                continue
            if len(spec.shape) != 4 or spec.shape[3] != GROUP // 2 or scale.shape != spec.shape[:3]:
                why = f"{list(scale.shape)} {scale.dtype} for blocks {list(spec.shape)}, not one for 16 bytes"
                found.append(finding("scale-shape", f"{scale.name}: {why}", side=side.label, tensor=scale.name))
            elif scale.dtype in ("U8", "F8_E8M0"):
                experts, rows, groups, _ = spec.shape
                packed[stem] = Packed(stem, (experts, groups * GROUP, rows), name, scale.name, (1, GROUP, 1), "mxfp4")
    if unsized and declared:
        text = (
            f"{len(unsized)} weights are scaled in blocks and {path or declared[0][0]} has no weight_block_size that "
            f"says how large; the first is {unsized[0]}"
        )
        found.append(finding("quant-no-block-size", text, side=side.label, tensor=unsized[0], count=len(unsized)))
    return packed, found


def _block_size(declared: list[tuple[str, dict[str, Any]]]) -> tuple[Shape | None, str]:
    """Two positive integers, and where they are said."""
    for path, scheme in declared:
        size = scheme.get("weight_block_size")
        if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
            return tuple(size), path
    return None, ""


def _blocks(spec: TensorSpec, scale: TensorSpec, block: Shape | None) -> Shape | None:
    """The extents of a block along each axis; a single factor is for all. None: nothing says."""
    if scale.numel == 1 and (block is None or len(spec.shape) < 2):
        return tuple(max(1, extent) for extent in spec.shape)
    if block is None or len(spec.shape) < 2:
        return None
    return (*((1,) * (len(spec.shape) - 2)), *block)


def _misfit(shape: Shape, scale: TensorSpec, blocks: Shape) -> str | None:
    if scale.dtype not in _SCALE_DTYPES:
        return f"scales of {scale.dtype}"
    expected = tuple(-(-extent // size) for extent, size in zip(shape, blocks, strict=True))
    if scale.shape == expected or (scale.numel == 1 and set(expected) <= {1}):
        return None
    size = " x ".join(map(str, blocks[-2:]))
    return f"{list(scale.shape)}; a weight {list(shape)} in blocks of {size} has scales {list(expected)}"


def as_compared(left: Side, right: Side) -> tuple[Side, Side, list[Finding]]:
    """Both sides as they can be compared: codes and scales as the plain tensors they stand for, where the other side
    holds plain ones; as they are stored where it holds codes too. And what is wrong with the scales of either."""
    here, found = packed_of(left)
    there, more = packed_of(right)
    one = {name: packed for name, packed in here.items() if _plain_there(name, right, there)}
    two = {name: packed for name, packed in there.items() if _plain_there(name, left, here)}
    return decoded(left, one), decoded(right, two), found + more


def decoded(side: Side, chosen: dict[str, Packed]) -> Side:
    """``side`` with the ``chosen`` in place of their codes and scales, decoded as they are read."""
    if not chosen:
        return side
    gone = {name for one in chosen.values() for name in (one.codes, one.scales)}
    inventory = {}
    by_codes = {one.codes: one for one in chosen.values()}
    for name, spec in side.inventory.items():
        if name in by_codes:
            one = by_codes[name]
            inventory[one.name] = TensorSpec(one.name, one.shape, "BF16")
        elif name not in gone:
            inventory[name] = spec
    broken = side.broken - gone | {one.name for one in chosen.values() if {one.codes, one.scales} & side.broken}
    home = {name: file for name, file in side.home.items() if name not in gone}
    home |= {one.name: side.home[one.codes] for one in chosen.values() if one.codes in side.home}
    return replace(side, inventory=inventory, broken=broken, home=home, packed=chosen, stored=side)


def _plain_there(name: str, other: Side, others: dict[str, Packed]) -> bool:
    if not other.is_huggingface:
        return True
    if name in other.inventory:
        return name not in others and other.inventory[name].dtype in _PLAIN
    return not others


def with_scales(names: set[str], side: Side) -> set[str]:
    """Names of a decoded side as they are stored: each packed one with its codes and scales."""
    packed = [side.packed[name] for name in names & side.packed.keys()]
    return names | {name for one in packed for name in (one.codes, one.scales)} if packed else names


def scales_of(side: Side) -> set[str]:
    return {one.scales for one in side.packed.values()}


def _has_fp8(side: Side) -> bool:
    return any(dtype == "F8_E4M3" for dtype, _ in side.names.dtypes)


def without_scale(side: Side) -> set[str]:
    """FP8 weights of a decoded side beside which nothing says a scale."""
    if not _has_fp8(side):
        return set()
    inventory = (side.stored or side).inventory
    return {n for n, spec in side.inventory.items() if spec.dtype == "F8_E4M3" and n + SCALE_INV not in inventory}
