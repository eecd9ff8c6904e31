"""Logits of the real transformers (5.24), float32 and eager, from ``mtpconvert.evidence``."""

from pathlib import Path
from typing import Any

import torch

from mtpconvert.evidence.transformers_forward import trace
from mtpconvert.evidence.transformers_model import load, load_mtp, load_trunk
from mtpconvert.stores.safetensors.reader import SafetensorsReader


def hf_model(directory: Path) -> Any:
    """The causal language model of ``directory``; CheckpointError when transformers misses one of its tensors."""
    return load_trunk(directory, list(SafetensorsReader(directory).inventory()), dtype="float32")


def hf_mtp_model(model: Any) -> Any:
    """transformers' ``MtpModel`` of the layers beside ``model`` on disk; MtpLostError when one tensor is missing."""
    return load_mtp(model, list(SafetensorsReader(Path(model.config.name_or_path)).inventory()))


def hf_trunk_logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    """[b, s, vocab]."""
    with torch.no_grad():
        return hf_model(directory)(tokens).logits


def hf_mtp_logits(directory: Path, tokens: torch.Tensor, depth: int = 1) -> torch.Tensor:
    """[b, s - depth, vocab] of the ``depth``-th MTP layer (1 is the first)."""
    return trace(load(directory, dtype="float32"), tokens)[f"MTP {depth}: logits"]


@torch.no_grad()
def hf_greedy(model: Any, tokens: torch.Tensor, n: int) -> list[int]:
    """``n`` tokens after ``tokens`` [1, s], each the argmax of a full forward."""
    out: list[int] = []
    for _ in range(n):
        chosen = int(model(tokens).logits[0, -1].argmax())
        out.append(chosen)
        tokens = torch.cat([tokens, torch.tensor([[chosen]])], dim=1)
    return out
