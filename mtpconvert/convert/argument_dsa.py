"""Named functions of ``[arguments]`` tables about sparse attention (DSA): which layers have an indexer.

Sources: transformers 5.24 ``configuration_glm_moe_dsa.py:GlmMoeDsaConfig.__post_init__``; megatron-core 0.19.2
``transformer/experimental_attention_variant/dsa.py:is_dsa_skip_topk_layer``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtpconvert.convert.argument_refusal import refuse
from mtpconvert.mapping.dims import Scope
from mtpconvert.mapping.layers import select_layers

# As GlmMoeDsaForCausalLM.toml has it in [layers]; a test holds the two together.
OWN_INDEXER = (
    'where(indexer_types == "full") else where(index_topk_pattern == "F")'
    " else every_from(index_topk_freq, index_skip_topk_offset)"
)


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


FUNCTIONS: tuple[Callable[[Scope], dict[str, Any]], ...] = (shared_indexers,)
