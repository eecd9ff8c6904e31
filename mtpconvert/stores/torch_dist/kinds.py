"""What a folder of torch DCP files is, and which of its entries are model weights."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mtpconvert.errors import CheckpointError, IncompleteError, NotRepresentableError, some
from mtpconvert.stores.torch_dist.metadata_read import StoredKeys
from mtpconvert.stores.torch_dist.stored import StoredTensor
from mtpconvert.tensors import DTYPE_BITS

# What a save holds beside the model (megatron/core/optimizer, rerun_state_machine.py, training/checkpointing.py):
# the optimizer's entries by prefix, objects by the last part of their key. Tensors of these kinds occur too: the
# optimizer's, and what plain torch DCP flattens an object into.
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
_STATES = {
    "_extra_state": "extra_state",
    "rng_state": "rng_state",
    "rerun_state_machine_state": "rerun_state_machine_state",
    "common_state": "common_state",
}


@dataclass(frozen=True, slots=True)
class Kinds:
    """Keys sorted: ``weights`` are the model's tensors, ``unknown`` byte objects of no known kind.

    ``counts``: how many entries are no weights, by kind, "unknown" among them.
    """

    weights: list[str]
    unknown: list[str]
    counts: dict[str, int]


def classify(keys: StoredKeys) -> Kinds:
    """Sort every entry of ``.metadata``; nothing is left out."""
    weights = [key for key in keys.tensor_keys if _kind(key) is None]
    unknown = [key for key in keys.object_keys if _kind(key) is None]
    counts = Counter(kind for key in (*keys.object_keys, *keys.tensor_keys) if (kind := _kind(key)) is not None)
    return Kinds(weights, unknown, dict(counts) | ({"unknown": len(unknown)} if unknown else {}))


def _kind(key: str) -> str | None:
    head, shard, _ = key.partition("/shard_")
    kind = _STATES.get(head.rpartition(".")[2])
    if kind is not None and (shard or kind == "extra_state"):
        return kind
    return "optimizer" if _OPTIMIZER.match(key) else None


def check_format(root: Path, keys: StoredKeys) -> None:
    """Refuse other DCP layouts by name, and a save that did not reach its last file, ``metadata.json``.

    Raises CheckpointError (another layout, no JSON of megatron-core) or IncompleteError (no such file).
    """
    if any(key.startswith("model.module.") for key in keys.tensor_keys):
        raise CheckpointError(
            f"{root} is an fsdp_dtensor checkpoint (its keys begin with model.module.)",
            where=str(root),
            next_step="load it in Megatron-LM and save it with --ckpt-format torch_dist",
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
        raise CheckpointError(
            f"{root} is a {backend!r} checkpoint, not torch_dist",
            where=str(path),
            next_step="load it with the megatron-core that wrote it and save it with --ckpt-format torch_dist",
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
