"""Named functions of ``[arguments]`` tables about experts: which layers have them, and how the router chooses.

Sources: transformers 5.24 ``modeling_*.py``; megatron-core 0.16.1 and 0.19.2 ``transformer/moe/moe_utils.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtpconvert.convert.argument_refusal import refuse
from mtpconvert.errors import ConfigError
from mtpconvert.mapping.dims import Scope


def router_groups(scope: Scope) -> dict[str, Any]:
    """``moe_router_num_groups`` and ``moe_router_group_topk``; None where every group is chosen anyway.

    transformers ranks groups by their two best experts, Megatron by their ``topk // group_topk`` best
    (``moe_utils.py:group_limited_topk``); they agree where that is two.
    """
    groups, chosen = scope.value("n_group"), scope.value("topk_group")
    topk = scope.integer("num_experts_per_tok")
    if topk < 2:
        raise refuse("num_experts_per_tok", topk, "Megatron does not normalise the weight of a single expert")
    if not groups or groups == chosen:
        return {"moe_router_num_groups": None, "moe_router_group_topk": None}
    if not chosen or topk // chosen != 2:
        why = f"Megatron ranks groups by num_experts_per_tok // topk_group experts, the model by 2 (topk is {topk})"
        raise refuse("topk_group", chosen, why)
    return {"moe_router_num_groups": int(groups), "moe_router_group_topk": int(chosen)}


def moe_layers(scope: Scope) -> dict[str, Any]:
    """``moe_layer_freq`` as a list, 1 for a layer with experts: as ``mlp_layer_types`` says, or, where a config has no
    such list, from ``first_k_dense_replace`` on every N-th.

    deepseek-ai ``modeling_deepseek.py:DeepseekV3DecoderLayer``; transformers has no ``moe_layer_freq`` and takes N = 1.
    An MTP layer is what the last decoder layer is (``gpt_layer_specs.py:get_gpt_mtp_block_spec``), in transformers
    always one with experts (``configuration_utils.py:get_mtp_config``).
    """
    layers, dense = scope.integer("num_hidden_layers"), scope.integer("first_k_dense_replace")
    every = scope.value("moe_layer_freq") or 1
    pattern = [int(layer >= dense and layer % every == 0) for layer in range(layers)]
    kinds = scope.value("mlp_layer_types")
    if kinds is not None:
        pattern = [int(kind == "sparse") for kind in kinds]
        if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
            raise ConfigError(
                f"mlp_layer_types lists {len(kinds)} layers, of kinds {sorted(set(kinds))}, for {layers} layers",
                where="config.json: mlp_layer_types",
                next_step="give each layer as dense or sparse, as the tensors are",
            )
    if scope.symbols.get("mtp_layers") and not pattern[-1]:
        key = "first_k_dense_replace" if kinds is None else "mlp_layer_types"
        raise refuse(key, scope.value(key), "the last layer has no experts, so no MTP layer of Megatron has")
    return {"moe_layer_freq": pattern}


def experts_by_list(scope: Scope) -> dict[str, Any]:
    """``moe_layer_freq`` as a list, where ``mlp_layer_types`` or a list ``moe_layer_freq`` says which layers have
    experts. MTP layers are dense all the same, by a spec of their own.

    vLLM mimo_v2_flash.py:MiMoV2FlashDecoderLayer.is_moe_layer; transformers configuration_mimo_v2_flash.py.
    """
    layers = scope.integer("num_hidden_layers")
    key = "moe_layer_freq" if scope.value("mlp_layer_types") is None else "mlp_layer_types"
    found = scope.value(key)
    if not isinstance(found, list) or len(found) != layers or not set(found) <= {0, 1, "dense", "sparse"}:
        raise ConfigError(
            f"{key} is {found!r}, no list of what each of {layers} layers is",
            where=f"config.json: {key}",
            next_step="give each layer as dense or sparse (0 or 1), as the tensors are",
        )
    return {"moe_layer_freq": [int(kind in (1, "sparse")) for kind in found]}


def sparse_steps(scope: Scope) -> dict[str, Any]:
    """``moe_layer_freq`` as a list: every ``decoder_sparse_step``-th layer has experts, but for ``mlp_only_layers``.

    transformers modeling_qwen2_moe.py:Qwen2MoeDecoderLayer.
    """
    step, dense = scope.integer("decoder_sparse_step"), scope.value("mlp_only_layers") or []
    layers = range(scope.integer("num_hidden_layers"))
    return {"moe_layer_freq": [int((layer + 1) % step == 0 and layer not in dense) for layer in layers]}


def softmax_router(scope: Scope) -> dict[str, Any]:
    """``moe_router_pre_softmax``: softmax over all experts first, unless the weights of the chosen are normalised.

    A softmax over the chosen logits (Megatron's other order) is the softmax over all, normalised over the chosen.
    transformers modeling_qwen3_moe.py:Qwen3MoeTopKRouter; moe_utils.py:topk_routing_with_score_function.
    """
    normalised, topk = bool(scope.value("norm_topk_prob")), scope.integer("num_experts_per_tok")
    if normalised and topk < 2:
        raise refuse("num_experts_per_tok", topk, "Megatron does not normalise the weight of a single expert")
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not normalised}


def greedy_groups(scope: Scope) -> dict[str, Any]:
    """``moe_router_num_groups`` and ``moe_router_group_topk`` of DeepSeek-V2, which ranks groups by their best expert.

    modeling_deepseek_v2.py:DeepseekV2TopkRouter; Megatron ranks them by the sum of their ``topk // group_topk`` best.
    """
    method, groups, chosen = (scope.value(key) for key in ("topk_method", "n_group", "topk_group"))
    if method not in ("greedy", "group_limited_greedy"):
        raise refuse("topk_method", method, "DeepSeek-V2 has greedy and group_limited_greedy")
    if method == "greedy" or groups == chosen:
        return {"moe_router_num_groups": None, "moe_router_group_topk": None}
    topk = scope.integer("num_experts_per_tok")
    if not groups or not chosen or topk // chosen != 1:
        why = f"Megatron ranks groups by num_experts_per_tok // topk_group experts, the model by 1 (topk is {topk})"
        raise refuse("topk_group", chosen, why)
    return {"moe_router_num_groups": int(groups), "moe_router_group_topk": int(chosen)}


FUNCTIONS: tuple[Callable[[Scope], dict[str, Any]], ...] = (
    router_groups,
    moe_layers,
    experts_by_list,
    sparse_steps,
    softmax_router,
    greedy_groups,
)
