"""Named functions of ``[arguments]`` tables about attention of other kinds, and which layers have which.

Sources: transformers 5.24 ``configuration_glm_moe_dsa.py`` and ``configuration_qwen3_next.py``, ``__post_init__``;
megatron-core 0.19.2 ``transformer/experimental_attention_variant/dsa.py:is_dsa_skip_topk_layer`` and
``models/gpt/experimental_attention_variant_module_specs.py:get_linear_attention_pattern``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtpconvert.convert.argument_refusal import refuse
from mtpconvert.mapping.dims import Scope
from mtpconvert.mapping.layers import select_layers

# As the mapping files have them in [layers]; a test holds them together.
OWN_INDEXER = (
    'where(indexer_types == "full") else where(index_topk_pattern == "F")'
    " else every_from(index_topk_freq, index_skip_topk_offset)"
)

ATTENDING = 'where(layer_types == "full_attention") else every(full_attention_interval, full_attention_interval-1)'


def delta_nets(scope: Scope) -> dict[str, Any]:
    """``linear_attention_freq`` as a list, 1 for a layer with a delta net.

    An MTP layer is what the last decoder layer is, and published ones attend: refused where that has a delta net.
    """
    layers = scope.integer("num_hidden_layers")
    attending = select_layers({"attending": ATTENDING}, scope)["attending"]
    if scope.symbols.get("mtp_layers") and layers - 1 not in attending:
        raise refuse(
            "layer_types", "linear_attention", "the last layer, which Megatron's MTP layer takes after, does not attend"
        )
    return {"linear_attention_freq": [int(layer not in attending) for layer in range(layers)]}


def shared_indexers(scope: Scope) -> dict[str, Any]:
    """``dsa_indexer_topk_freq`` and ``dsa_indexer_skip_topk_offset``, from which Megatron derives the same layers.

    Raises NotRepresentableError for a pattern that no two such numbers give.
    """
    layers = scope.integer("num_hidden_layers")
    own = {layer for layer in select_layers({"own": OWN_INDEXER}, scope)["own"] if layer < layers}
    if len(own) == layers:
        return {"dsa_indexer_topk_freq": 1, "dsa_indexer_skip_topk_offset": 0}
    for frequency in range(2, layers + 1):
        for offset in range(1, layers + 1):
            if own == {layer for layer in range(layers) if max(layer + 1 - offset, 0) % frequency == 0}:
                return {"dsa_indexer_topk_freq": frequency, "dsa_indexer_skip_topk_offset": offset}
    shown = "".join("F" if layer in own else "S" for layer in range(layers))
    key = "indexer_types" if scope.value("indexer_types") is not None else "index_topk_pattern"
    raise refuse(key, shown, "Megatron gives every N-th layer after the first few an indexer of its own")


def value_heads(scope: Scope) -> dict[str, Any]:
    """``v_head_dim`` where a value head has another size than a query head.

    Sliding layers have keys of their own for the sizes that Megatron-Bridge's MiMoV2FlashSelfAttention takes from one
    place for all layers: refused where these differ. Only the number of query groups may.
    """
    for own, common in (
        ("swa_head_dim", "head_dim"),
        ("swa_v_head_dim", "v_head_dim"),
        ("swa_num_attention_heads", "num_attention_heads"),
    ):
        found = scope.value(own)
        if found is not None and found != scope.integer(common):
            raise refuse(own, found, f"Megatron-Bridge's sliding layers have the {common} of the full ones")
    return {"v_head_dim": scope.integer("v_head_dim")}


FUNCTIONS: tuple[Callable[[Scope], dict[str, Any]], ...] = (delta_nets, shared_indexers, value_heads)
