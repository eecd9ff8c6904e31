"""A Megatron checkpoint changed and saved anew by torch's own distributed checkpoint, as training would save it."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.support.dcp import dcp_save

Tensors = dict[str, torch.Tensor]


def resaved(source: Path, target: Path, change: Callable[[Tensors], None], *, args: bool = True) -> Path:
    """Write the tensors of the iteration folder ``source``, after ``change``, to the new folder ``target``.

    ``args``: whether ``common.pt`` is taken over.
    """
    state: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _load_state_dict(state, FileSystemReader(source), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    change(tensors)
    target.mkdir(parents=True)
    dcp_save(target, tensors)
    if args:
        shutil.copy(source / "common.pt", target)
    return target


def without(match: Callable[[str], bool]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        gone = [key for key in tensors if match(key)]
        assert gone
        for key in gone:
            del tensors[key]

    return change
