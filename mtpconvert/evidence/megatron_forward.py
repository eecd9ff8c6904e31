"""What the real megatron-core GPTModel (local spec, one rank) computes on the way: layer by layer, trunk, MTP depths.

Megatron's own ``forward`` runs; everything is taken with hooks, since with MTP it returns a loss and 0.16.1 wants
labels for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtpconvert.evidence.megatron_cpu import quietly
from mtpconvert.evidence.trace import TRUNK_LOGITS, Trace, depth_of, depth_point, layer_point


def trace(model: Any, tokens: Any) -> Trace:
    """Every point of ``evidence.trace`` for ``tokens`` [b, s], on the CPU, in float32.

    The logits have the rows of the padded vocabulary. MTP depth k keeps its first s - k positions, those that have an
    input: at position t it has seen the tokens up to t + k, so it predicts token t + k + 1
    (``multi_token_prediction.py:_get_embeddings`` rolls the tokens by one per layer and pads with zeros).
    """
    out: Trace = {}
    for name, hidden in outputs(model, tokens).items():
        depth = depth_of(name)
        used = hidden[: tokens.shape[1] - depth]
        out[name] = _kept(used)
        if name.endswith("final norm"):
            out[depth_point(depth, "logits") if depth else TRUNK_LOGITS] = _logits(model, used)
    return out


@quietly
def outputs(model: Any, tokens: Any) -> dict[str, Any]:
    """Point -> [s, b, h] as Megatron's modules give it out, every position; no logits."""
    import torch

    depths, length = model.config.mtp_num_layers or 0, tokens.shape[1]
    taken: dict[str, Any] = {}
    handles = [module.register_forward_hook(_take(taken, name)) for name, module in _points(model, depths).items()]
    try:
        positions = torch.arange(length, device=tokens.device).expand(tokens.shape[0], length).contiguous()
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]  # True: unseen
        with torch.no_grad():
            model(tokens, positions, mask, **({"labels": tokens} if depths else {}))
    finally:
        for handle in handles:
            handle.remove()
    return taken


def _points(model: Any, depths: int) -> dict[str, Any]:
    modules = {"embedding": model.embedding}
    modules |= {layer_point(number): layer for number, layer in enumerate(model.decoder.layers)}
    modules["final norm"] = model.decoder.final_layernorm
    for depth in range(1, depths + 1):
        layer = model.mtp.layers[depth - 1]
        block = layer.transformer_layer if hasattr(layer, "transformer_layer") else layer.mtp_model_layer  # 0.16; 0.19
        modules[depth_point(depth, "eh_proj")] = layer.eh_proj
        modules[depth_point(depth, "layer")] = block
        modules[depth_point(depth, "final norm")] = layer.final_layernorm
    return modules


def _take(taken: dict[str, Any], name: str) -> Callable[[Any, Any, Any], None]:
    """A hook that keeps the first output only: MTP calls the embedding again."""

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        taken.setdefault(name, output[0] if isinstance(output, tuple) else output)

    return hook


def _kept(hidden: Any) -> Any:
    return hidden.detach().transpose(0, 1).float().cpu()


def _logits(model: Any, hidden: Any) -> Any:
    """[s, b, h] -> [b, s, rows], by Megatron's own output layer."""
    import torch

    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else None
    with torch.no_grad():
        return _kept(model.output_layer(hidden, weight=weight)[0])
