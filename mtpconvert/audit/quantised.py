"""``quantization_config`` against the encodings found: what the scheme covers must be stored so, MTP included."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.mtp import MtpLayers
from mtpconvert.audit.packed import schemes
from mtpconvert.audit.readers.side import Side
from mtpconvert.errors import some

_EXCLUDES = (
    "modules_to_not_convert",
    "ignore",
    "ignored_layers",
    "exclude",
    "exclude_modules",
    "modules_to_not_quantize",
)
_PACKED = (".weight_packed", ".qweight", ".blocks", "_blocks")
_SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".scales", "_scales", ".weight_scale_2", ".input_scale")
# Codes -> the scales that each tensor of them needs (compressed-tensors, GPTQ and AWQ, MXFP4).
_PAIRS = {".weight_packed": ".weight_scale", ".qweight": ".scales", "_blocks": "_scales"}
_WATCHED = (*_PAIRS, *_PAIRS.values(), ".weight_scale_inv")
_PLAIN = {"BF16", "F16", "F32"}
_FP8 = {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
_SMALL = _FP8 | {"F4", "F6_E2M3", "F6_E3M2", "U8", "I8"}
# Modules that every scheme leaves in plain floats unless it says otherwise.
_NEVER = re.compile(
    r"(?:^|\.)(?:lm_head|head|embed_tokens|word_embeddings|shared_head\.(?:head|output)|\w*norm\w*|conv1d|(?:visual|vision\w*)\..*)$",
    re.A,
)
_ROUTER = re.compile(
    r"(?:^|\.)(?:mlp|ffn|block_sparse_moe|moe|feed_forward)\.(?:gate|router)$|\.router(?:\.gate)?$|\.gate\.wg$", re.A
)


# Modules that engines build of plain floats in every scheme (vLLM: eh_proj is an nn.Linear, norms take no scheme).
_UNPACKABLE = re.compile(r"(?:^|\.)(?:eh_proj|\w*norm\w*)$", re.A)
# What published FP8 checkpoints keep plain without saying so (DeepSeek-V3, DeepSeek-V3.2).
_PLAIN_IN_FP8 = ("eh_proj", "indexer.weights_proj")


def check_quantisation(side: Side, mtp: MtpLayers) -> list[Finding]:
    """Findings about one HF side; a Megatron side carries no such config."""
    if not side.is_huggingface:
        return []
    found: list[Finding] = []

    def fault(code: str, message: str, tensor: str | None = None, **detail: Any) -> None:
        found.append(finding(code, message, side=side.label, tensor=tensor, **detail))

    declared = list(schemes(side.config or {}))
    small = not _SMALL.isdisjoint({dtype for dtype, _ in side.names.dtypes})
    ends = "\n".join(side.inventory) + "\n"  # one search of all names for each ending
    if not declared and not small and not any(f"{ending}\n" in ends for ending in (*_PACKED, *_SCALES)):
        return []
    weight_of = {stem: name for name, spec in side.inventory.items() if (stem := _quantised_stem(name, spec.dtype))}
    quantised = set(weight_of)
    _check_scales(side, fault)
    for stem in sorted(quantised):
        if _ROUTER.search(stem):
            fault("router-quantised", f"{stem}: a router in packed form; servers expect plain floats", stem)
        elif _UNPACKABLE.search(stem):
            text = f"{stem}.weight: stored as {side.inventory[weight_of[stem]].dtype}; engines build it of plain floats"
            fault("quant-never-packed", text, weight_of[stem])
    if not declared:
        if quantised:
            modules = sorted(quantised)
            text = f"{len(modules)} modules are quantised and config.json has no quantization_config: {some(modules)}"
            fault("quant-undeclared", text, modules[0], count=len(modules), modules=modules)
        return found
    if not quantised:
        for path, scheme in declared:
            modules = _plain_modules(side, scheme, quantised)
            named = f"; stored plain: {some(modules)}" if modules else ""
            text = f"config.json: {path} is there and not one tensor is quantised{named}; remove {path}"
            fault("quant-stale-config", text, key=path, count=len(modules), modules=modules)
        return found
    _check_modules(side, mtp, declared, quantised, fault)
    return found


def _quantised_stem(name: str, dtype: str) -> str | None:
    """The module's name if this tensor holds quantised weights."""
    for ending in _PACKED:
        if name.endswith(ending):
            return name.removesuffix(ending)
    if name.endswith(".weight"):
        return name.removesuffix(".weight") if dtype in _SMALL else None
    return name if dtype in _FP8 and name.endswith("_proj") else None  # experts stacked


