"""Layouts for files that are still to be written: from a list of tensors, or from a reference with changes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtpconvert.errors import CheckpointError, UsageError, some
from mtpconvert.garbage import no_gc
from mtpconvert.stores.safetensors.header import Header, parse_header
from mtpconvert.stores.safetensors.layout import INDEX_NAME, SINGLE_NAME, Index, SafetensorsLayout, Shard
from mtpconvert.tensors import Inventory, TensorSpec

# Decimal: huggingface_hub/serialization/_base.py:parse_size_to_int, SIZE_UNITS.
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# safetensors 0.8.0, tensor.rs: prepare() sorts by descending Dtype, in the order of enum Dtype, then by name.
_DTYPE_ORDER = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
_RANK = {dtype: rank for rank, dtype in enumerate(_DTYPE_ORDER)}


def parse_size(text: str) -> int:
    """Bytes in ``"5GB"``, ``"500 MB"`` or ``"1000"``; units are decimal as huggingface_hub's. UsageError otherwise."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else ""
    if match is None or (unit and unit not in _UNITS) or (not unit and "." in match[1]):
        raise UsageError(f"{text!r} is no size", next_step=f"give a number and one of {', '.join(_UNITS)}, as 5GB")
    size = int(float(match[1]) * _UNITS[unit]) if unit else int(match[1])
    if size < 1:
        raise UsageError(f"{text!r} is a size of no bytes", next_step="give at least 1KB")
    return size


def plan_layout(
    specs: Sequence[TensorSpec], max_shard_size: int, metadata: Mapping[str, str] | None = None
) -> SafetensorsLayout:
    """The files that ``save_pretrained(max_shard_size=...)`` makes of ``specs`` taken in their order.

    A shard is closed when the next tensor would make it longer than ``max_shard_size`` bytes of data; a tensor that is
    longer by itself gets one of its own (huggingface_hub/serialization/_base.py:split_state_dict_into_shards_factory).
    ``metadata`` defaults to ``{"format": "pt"}``. Raises CheckpointError for no or repeated tensors.
    """
    groups: list[list[TensorSpec]] = []
    current: list[TensorSpec] = []
    filled = 0
    for spec in specs:
        if spec.nbytes > max_shard_size:
            groups.append([spec])
            continue
        if filled + spec.nbytes > max_shard_size:
            groups.append(current)
            current, filled = [], 0
        current.append(spec)
        filled += spec.nbytes
    if current:
        groups.append(current)
    count = len(groups)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    metadata = {"format": "pt"} if metadata is None else metadata
    with no_gc():
        shards = tuple(
            Shard(name, build_header(save_order(group), metadata))
            for name, group in zip([SINGLE_NAME] if count == 1 else names, groups, strict=True)
        )
        return SafetensorsLayout(shards, build_index(shards) if count > 1 else None)


def subset_layout(layout: SafetensorsLayout, keep: set[str]) -> SafetensorsLayout:
    """``layout`` with the tensors named in ``keep`` and no others; see ``adapt_layout``."""
    inventory = layout.inventory()
    _check_homes(layout, keep, inventory)
    return adapt_layout(layout, {name: spec for name, spec in inventory.items() if name in keep})


def adapt_layout(
    layout: SafetensorsLayout, wanted: Inventory, renamed: Mapping[str, str] | None = None
) -> SafetensorsLayout:
    """``layout`` with exactly the tensors of ``wanted``, which may be fewer and may have other shapes or dtypes.

    ``renamed``: name in ``layout`` -> name in ``wanted``, of those that take another's place.

    A file all of whose tensors stay as they are keeps its header byte for byte. The others get a new one: same key
    order, same ``__metadata__``, data closed up. Files left without a tensor go; no file is renamed. The index is
    kept byte for byte if nothing changed, else rewritten with its other entries as they were.
    Raises CheckpointError for a tensor that has no place in ``layout``.
    """
    new = renamed or {}
    _check_homes(layout, wanted, {new.get(name, name): spec for name, spec in layout.inventory().items()})
    shards = []
    for shard in layout.shards:
        kept = [spec for spec in shard.header.specs if new.get(spec.name, spec.name) in wanted]
        if kept == list(shard.header.specs) == [wanted.get(spec.name) for spec in kept]:
            shards.append(shard)
        elif kept:
            shards.append(Shard(shard.name, _rewritten(shard.header, kept, wanted, new)))
    if tuple(shards) == layout.shards:
        return layout
    index = None if layout.index is None else build_index(shards, layout.index, new)
    return SafetensorsLayout(tuple(shards), index, layout.where)


