"""Ways to harm a Hugging Face directory in place. Each returns nothing; callers assert that something changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny import INDEX, read_safetensors, write_safetensors

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
Harm = Callable[[Path], None]
KINDS = {"BF16": "<u2", "F32": "<u4"}


def shards(root: Path) -> list[Path]:
    return sorted(root.glob("*.safetensors"))


def home_of(root: Path, name: str) -> Path:
    return next(path for path in shards(root) if name in read_safetensors(path))


def edit_shard(path: Path, change: Callable[[Tensors], None]) -> None:
    tensors = read_safetensors(path)
    change(tensors)
    write_safetensors(path, tensors)


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def config(change: Callable[[dict[str, Any]], None]) -> Harm:
    return lambda root: edit_json(root / "config.json", change)


def index(change: Callable[[dict[str, Any]], None]) -> Harm:
    return lambda root: edit_json(root / INDEX, change)


def reindex(root: Path) -> None:
    """The index and total_size that the shards deserve now."""
    weight_map, total = {}, 0
    for path in shards(root):
        for name, (_, _, data) in read_safetensors(path).items():
            weight_map[name] = path.name
            total += len(data)
    (root / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def drop(match: Callable[[str], bool], *, fix_index: bool = True) -> Harm:
    """Tensors gone from their shards, and from the index."""

    def harm(root: Path) -> None:
        for path in shards(root):
            edit_shard(path, lambda tensors: [tensors.pop(name) for name in list(tensors) if match(name)] and None)
            if not read_safetensors(path):
                path.unlink()
        if fix_index:
            reindex(root)

    return harm


def rename(change: Callable[[str], str]) -> Harm:
    def harm(root: Path) -> None:
        for path in shards(root):
            tensors = read_safetensors(path)
            write_safetensors(path, {change(name): value for name, value in tensors.items()})
        reindex(root)

    return harm


def change_tensor(name: str, change: Callable[[np.ndarray], np.ndarray], dtype: str | None = None) -> Harm:
    """Other bits (and another dtype) for one tensor."""

    def harm(root: Path) -> None:
        def edit(tensors: Tensors) -> None:
            old, shape, data = tensors[name]
            value = np.ascontiguousarray(change(np.frombuffer(data, KINDS[old]).reshape(shape).copy()))
            tensors[name] = (dtype or old, value.shape, value.tobytes())

        edit_shard(home_of(root, name), edit)
        reindex(root)

    return harm


def exchange(one: str, two: str) -> Harm:
    """The bytes of two tensors of one shape."""

    def harm(root: Path) -> None:
        tensors = read_safetensors(root)
        for here, there in ((one, two), (two, one)):
            edit_shard(home_of(root, here), lambda t, h=here, v=tensors[there]: t.__setitem__(h, v))

    return harm
