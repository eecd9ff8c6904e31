"""What the real transformers model computes on the way: layer by layer, trunk, MTP depths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtpconvert.evidence.trace import TRUNK_LOGITS, Trace, depth_point, layer_point
from mtpconvert.evidence.transformers_model import TransformersModel, quiet_transformers


@quiet_transformers()
def trace(model: TransformersModel, tokens: Any) -> Trace:
    """Every point of ``evidence.trace`` for ``tokens`` [b, s], on the CPU, in float32.

    MTP layer k gets the hidden state of the layer before (k = 1: of the trunk, final and normed) at positions
    0 .. s-k-1 and the embeddings of the tokens k later, as ``MtpModel.forward`` rolls them.
    """
    import torch

    main, mtp, length = model.main, model.mtp, tokens.shape[1]
    decoder, taken = main.get_decoder(), dict[str, Any]()
    points = {"embedding": main.get_input_embeddings()}
    points |= {layer_point(number): layer for number, layer in enumerate(decoder.layers)}
    points["final norm"] = decoder.norm
    for depth, layer in enumerate([] if mtp is None else mtp.layers, start=1):
        points[depth_point(depth, "eh_proj")] = layer.eh_proj
        points[depth_point(depth, "layer")] = layer.mtp_block
    handles = [module.register_forward_hook(_take(taken, name)) for name, module in points.items()]
    try:
        with torch.no_grad():
            taken[TRUNK_LOGITS] = main(tokens, use_cache=False).logits
            hidden = taken["final norm"]
            for depth in range(1, model.layers + 1):
                hidden = hidden[:, : length - depth]
                positions = torch.arange(depth, length, device=tokens.device).expand(tokens.shape[0], -1)
                hidden = mtp.forward_layer(depth - 1, hidden, positions, None, input_ids=tokens[:, depth:])
                taken[depth_point(depth, "final norm")] = hidden
                taken[depth_point(depth, "logits")] = mtp._project_to_logits(hidden)
    finally:
        for handle in handles:
            handle.remove()
    return {name: value.detach().float().cpu() for name, value in taken.items()}


def _take(taken: dict[str, Any], name: str) -> Callable[[Any, Any, Any], None]:
    """A hook that keeps the first output only: MTP calls the embedding again."""

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        taken.setdefault(name, output[0] if isinstance(output, tuple) else output)

    return hook
