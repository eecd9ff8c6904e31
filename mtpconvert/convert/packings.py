"""How a Hugging Face checkpoint packs its weights: which tensors are decoded, from what, or why they cannot be.

Decided from names, dtypes and config.json alone; no weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mtpconvert.codecs import fp8_block, mxfp4
from mtpconvert.codecs.fp8_block import Blocks
from mtpconvert.errors import CheckpointError, ConfigError, MtpConvertError, NotRepresentableError, some
from mtpconvert.mapping.model import Mapping as MappingFile
from mtpconvert.tensors import Inventory, TensorSpec, inventory_of

CONFIG_KEYS = ("quantization_config", "compression_config")
_FP8 = "F8_E4M3"
_OTHER_SUFFIXES = (
    ".weight_packed", ".qweight", ".qzeros", ".g_idx", ".weight_scale", ".weight_scale_2", ".weight_zero_point",
    ".input_scale", ".input_scale_inv", ".activation_scale", ".weight_shape", ".absmax", ".quant_map", ".SCB",
)  # fmt: skip
_OTHER_DTYPES = {"F4", "F6_E2M3", "F6_E3M2", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "I8"}
_PLAIN = {"BF16", "F16", "F32"}
_EXCLUDES = ("modules_to_not_convert", "ignored_layers", "ignore")


@dataclass(frozen=True, slots=True)
class Packed:
    """One tensor as the mapping sees it (``spec``, BF16) and what it is stored as: codes, and scales for them."""

    spec: TensorSpec
    codes: TensorSpec
    scales: TensorSpec


@dataclass(frozen=True)
class Packing:
    """``kind``: "fp8_block", "mxfp4", or None for a checkpoint of plain tensors."""

    kind: str | None = None
    tensors: Mapping[str, Packed] = field(default_factory=dict)
    blocks: Blocks | None = None
    notes: list[str] = field(default_factory=list)

    def decoded(self, stored: Inventory) -> Inventory:
        """``stored`` as the mapping sees it, in its order: a packed tensor where its codes are, no scales."""
        by_codes = {packed.codes.name: packed.spec for packed in self.tensors.values()}
        scales = {packed.scales.name for packed in self.tensors.values()}
        return inventory_of(by_codes.get(name, spec) for name, spec in stored.items() if name not in scales)

    def only(self, names: Iterable[str]) -> Packing:
        """The packing of some of the tensors."""
        return replace(self, tensors={name: self.tensors[name] for name in names if name in self.tensors})

    def of_language_model(self, mapping: MappingFile) -> Packing:
        """Without the tensors of another part of the model: they are set aside as they are stored."""
        return self.only(name for name in self.tensors if not mapping.passes_through(name))

    def stored(self, names: Iterable[str]) -> Inventory:
        """What packed tensors among ``names`` are stored as."""
        parts = (self.tensors[name] for name in names if name in self.tensors)
        return inventory_of(spec for packed in parts for spec in (packed.codes, packed.scales))


def packing_of(config: Mapping[str, Any], stored: Inventory, where: str) -> Packing:
    """The packing of a checkpoint.

    Raises CheckpointError for a weight without its scales or scales without their weight, ConfigError for a missing
    block size, NotRepresentableError for a packing that cannot be decoded exactly, or not yet.
    """
    _refuse_others(config, stored, where)
    scaled = [name for name in stored if name.endswith(fp8_block.SCALE_SUFFIX)]
    weights = [name for name, spec in stored.items() if spec.dtype == _FP8]
    if scaled or weights:
        return _fp8(config, stored, weights, scaled, where)
    blocks = [name for name, spec in stored.items() if name.endswith(mxfp4.BLOCKS_SUFFIX) and spec.dtype == "U8"]
    return _mxfp4(stored, blocks, where) if blocks else Packing()


def packing_in_words(config: Mapping[str, Any], stored: Inventory, where: str) -> str | None:
    """What ``inspect`` says of the packing, and whether it is decoded; None for plain tensors."""
    try:
        packing = packing_of(config, stored, where)
    except MtpConvertError as error:
        return f"hf2mcore refuses it: {error.what}"
    if packing.kind is None:
        return None
    size = "" if packing.blocks is None else f" in blocks of {packing.blocks.rows} x {packing.blocks.columns}"
    return f"{len(packing.tensors):,} tensors as {packing.kind}{size}; hf2mcore decodes them to bf16"


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table of the config that describes the packing, at the top or in a nested config; empty without one."""
    return next((table for _, table in _tables(config)), {})


