"""Real megatron-core models for the tests of the Megatron half: their arguments, inventories and global tensors.

``python -m tests.support.mcore_roles`` prints, as JSON, what the Transformer Engine spec saves, {model: {key: [shape,
dtype]}}, and what its norms were told, of ``mcore_kinds`` too. It runs apart because the stand-in must be there before
``megatron.core`` is first imported.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mtpconvert.tensors import Inventory, TensorSpec, inventory_of
from tests.support import te_standin
from tests.support.mcore import content_metadata
from tests.support.mcore_cpu import quietly

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}

# No two of these sizes are equal, so that a transposed or misplaced part has another shape or other numbers.
_COMMON = {
    "num_layers": 3, "hidden_size": 24, "num_attention_heads": 6, "ffn_hidden_size": 20, "vocab_size": 29,
    "padded_vocab_size": 32, "normalization": "RMSNorm", "norm_epsilon": 1e-6, "swiglu": True, "add_bias_linear": False,
    "add_qkv_bias": False, "qk_layernorm": True, "max_position_embeddings": 64, "position_embedding_type": "rope",
    "rotary_percent": 1.0, "rotary_base": 10000, "use_rope_scaling": False, "rope_scaling_factor": 8.0,
    "untie_embeddings_and_output_weights": True, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1,
    "rotary_interleaved": False, "apply_layernorm_1p": False, "multi_latent_attention": False,
}  # fmt: skip
_GQA = {"group_query_attention": True, "num_query_groups": 2, "kv_channels": 8}
_MOE = {"num_experts": 4, "moe_ffn_hidden_size": 10, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
_MLA = {
    "multi_latent_attention": True, "q_lora_rank": 18, "kv_lora_rank": 16, "qk_head_dim": 12, "qk_pos_emb_head_dim": 4,
    "v_head_dim": 14, "rope_type": "rope", "group_query_attention": False, "num_query_groups": 1, "kv_channels": 16,
}  # fmt: skip
_SIGMOID = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5, "moe_router_pre_softmax": True, "moe_shared_expert_intermediate_size": 22,
}  # fmt: skip

ARGUMENTS: dict[str, dict[str, Any]] = {
    "gqa-dense": _COMMON | _GQA,
    "mha-biased-tied": _COMMON | {
        "group_query_attention": False, "num_query_groups": 1, "kv_channels": 8, "add_bias_linear": True,
        "qk_layernorm": False, "untie_embeddings_and_output_weights": False, "mtp_num_layers": None,
    },
    "gqa-qkv-bias": _COMMON | _GQA | {"add_qkv_bias": True, "qk_layernorm": False, "mtp_num_layers": 2},
    "gqa-moe": _COMMON | _GQA | _MOE | {"moe_layer_freq": 1, "moe_shared_expert_intermediate_size": 22},
    "mla-moe": _COMMON | _MLA | _MOE | _SIGMOID | {"moe_layer_freq": [0, 1, 1], "mtp_num_layers": 2},
    # qk_layernorm off: 0.19.2 refuses it without a query latent (transformer/mla_qk_norm_config.py)
    "mla-no-q-latent": _COMMON | _MLA | {"q_lora_rank": None, "qk_layernorm": False},
}  # fmt: skip


@torch.no_grad()
def randomise(model: Any, seed: int) -> Any:
    """Every parameter and persistent buffer drawn anew: vectors near one, matrices of gain about one."""
    generator = torch.Generator().manual_seed(seed)
    for value in model.state_dict(keep_vars=True).values():
        if isinstance(value, torch.Tensor):
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.3 * noise if value.dim() == 1 else noise / value.shape[-1] ** 0.5)
    return model


def _shards(state: Any) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    apply_factories(state)

    def walk(node: Any) -> Iterator[Any]:
        if isinstance(node, ShardedTensor):
            yield node
        elif isinstance(node, dict | list):
            for child in node.values() if isinstance(node, dict) else node:
                yield from walk(child)

    return walk(state)


@quietly
@torch.no_grad()
def saved_tensors(model: Any, *, singleton: bool = False) -> dict[str, torch.Tensor]:
    """What this one rank would save, key -> the global tensor, assembled from the shards' own offsets."""
    whole: dict[str, torch.Tensor] = {}
    state = model.sharded_state_dict(metadata=content_metadata({"singleton_local_shards": singleton}))
    for shard in _shards(state):
        target = whole.setdefault(shard.key, torch.full(shard.global_shape, float("nan"), dtype=shard.dtype))
        at = tuple(
            slice(o, o + n) for o, n in zip(shard.global_offset[-shard.data.dim() :], shard.data.shape, strict=True)
        )
        target[(*shard.global_offset[: shard.prepend_axis_num], *at)] = shard.data
    assert not any(bool(tensor.isnan().any()) for tensor in whole.values())
    return whole


def inventory(tensors: dict[str, torch.Tensor]) -> Inventory:
    return {key: TensorSpec(key, tuple(t.shape), DTYPES[t.dtype]) for key, t in tensors.items()}


@functools.cache
def _te_models() -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.mcore_roles"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@functools.cache
def te_inventories() -> dict[str, Inventory]:
    """What the Transformer Engine spec saves, of every model here and in ``mcore_kinds``, from a process of its own."""
    return {
        name: inventory_of(TensorSpec(key, tuple(shape), dtype) for key, (shape, dtype) in tensors.items())
        for name, tensors in _te_models()["saved"].items()
    }


def te_norms(name: str) -> dict[str, bool]:
    """The keys of a per-layer model's norm weights, and whether Transformer Engine was told zero-centred gamma."""
    return _te_models()["norms"][name]


def _gamma(norm: Any) -> str:
    return "layer_norm_weight" if hasattr(norm, "layer_norm_weight") else "weight"


def main() -> None:
    te_standin.install()
    from tests.support.mcore_kinds import all_te_models

    out: dict[str, Any] = {"saved": {}, "norms": {}}
    for name, model in all_te_models().items():
        saved = inventory(saved_tensors(randomise(model, seed=1)))  # memory as it was found may be NaN
        out["saved"][name] = {key: [list(spec.shape), spec.dtype] for key, spec in saved.items()}
        out["norms"][name] = {
            f"{path.replace('.mtp_model_layer.', '.transformer_layer.')}.{_gamma(module)}": module.zero_centered_gamma
            for path, module in model.named_modules()
            if hasattr(module, "zero_centered_gamma")
        }
    json.dump(out, sys.stdout)


if __name__ == "__main__":
    main()
