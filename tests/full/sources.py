"""What the cells of one family share: its Hugging Face folder, the conversions, what Megatron must hold of it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mtpconvert.convert.stacked import is_stacked
from mtpconvert.convert.to_mcore import ToMcore, open_source
from mtpconvert.mapping.plan import Plan
from mtpconvert.stores.torch_dist.layout import targets
from mtpconvert.tensors import Block
from tests.support.frameworks_convert import to_mcore
from tests.support.stock_families import STOCK, write_stock
from tests.support.tiny import read_safetensors, sha256_tree


class Source:
    def __init__(self, family: str, root: Path) -> None:
        self.family, self.root = family, root
        self.folder = write_stock(family, root / "hf")
        self.hashes = sha256_tree(self.folder)

    def directory(self, version: str, spec: str) -> Path:
        """The iteration directory that ``hf2mcore`` writes for this version and spec, made once."""
        target = self.root / f"{version} {spec}"
        return target / "release" if target.exists() else to_mcore(self.folder, target, **_options(version, spec))

    @cached_property
    def _plan(self) -> Plan:
        version = "0.19" if "0.16" in STOCK[self.family].unsupported else "0.16"
        return open_source(self.folder, ToMcore(**_options(version, "te"))).plan

    @cached_property
    def _tensors(self) -> dict[str, np.ndarray]:
        """Canonical Megatron name -> bit patterns: the plan's tiles cut out of the source's file, one by one.

        No executor, no store, no file of a conversion has a part in it.
        """
        bits = {name: np.frombuffer(raw, "<u4") for name, (_, _, raw) in read_safetensors(self.folder).items()}
        for name in self._plan.codecs:  # minus_one, the only one
            bits[name] = (bits[name].view("<f4") - np.float32(1)).view("<u4")
        found = {name: np.zeros(spec.shape, "<u4") for name, spec in self._plan.mcore.items()}
        for tile in self._plan.tiles:
            values = _cut(bits[tile.hf.tensor], tile.hf).reshape(tile.hf.extents)
            target = _cut(found[tile.mcore.tensor], tile.mcore)
            target[...] = (values if tile.perm is None else values.transpose(tile.perm)).reshape(target.shape)
        return found

    def keys(self, spec: str) -> dict[str, np.ndarray]:
        """The same under the keys of a checkpoint, layers that share one stacked."""
        specs = [replace(spec, dtype="F32") for spec in self._plan.mcore.values()]
        placed, layers = targets(specs, is_stacked(self._plan.mcore), local=spec == "local")
        found: dict[str, np.ndarray] = {}
        for one in placed:
            values = self._tensors[one.spec.name]
            if one.layer is None:
                found[one.key] = values
            else:
                found.setdefault(one.key, np.zeros((layers, *values.shape), "<u4"))[one.layer] = values
        return found


def _options(version: str, spec: str) -> dict[str, Any]:
    return {"spec": spec, "mcore_version": version}


def _cut(tensor: np.ndarray, block: Block) -> np.ndarray:
    """A view of the block's elements, one axis for each of its grid."""
    return tensor.reshape(block.grid)[tuple(slice(*ends) for ends in block.box)]


def wrong_shards(shards: list[list[Any]], wanted: dict[str, np.ndarray]) -> list[str]:
    """Which pieces of the loaded model hold other bits than the tiles of the source, and what no rank holds.

    ``shards``: of all ranks, [key, offset, shape, SHA-256]. A stacked key's leading axis is in the offset alone.
    """
    covered = {key: np.zeros(values.shape, bool) for key, values in wanted.items()}
    wrong = []
    for key, offset, shape, digest in shards:
        lead = [1] * (len(offset) - len(shape))
        at = tuple(slice(o, o + n) for o, n in zip(offset, [*lead, *shape], strict=True))
        covered[key][at] = True
        if hashlib.sha256(np.ascontiguousarray(wanted[key][at]).tobytes()).hexdigest() != digest:
            wrong.append(f"{key} at {offset}")
    return wrong + [f"{key}: not all of it on any rank" for key, seen in covered.items() if not seen.all()]