def save_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """The order of the bytes that safetensors writes, which keeps every tensor aligned to its element."""
    return sorted(specs, key=lambda spec: (-_RANK[spec.dtype], spec.name))


def build_header(
    specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None, key_order: Iterable[str] | None = None
) -> Header:
    """The header of a file whose data is ``specs`` one after another, padded with spaces to 8 bytes.

    ``key_order``: the names (``__metadata__`` among them) in the order of the JSON keys; by default metadata, then
    ``specs``. The JSON is compact and not ASCII-escaped, as serde_json writes it.
    """
    table: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for spec in specs:
        if spec.name in table:
            raise CheckpointError(f"tensor {spec.name} would be written twice, or is no name for a tensor")
        end = at + spec.nbytes
        table[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, end]}
        at = end
    if key_order is not None:
        table = {name: table[name] for name in key_order}
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return parse_header(len(raw).to_bytes(8, "little") + raw, "a header to be written")


def build_index(
    shards: Iterable[Shard], template: Index | None = None, renamed: Mapping[str, str] | None = None
) -> Index:
    """The index of ``shards`` as transformers 5.24 writes it (modeling_utils.py:save_pretrained), or, with another
    index as ``template``, that one with the totals it has corrected, ``renamed`` tensors under their new names and
    those it lost left out."""
    held = {spec.name: (shard.name, spec) for shard in shards for spec in shard.header.specs}
    totals = {
        "total_parameters": sum(spec.numel for _, spec in held.values()),
        "total_size": sum(spec.nbytes for _, spec in held.values()),
    }
    files = {name: file for name, (file, _) in held.items()}
    if template is None:
        index = {"metadata": totals, "weight_map": files}
        return Index((json.dumps(index, indent=2, sort_keys=True) + "\n").encode(), INDEX_NAME, files, totals)
    index = json.loads(template.raw)
    if isinstance(index.get("metadata"), dict):
        index["metadata"] |= {key: total for key, total in totals.items() if index["metadata"].get(key) is not None}
    names = [(renamed or {}).get(name, name) for name in index["weight_map"]]
    index["weight_map"] = {name: files[name] for name in names if name in files}
    text = json.dumps(index, indent=2, ensure_ascii=template.raw.isascii())
    raw = (text + "\n" * template.raw.endswith(b"\n")).encode()
    return Index(raw, template.name, index["weight_map"], index.get("metadata"))


def _rewritten(header: Header, kept: Sequence[TensorSpec], wanted: Inventory, new: Mapping[str, str]) -> Header:
    specs = [wanted[new.get(spec.name, spec.name)] for spec in kept]
    if [spec.dtype for spec in specs] != [spec.dtype for spec in kept]:
        specs = save_order(specs)  # another element size could leave what follows it unaligned
    names = {spec.name for spec in specs} | {"__metadata__"}
    order = [name for key in json.loads(header.raw[8:]) if (name := new.get(key, key)) in names]
    if header.metadata is None:
        order = [name for name in order if name != "__metadata__"]
    return build_header(specs, header.metadata, order)


def _check_homes(layout: SafetensorsLayout, names: Iterable[str], inventory: Inventory) -> None:
    homeless = [name for name in names if name not in inventory]
    if homeless:
        raise CheckpointError(
            f"{len(homeless)} tensors have no place in the reference: {some(sorted(homeless))}",
            where=layout.where,
            next_step="take the reference that belongs to this checkpoint, or none",
        )
