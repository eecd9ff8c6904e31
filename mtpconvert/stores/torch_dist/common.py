"""The common state of a checkpoint: everything that is neither a tensor nor a sharded object.

megatron-core 0.16 keeps it in ``common.pt``, 0.19 in the object ``common_state/shard_0_1``; 0.19 still prefers a
``common.pt`` that is there (megatron/core/dist_checkpointing/serialization.py:load_common_state_dict).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mtpconvert.errors import CheckpointError
from mtpconvert.stores.torch_dist import inert
from mtpconvert.stores.torch_dist.record import read_object
from mtpconvert.stores.torch_dist.stored import Place

COMMON_FILE = "common.pt"
COMMON_STATE = "common_state/shard_0_1"
CHECKPOINT_VERSION = 3.0  # megatron/training/checkpointing.py: set_checkpoint_version(3.0)


@dataclass(frozen=True, slots=True)
class Common:
    """``values``: the whole dict, inert. ``source``: where it was; empty when the checkpoint has none."""

    values: dict[str, object] = field(default_factory=dict)
    source: str = ""

    @property
    def args(self) -> dict[str, object] | None:
        """The training arguments; None when there are none, or none that can be read."""
        args = self.values.get("args")
        if isinstance(args, inert.Namespace):
            return args.values
        return args if isinstance(args, dict) else None

    @property
    def iteration(self) -> int | None:
        value = self.values.get("iteration")
        return value if type(value) is int else None


def read_common(folder: Path, common_state: Place | None) -> Common:
    """The common state of an iteration folder; an empty one when there is none.

    Raises CheckpointError when it is there and cannot be read.
    """
    path = folder / COMMON_FILE
    if path.exists():
        return Common(
            _as_dict(_read(path, Place(COMMON_FILE, 0, path.stat().st_size), str(path)), str(path)), str(path)
        )
    if common_state is None:
        return Common()
    where = f"{folder / common_state.file}, {COMMON_STATE}"
    value = _read(folder / common_state.file, common_state, where)
    if not isinstance(value, list) or len(value) != 1:
        raise CheckpointError(f"{where} is not a list of one dict", where=where, next_step="save the checkpoint again")
    return Common(_as_dict(value[0], where), where)


def content_metadata() -> dict[str, object]:
    """What megatron-core passes to ``sharded_state_dict`` when it loads a save without optimizer state.

    megatron/training/checkpointing.py:_build_sharded_state_dict_metadata, without the distributed optimizer's keys.
    """
    return {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def common_dict(common: Mapping[str, object]) -> dict[str, object]:
    """The dict to write: ``common`` (``args`` as a dict, ``iteration``), with what every load needs beside it."""
    args = inert.Namespace()
    given = common.get("args")
    if isinstance(given, Mapping):
        vars(args).update(given)
    base = {"args": args, "checkpoint_version": CHECKPOINT_VERSION, "iteration": 0}
    return {**base, **{k: v for k, v in common.items() if k != "args"}, "content_metadata": content_metadata()}


def _read(path: Path, place: Place, where: str) -> object:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be opened: {problem.strerror}", where=where) from problem
    try:
        return read_object(fd, place.offset, place.length, where)
    finally:
        os.close(fd)


def _as_dict(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"{where} is no dict of named values", where=where, next_step="save the checkpoint again")
    return dict(value)
