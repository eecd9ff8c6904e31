"""Real megatron-core models with the kinds of module that only some families have, for the Megatron half's tests.

A delta net and sparse attention exist in the Transformer Engine spec only; DSA and a repeated MTP layer from 0.19.2.
"""

from typing import Any

import torch

from tests.support.mcore import model_from_args
from tests.support.mcore_cpu import quietly, version
from tests.support.mcore_roles import _COMMON, _GQA, _MLA, _MOE, ARGUMENTS

NEXT = not version().startswith("0.16.")

_DELTA = {
    "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 3, "linear_conv_kernel_dim": 3,
    "linear_num_key_heads": 2, "linear_key_head_dim": 7, "linear_num_value_heads": 4, "linear_value_head_dim": 5,
}  # fmt: skip
_SPARSE = {
    "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 3, "dsa_indexer_head_dim": 10,
    "dsa_indexer_topk": 3, "dsa_indexer_rotate_activation": False, "dsa_indexer_rope_interleaved": False,
}  # fmt: skip
_GATES = {"attention_output_gate": True, "moe_shared_expert_intermediate_size": 22, "moe_shared_expert_gate": True}

# Both specs can build these, and they run
LOCAL: dict[str, dict[str, Any]] = {
    "biased-moe-with-sinks": _COMMON | _GQA | _MOE | {
        "add_bias_linear": True, "add_qkv_bias": True, "qk_layernorm": False, "softmax_type": "learnable",
        "moe_layer_freq": 1,
    },
    "gated": _COMMON | _GQA | _MOE | _GATES | {"moe_layer_freq": [1, 0, 1], "add_qkv_bias": True},
    "dense-mtp-on-moe": _COMMON | _GQA | _MOE | {"moe_layer_freq": [0, 1, 1], "mtp_num_layers": 2},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = LOCAL | {
    "delta-net": _COMMON | _GQA | _MOE | _DELTA | _GATES | {"moe_layer_freq": 1, "apply_layernorm_1p": True},
}
# 0.19.2 norms queries' input once more here, which no role means: its spec is not covered, and this one stands apart
NO_QUERY_LATENT = _COMMON | _MLA | {"q_lora_rank": None, "softmax_type": "learnable"}
if NEXT:
    KINDS["repeated-mtp"] = _COMMON | _GQA | {"mtp_num_layers": 3, "mtp_use_repeated_layer": True}
    KINDS["sparse"] = _COMMON | _MLA | _SPARSE | {"dsa_indexer_rope_interleaved": True}
    # a list of MoE layers, as GLM-5 has: without one, 0.19.2 stacks layers, though some have no indexer to stack
    KINDS["sparse-shared-index"] = _COMMON | _MLA | _MOE | _SPARSE | {
        "num_layers": 6, "moe_layer_freq": [0, 0, 0, 1, 1, 1], "dsa_indexer_topk_freq": 2,
        "dsa_indexer_skip_topk_offset": 3, "mtp_num_layers": 4, "apply_layernorm_1p": True,
    }  # fmt: skip


@torch.no_grad()
def l2norm(x: torch.Tensor) -> torch.Tensor:
    """What ``fla.modules.l2norm`` computes."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def torch_delta_rule() -> None:
    """A delta net without flash-linear-attention. It runs with ``deterministic_mode``, on megatron-core's own torch."""
    from megatron.core.ssm import gated_delta_net

    if hasattr(gated_delta_net, "gdn"):  # 0.19
        common, gdn = gated_delta_net.common, gated_delta_net.gdn
        gdn.chunk_gated_delta_rule = gdn.torch_chunk_gated_delta_rule
    else:
        common = gated_delta_net
    common.HAVE_FLA, common.l2norm = True, l2norm


@quietly
def build(name: str, *, spec: str = "local") -> Any:
    """The model of ``KINDS``; of "dense-mtp-on-moe" every MTP layer is as the first decoder layer, a dense one."""
    if KINDS[name].get("experimental_attention_variant") == "gated_delta_net":
        torch_delta_rule()
    more = {"mtp_like": 0} if name == "dense-mtp-on-moe" else {}
    return model_from_args(KINDS[name], spec=spec, **more)


def all_te_models() -> dict[str, Any]:
    """Every model of the Transformer Engine spec that the tests look into."""
    models = {name: model_from_args(arguments, spec="te") for name, arguments in ARGUMENTS.items()}
    models |= {name: build(name, spec="te") for name in KINDS}
    return models | {"no-query-latent": model_from_args(NO_QUERY_LATENT, spec="te")}
