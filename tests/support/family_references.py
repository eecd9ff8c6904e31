"""The trunk and MTP layers of a case as transformers' classes compute them, also where transformers itself does not
bring the two together: it has no class with the family's names, or no MTP for its model type.

What is done for that is renaming, written from the publisher's code and not from a mapping.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtpconvert.evidence import transformers_forward
from mtpconvert.evidence.trace import Trace, depth_point
from mtpconvert.evidence.transformers_model import TransformersModel, load_mtp, load_trunk, quiet_transformers
from tests.support.tiny import read_safetensors, write_safetensors

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def trunk_and_mtp(source: Path, scratch: Path, tokens: torch.Tensor) -> Trace:
    """Every point of trunk and MTP of the HF directory ``source``; ``scratch``: a folder for renamed copies."""
    config = json.loads((source / "config.json").read_text())
    rewrite = REWRITTEN.get(config["architectures"][0])
    if rewrite is not None:
        (scratch / "config.json").write_text(json.dumps(config | rewrite[0]))
        write_safetensors(scratch / "model.safetensors", rewrite[1](read_safetensors(source), config))
        source = scratch
    tensors = read_safetensors(source)
    main = load_trunk(source, list(tensors), dtype="float32")
    if config["architectures"] == ["MiMoForCausalLM"]:
        model = TransformersModel(main, None, "done below", False, None)
        trace = transformers_forward.trace(model, tokens)
        return trace | mimo_mtp(main, tensors, trace["final norm"], tokens, config["num_nextn_predict_layers"])
    depths = config["num_nextn_predict_layers"]
    main.config.num_mtp_layers = depths  # transformers has the layers of every family, and looks for this name
    if getattr(main.config, "mlp_layer_types", None) is not None:
        dense = config["architectures"] == ["ExaoneMoeForCausalLM"]
        main.config.mtp_mlp_layer_types = ["dense" if dense else "sparse"] * depths
    if getattr(main.config, "layer_types", None) is not None:
        main.config.mtp_layer_types = ["sliding_attention"] * depths
    return transformers_forward.trace(TransformersModel(main, load_mtp(main, list(tensors)), "", True, depths), tokens)


def as_glm4_moe(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Ling 2.0 computes what GLM-4.5 does: inclusionAI modeling_bailing_moe_v2.py, whose ``query_key_value`` is split
    by heads into all queries, all keys, all values."""
    head, heads, groups = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    names = {
        "model.word_embeddings.": "model.embed_tokens.", "attention.dense.": "self_attn.o_proj.",
        "attention.query_layernorm.": "self_attn.q_norm.", "attention.key_layernorm.": "self_attn.k_norm.",
        "gate.expert_bias": "gate.e_score_correction_bias", ".final_layernorm.": ".shared_head.norm.",
    }  # fmt: skip
    renamed: Tensors = {}
    for name, (dtype, shape, data) in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        if "attention.query_key_value" not in name:
            renamed[name] = (dtype, shape, data)
            continue
        rows = np.frombuffer(data, "<f4").reshape(heads + 2 * groups, head, -1)
        for part, chosen in zip("qkv", np.split(rows, [heads, heads + groups]), strict=True):
            weight = chosen.reshape(-1, shape[1])
            new = name.replace("attention.query_key_value", f"self_attn.{part}_proj")
            renamed[new] = (dtype, weight.shape, weight.tobytes())
    return renamed


def with_shared_head_norm(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """HY-V3's last norm of an MTP layer under the name that transformers' MtpModel looks for."""
    return {name.replace(".final_layernorm.", ".shared_head.norm."): tensor for name, tensor in tensors.items()}


# architecture -> changes of config.json, and how the tensors are renamed
REWRITTEN: dict[str, tuple[dict[str, Any], Callable[[Tensors, dict[str, Any]], Tensors]]] = {
    "BailingMoeV2ForCausalLM": (
        {
            "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": False,
            "n_routed_experts": 4, "n_shared_experts": 1, "use_qk_norm": True,
        },
        as_glm4_moe,
    ),
    "HYV3ForCausalLM": ({}, with_shared_head_norm),
    "MiMoForCausalLM": ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, lambda found, _config: found),
}  # fmt: skip


@torch.no_grad()
def mimo_mtp(main: Any, tensors: Tensors, hidden: torch.Tensor, tokens: torch.Tensor, depths: int) -> Trace:
    """XiaomiMiMo modeling_mimo.py:MiMoMTPLayers.forward, each layer on the hidden state of the one before it."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

    def weights(prefix: str) -> dict[str, torch.Tensor]:
        found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        return {name: torch.tensor(np.frombuffer(data, "<f4")).view(shape) for name, (_, shape, data) in found.items()}

    def norm(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        module = Qwen2RMSNorm(len(weight), main.config.rms_norm_eps)
        module.weight.copy_(weight)
        return module(x)

    out: Trace = {}
    for depth in range(1, depths + 1):
        layer = weights(f"model.mtp_layers.{depth - 1}.")
        embedding = norm(layer["token_layernorm.weight"], main.get_input_embeddings()(tokens[:, depth:]))
        before = norm(layer["hidden_layernorm.weight"], hidden[:, : tokens.shape[1] - depth])
        joined = torch.cat([before, embedding], dim=-1) @ layer["input_proj.weight"].T
        with quiet_transformers():
            block = Qwen2DecoderLayer(main.config, 0).eval()
        block.load_state_dict({name: tensor for name, tensor in layer.items() if name in block.state_dict()})
        length = joined.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        positions = main.model.rotary_emb(joined, torch.arange(length)[None])
        after = block(joined, attention_mask=mask, position_embeddings=positions)
        hidden = norm(layer["final_layernorm.weight"], after)
        points = {"eh_proj": joined, "layer": after, "final norm": hidden, "logits": main.lm_head(hidden)}
        out |= {depth_point(depth, part): value for part, value in points.items()}
    return out
