"""Logits of the real megatron-core GPTModel (local spec, one rank): trunk, MTP depths, greedy continuation.

All take ``tokens`` [b, s] and return float32 logits [b, s, vocab rows]. Megatron's own ``forward`` runs; what it hands
to its output layer is taken with a hook, since with MTP it returns a loss and 0.16.1 wants labels for it.
"""

from typing import Any

import torch

from tests.support.mcore_cpu import quietly


@quietly
@torch.no_grad()
def hidden_states(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """[s, b, h] each: the trunk's final, normed hidden state, then that of every MTP layer."""
    depths = model.config.mtp_num_layers or 0
    taken: list[torch.Tensor] = []
    block = model.mtp if depths else model.decoder
    handle = block.register_forward_hook(lambda _module, _inputs, output: taken.append(output))
    try:
        batch, length = tokens.shape
        positions = torch.arange(length).expand(batch, length).contiguous()
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]  # True: not attended
        model(tokens, positions, mask, **({"labels": tokens} if depths else {}))
    finally:
        handle.remove()
    (output,) = taken
    return list(output.chunk(1 + depths, dim=0))


@torch.no_grad()
def _logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else None
    return model.output_layer(hidden, weight=weight)[0].transpose(0, 1).float()


def trunk_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[b, s, vocab rows]: the ordinary next-token logits."""
    return _logits(model, hidden_states(model, tokens)[0])


def mtp_logits(model: Any, tokens: torch.Tensor, depth: int = 1) -> torch.Tensor:
    """[b, s - depth, vocab rows] of the ``depth``-th MTP layer (1 is the first), at positions that have an input.

    At position t it has seen the tokens up to t + depth, so it predicts token t + depth + 1
    (``multi_token_prediction.py:_get_embeddings`` rolls the tokens by one per layer and pads with zeros).
    """
    return _logits(model, hidden_states(model, tokens)[depth])[:, : tokens.shape[1] - depth]


def greedy(model: Any, tokens: torch.Tensor, n: int, *, vocab_size: int | None = None) -> list[int]:
    """``n`` tokens after ``tokens`` [1, s], each the argmax of a full forward; rows past ``vocab_size`` are padding."""
    out: list[int] = []
    for _ in range(n):
        chosen = int(trunk_logits(model, tokens)[0, -1, :vocab_size].argmax())
        out.append(chosen)
        tokens = torch.cat([tokens, torch.tensor([[chosen]])], dim=1)
    return out