def _check_scales(side: Side, fault: Any) -> None:
    names = side.inventory

    def is_quantised(name: str) -> bool:
        return name in names and names[name].dtype not in _PLAIN

    for name, spec in names.items():
        if spec.dtype in _FP8 and name.endswith((".weight", "_proj")):
            stem = name.removesuffix(".weight")
            if not any(stem + ending in names for ending in (*_SCALES, "_scale_inv")):
                fault("scale-missing", f"{name} is {spec.dtype} and has no scale beside it", name)
        if not name.endswith(_WATCHED):
            continue
        for codes, scales in _PAIRS.items():
            if name.endswith(codes) and name.removesuffix(codes) + scales not in names and spec.dtype not in _PLAIN:
                fault("scale-missing", f"{name} holds packed codes and has no {scales.lstrip('._')} beside it", name)
            if name.endswith(scales) and (spec.dtype == "U8" or scales == ".scales"):
                stem = name.removesuffix(scales)
                if stem + codes not in names and stem + ".weight" not in names:  # MLX: .weight, .scales, .biases
                    fault("scale-orphan", f"{name}: no packed codes beside it", name)
        if name.endswith((".weight_scale_inv", ".weight_scale")):
            stem = name[: name.rfind(".")]
            if not is_quantised(stem + ".weight") and not any(is_quantised(stem + ending) for ending in _PACKED):
                fault("scale-orphan", f"{name}: no quantised weight beside it", name)


def _check_modules(
    side: Side, mtp: MtpLayers, declared: list[tuple[str, dict[str, Any]]], quantised: set[str], fault: Any
) -> None:  # fmt: skip
    path, scheme = declared[0]
    key, excluded = _excluded(scheme)
    mtp_names = mtp.all_names()
    plain_mtp: list[str] = []
    plain: list[str] = []
    for stem in _plain_modules(side, scheme, quantised):
        if stem + ".weight" not in mtp_names:
            plain.append(stem)
        elif not is_excluded(_engine_name(stem, mtp), excluded):
            plain_mtp.append(stem)
    for stem in sorted(quantised):
        if is_excluded(stem, excluded):
            fault("quant-excluded-packed", f"{stem} is stored quantised and {path}.{key} excludes it", stem)
    for code, stems in (("quant-mtp-plain", plain_mtp), ("quant-plain", plain)):
        if stems:
            entry = _suggest(stems, mtp if code == "quant-mtp-plain" else None)
            dtype = side.inventory[stems[0] + ".weight"].dtype
            text = (
                f"{len(stems)} modules are stored as {dtype} and {path} covers them; the first is {stems[0]} "
                f"{list(side.inventory[stems[0] + '.weight'].shape)}; add to {path}.{key}: {entry}"
            )
            mtp_or_none = code == "quant-mtp-plain" or None
            fault(code, text, stems[0] + ".weight", count=len(stems), modules=stems, mtp=mtp_or_none)


def _engine_name(stem: str, mtp: MtpLayers) -> str:
    """What SGLang calls a module of an MTP layer, and MiMo-V2's config after it: ``model.decoder.self_attn.o_proj``."""
    prefix = next((one for one in mtp.prefix.values() if stem.startswith(one)), "")
    return f"model.decoder.{stem.removeprefix(prefix)}"


def _method(scheme: dict[str, Any]) -> str:
    return str(scheme.get("quant_method", "")).lower()


def _excluded(scheme: dict[str, Any]) -> tuple[str, list[Any]]:
    """The key under which the scheme lists what it leaves plain (the usual one where there is none), and the list."""
    usual = "modules_to_not_convert" if _method(scheme) in ("fp8", "mxfp4") else "ignore"
    return next(((key, list(scheme[key])) for key in _EXCLUDES if isinstance(scheme.get(key), list)), (usual, []))


def _plain_modules(side: Side, scheme: dict[str, Any], quantised: set[str]) -> list[str]:
    """Modules that the scheme covers and that are stored as plain floats."""
    excluded, fp8 = _excluded(scheme)[1], _method(scheme) == "fp8"
    found: list[str] = []
    for name, spec in side.inventory.items():
        if not name.endswith(".weight") or len(spec.shape) != 2 or spec.dtype not in _PLAIN:
            continue
        stem = name.removesuffix(".weight")
        if _NEVER.search(stem) or _ROUTER.search(stem) or (fp8 and stem.endswith(_PLAIN_IN_FP8)):
            continue
        if not is_excluded(stem, excluded) and stem not in quantised:
            found.append(stem)
    return found


def _suggest(stems: list[str], mtp: MtpLayers | None) -> str:
    if mtp is not None and len(stems) > 3:
        prefixes = sorted({prefix for prefix in mtp.prefix.values() if any(stem.startswith(prefix) for stem in stems)})
        if prefixes and all(stem.startswith(tuple(prefixes)) for stem in stems):
            return ", ".join(f'"{prefix}*"' for prefix in prefixes)
    return ", ".join(f'"{stem}"' for stem in stems[:5]) + (" ..." if len(stems) > 5 else "")


def is_excluded(module: str, entries: list[Any]) -> bool:
    """Exact name, a parent module, a shell pattern, or "re:" and a regular expression, as quantisers write them."""
    for entry in entries:
        if not isinstance(entry, str):
            continue
        if entry.startswith("re:"):
            try:
                if re.match(entry[3:], module):
                    return True
            except re.error:
                continue
        elif (
            module == entry
            or module.startswith(entry + ".")
            or fnmatchcase(module, entry)
            or ("*" in entry and fnmatchcase(module, entry + ".*"))
        ):
            return True
        if "*" not in entry and f".{entry}." in f".{module}.":
            return True
    return False


def _fits(module: str, pattern: str) -> bool:
    """The pattern names the module, or a parent of it (``model.layers.*.self_attn``, as in gpt-oss)."""
    return fnmatchcase(module, pattern) or ("*" in pattern and fnmatchcase(module, pattern + ".*"))