def quantisation_paths(config: Mapping[str, Any]) -> list[str]:
    """The dotted keys of all such tables."""
    return [path for path, _ in _tables(config)]


def _tables(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key, value in config.items():
        if isinstance(value, dict):
            if key in CONFIG_KEYS:
                yield path + key, value
            else:
                yield from _tables(value, f"{path}{key}.")


def _fp8(config: Mapping[str, Any], stored: Inventory, weights: list[str], scaled: list[str], where: str) -> Packing:
    if lost := [name for name in weights if name + fp8_block.SCALE_SUFFIX not in stored]:
        raise CheckpointError(
            f"{len(lost)} FP8 weights have no {fp8_block.SCALE_SUFFIX} beside them: {some(lost)}",
            where=where,
            next_step="without its scales a weight is lost: take both from the checkpoint that this one was made from",
        )
    if surplus := [name for name in scaled if _weight_of(name, stored) is None]:
        raise CheckpointError(
            f"{len(surplus)} scales have no FP8 weight beside them: {some(surplus)}",
            where=where,
            next_step="a weight was cast or lost and its scales were left; restore it, or remove them",
        )
    if single := [name for name in scaled if stored[name].numel == 1 and stored[name].shape in ((), (1,))]:
        raise NotRepresentableError(
            f"{len(single)} FP8 weights have one scale each, not one for each block: {some(single, 3)}",
            where=where,
            next_step="decode the checkpoint to bf16 with the tool that packed it, MTP included, and convert that",
        )
    blocks = block_size(config)
    tensors: dict[str, Packed] = {}
    for name in weights:
        codes, scales = stored[name], stored[name + fp8_block.SCALE_SUFFIX]
        _check_scale_spec(codes, scales, blocks, where)
        tensors[name] = Packed(TensorSpec(name, codes.shape, "BF16"), codes, scales)
    return Packing("fp8_block", tensors, blocks, _excluded_notes(config, weights))


def _weight_of(scale: str, stored: Inventory) -> TensorSpec | None:
    spec = stored.get(scale.removesuffix(fp8_block.SCALE_SUFFIX))
    return spec if _is_fp8(spec) else None


def _is_fp8(spec: TensorSpec | None) -> bool:
    return spec is not None and spec.dtype == _FP8


def block_size(config: Mapping[str, Any]) -> Blocks:
    """The block that a config declares; it is never guessed from shapes. Raises ConfigError, NotRepresentableError."""
    table = quantisation(config)
    size, scale_format = table.get("weight_block_size"), table.get("scale_fmt")
    if not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise ConfigError(
            f"there are FP8 weights with scales, and quantization_config.weight_block_size is {size!r}",
            where="config.json: quantization_config.weight_block_size",
            next_step="give the rows and columns of a block there, [128, 128] for DeepSeek-V3",
        )
    if scale_format not in (None, "float", "float32", "ue8m0"):
        raise NotRepresentableError(
            f"quantization_config.scale_fmt is {scale_format!r}, and no codec here knows it",
            where="config.json: quantization_config.scale_fmt",
            next_step="float32, bfloat16 and ue8m0 scales are known",
        )
    return Blocks(size[0], size[1], powers_of_two=scale_format == "ue8m0")


def _check_scale_spec(codes: TensorSpec, scales: TensorSpec, blocks: Blocks, where: str) -> None:
    if len(codes.shape) < 2:
        raise CheckpointError(f"{codes.name} is {list(codes.shape)}: FP8 blocks need rows and columns", where=where)
    wanted = blocks.scale_shape(codes.shape)
    if scales.shape != wanted:
        raise CheckpointError(
            f"{scales.name} is {list(scales.shape)}; blocks of {blocks.rows} x {blocks.columns} of {list(codes.shape)}"
            f" need {list(wanted)}",
            where=where,
            next_step="weight_block_size in config.json, weights and scales must belong to the same model",
        )
    if scales.dtype not in fp8_block.SCALE_DTYPES:
        raise NotRepresentableError(
            f"{scales.name} is {scales.dtype}; scales are known in {', '.join(fp8_block.SCALE_DTYPES)}",
            where=where,
            next_step="write them as F32",
        )


def _excluded_notes(config: Mapping[str, Any], weights: list[str]) -> list[str]:
    """The files decide what is FP8; a config that says otherwise is a word, and a finding of the auditor."""
    table = quantisation(config)
    lists = [value for key in _EXCLUDES if isinstance(value := table.get(key), list)]
    entries = [entry for one in lists for entry in one if isinstance(entry, str)]
    modules = [name.removesuffix(".weight") for name in weights]
    named = [module for module in modules if any(module == e or module.startswith(e + ".") for e in entries)]
    if not named:
        return []
    return [
        f"{len(named)} modules are FP8 in the files and excluded by quantization_config: {some(named)}; the files count"
    ]


def _mxfp4(stored: Inventory, blocks: list[str], where: str) -> Packing:
    tensors: dict[str, Packed] = {}
    for name in blocks:
        stem = name.removesuffix(mxfp4.BLOCKS_SUFFIX)
        codes, scales = stored[name], stored.get(stem + mxfp4.SCALES_SUFFIX)
        if stem in stored:
            raise CheckpointError(
                f"{stem} is there in plain numbers and as blocks, {name}",
                where=where,
                next_step="loaders differ in which one they take; remove one of the two",
            )
        fits = len(codes.shape) >= 3 and codes.shape[-1] == mxfp4.GROUP // 2
        if scales is None or scales.dtype != "U8" or scales.shape != codes.shape[:-1] or not fits:
            raise CheckpointError(
                f"{name} {list(codes.shape)} has no scales U8 {list(codes.shape[:-1])} beside it",
                where=where,
                next_step="take both from the checkpoint that this one was made from",
            )
        *experts, rows, groups, _ = codes.shape
        shape = (*experts, groups * mxfp4.GROUP, rows)  # transformers multiplies from the left: [.., in, out]
        tensors[stem] = Packed(TensorSpec(stem, shape, "BF16"), codes, scales)
    return Packing("mxfp4", tensors)


def _refuse_others(config: Mapping[str, Any], stored: Inventory, where: str) -> None:
    """Packings that no codec here decodes, by their names and dtypes, MTP's tensors counted with the rest."""
    if {spec.dtype for spec in stored.values()} <= _PLAIN:
        return
    odd = [
        name
        for name, spec in stored.items()
        if name.endswith(_OTHER_SUFFIXES)
        or (name.endswith("_scale") and _is_fp8(stored.get(name.removesuffix("_scale"))))
        or (spec.dtype in _OTHER_DTYPES and not name.endswith(fp8_block.SCALE_SUFFIX))
        or (spec.dtype in ("U8", "I32") and re.search(r"\.(?:weight|qweight)$", name))
    ]
    if odd:
        method = quantisation(config).get("quant_method") or "not named in config.json"
        raise NotRepresentableError(
            f"{len(odd)} tensors are packed in a way that is not converted (quant_method {method}): {some(odd, 3)}",
            where=where,
            next_step="decode the checkpoint to bf16 with the tool that packed it, MTP included, and convert that;"
            " block-scaled FP8 (weight_scale_inv) and MXFP4 are decoded here",
        )
