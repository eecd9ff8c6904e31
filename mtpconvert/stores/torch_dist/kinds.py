"""What a folder of torch DCP files is, and which of its entries are model weights."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from mtpconvert.errors import CheckpointError, IncompleteError, NotRepresentableError, some
from mtpconvert.stores.torch_dist.metadata_read import StoredKeys
from mtpconvert.stores.torch_dist.stored import StoredTensor
from mtpconvert.tensors import DTYPE_BITS

# What a save holds beside the model (megatron/core/optimizer, rerun_state_machine.py, training/checkpointing.py)
OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
_OBJECTS = (
    ("optimizer", OPTIMIZER),
    ("extra_state", re.compile(r"(.+\.)?_extra_state(/shard_.+)?$")),
    ("rng_state", re.compile(r"(.+[._])?rng_state/shard_")),
    ("rerun_state_machine_state", re.compile(r"rerun_state_machine_state/shard_")),
    ("common_state", re.compile(r"common_state/shard_")),
)


def classify(keys: StoredKeys) -> tuple[dict[str, int], list[str]]:
    """How many entries are no model weights, by kind, and the byte objects of no known kind."""
    kinds = {key: _kind(key) for key in keys.object_keys}
    counts = Counter(kinds.values())
    counts["optimizer"] += sum(1 for key in keys.tensor_keys if OPTIMIZER.match(key))
    return {k: n for k, n in counts.items() if n}, [key for key, kind in kinds.items() if kind == "unknown"]


def _kind(key: str) -> str:
    return next((kind for kind, pattern in _OBJECTS if pattern.match(key)), "unknown")


def check_format(root: Path, keys: StoredKeys) -> None:
    """Refuse other DCP layouts by name, and a save that did not reach its last file, ``metadata.json``.

    Raises NotRepresentableError, IncompleteError, or CheckpointError when that file is no JSON of megatron-core.
    """
    if any(key.startswith("model.module.") for key in keys.tensor_keys):
        raise NotRepresentableError(
            f"{root} is an fsdp_dtensor checkpoint (its keys begin with model.module.)",
            where=str(root),
            next_step="convert it with megatron-core's own tools to torch_dist, then convert that",
        )
    path = root / "metadata.json"
    try:
        backend = json.loads(path.read_bytes())["sharded_backend"]
    except FileNotFoundError as problem:
        raise IncompleteError(
            f"{path} is missing, which megatron-core writes when everything else is there",
            where=str(root),
            next_step="use a finished save; a plain torch DCP folder needs that file, as megatron-core writes it",
        ) from problem
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise CheckpointError(
            f"{path} names no sharded_backend", where=str(path), next_step="copy the file again"
        ) from problem
    if backend != "torch_dist":
        raise NotRepresentableError(
            f"{root} is a {backend!r} checkpoint, not torch_dist",
            where=str(path),
            next_step="load and save it as torch_dist with the megatron-core that wrote it",
        )


def check_dtypes(tensors: Iterable[StoredTensor]) -> None:
    """Raise NotRepresentableError for a dtype that safetensors has no name for."""
    odd = [tensor for tensor in tensors if tensor.dtype not in DTYPE_BITS]
    if odd:
        raise NotRepresentableError(
            f"{odd[0].key} has dtype {odd[0].dtype}, which safetensors has no name for",
            where=some([tensor.key for tensor in odd]),
            next_step="cast these tensors before saving",
        )
