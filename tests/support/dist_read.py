"""What a torch_dist checkpoint holds, read by torch's own distributed checkpoint, as bit patterns by canonical name."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

_INTEGERS = {2: torch.int16, 4: torch.int32}
_STACKED = re.compile(r"decoder\.layers\.(\D.*)")


def read_torch_dist(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of an iteration's folder as unsigned integers; layers that share a key taken apart."""
    state: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this is one process
        _load_state_dict(state, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    found: dict[str, np.ndarray] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        size = value.element_size()
        bits = value.contiguous().view(_INTEGERS[size]).numpy().view(f"<u{size}")
        if match := _STACKED.fullmatch(key):
            found |= {f"decoder.layers.{layer}.{match[1]}": part for layer, part in enumerate(bits)}
        else:
            found[key] = bits
    return found
