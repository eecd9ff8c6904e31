"""Trunk and MTP of Qwen3-Next and Qwen3.5 as transformers' classes compute them; it has no MTP for these families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtpconvert.evidence import transformers_forward
from mtpconvert.evidence.trace import Trace, depth_point
from mtpconvert.evidence.transformers_model import TransformersModel, load_trunk, quiet_transformers
from tests.support.tiny import read_safetensors, write_safetensors

ONE_LAYER = {
    "num_hidden_layers": 1, "layer_types": ["full_attention"], "full_attention_interval": 1, "mlp_only_layers": [],
}  # fmt: skip


@torch.no_grad()
def trunk_and_mtp(source: Path, scratch: Path, tokens: torch.Tensor) -> Trace:
    """Every point of trunk and of the one MTP layer of the HF directory ``source``; ``scratch``: a folder to write in.

    The MTP step is that of vLLM's qwen3_next_mtp.py and qwen3_5_mtp.py (``...MultiTokenPredictor.forward``): ``fc`` of
    [normed embedding ; normed hidden state], then a decoder layer that attends, the norm, the trunk's head. That layer
    and all after it are transformers' model with MTP's weights for its only layer.
    """
    config, tensors = json.loads((source / "config.json").read_text()), read_safetensors(source)
    main = load_trunk(source, list(tensors), dtype="float32")
    out = transformers_forward.trace(TransformersModel(main, None, "done below", True, None), tokens)
    renamed = {
        name.replace("mtp.layers.", "model.layers.").replace("mtp.norm.", "model.norm."): tensor
        for name, tensor in tensors.items()
        if not name.startswith("model.") or name.startswith("model.embed_tokens.")
    }
    (scratch / "config.json").write_text(json.dumps(config | ONE_LAYER))
    write_safetensors(scratch / "model.safetensors", renamed)
    body = load_trunk(scratch, list(renamed), dtype="float32")

    def weight(name: str) -> torch.Tensor:
        _, shape, data = tensors[name]
        return torch.tensor(np.frombuffer(data, "<f4")).view(shape)

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        module: Any = type(main.model.norm)(x.shape[-1], main.config.rms_norm_eps)
        module.weight.copy_(weight(name))
        return module(x)

    embedding = norm("mtp.pre_fc_norm_embedding.weight", main.get_input_embeddings()(tokens[:, 1:]))
    before = norm("mtp.pre_fc_norm_hidden.weight", out["final norm"][:, :-1])
    joined = torch.cat([embedding, before], dim=-1) @ weight("mtp.fc.weight").T
    layers: list[torch.Tensor] = []
    handle = body.model.layers[0].register_forward_hook(lambda _module, _inputs, output: layers.append(output))
    with quiet_transformers():
        hidden = body.model(inputs_embeds=joined, use_cache=False).last_hidden_state
    handle.remove()
    points = {"eh_proj": joined, "layer": layers[0], "final norm": hidden, "logits": main.lm_head(hidden)}
    return out | {depth_point(1, part): value for part, value in points.items()}
