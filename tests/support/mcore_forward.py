"""Logits of the real megatron-core GPTModel (local spec, one rank), from ``mtpconvert.evidence.megatron_forward``.

All take ``tokens`` [b, s] and return float32 logits [b, s, vocab rows].
"""

from typing import Any

import torch

from mtpconvert.evidence.megatron_forward import outputs, trace


def hidden_states(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """[s, b, h] each: the trunk's final, normed hidden state, then that of every MTP layer."""
    return [value for name, value in outputs(model, tokens).items() if name.endswith("final norm")]


def trunk_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[b, s, vocab rows]: the ordinary next-token logits."""
    return trace(model, tokens)["trunk logits"]


def mtp_logits(model: Any, tokens: torch.Tensor, depth: int = 1) -> torch.Tensor:
    """[b, s - depth, vocab rows] of the ``depth``-th MTP layer (1 is the first)."""
    return trace(model, tokens)[f"MTP {depth}: logits"]


def greedy(model: Any, tokens: torch.Tensor, n: int, *, vocab_size: int | None = None) -> list[int]:
    """``n`` tokens after ``tokens`` [1, s], each the argmax of a full forward; rows past ``vocab_size`` are padding."""
    out: list[int] = []
    for _ in range(n):
        chosen = int(trunk_logits(model, tokens)[0, -1, :vocab_size].argmax())
        out.append(chosen)
        tokens = torch.cat([tokens, torch.tensor([[chosen]])], dim=1)
    return out
