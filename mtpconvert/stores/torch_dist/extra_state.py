"""The ``_extra_state`` objects without which megatron-core refuses to load.

Transformer Engine modules keep one each, the local spec asks for those of its linear layers, and which modules have
one differs between versions. Written is the union for 0.16.1 and 0.19.2 (a superset is accepted, a missing one is a
CheckpointException): every linear layer and norm, and ``core_attention``, which 0.16.1 wants in MTP layers and older
Transformer Engines everywhere. The payload says "no state": ``torch.save([None])``.
Sources: megatron/core/transformer/utils.py:make_sharded_tensors_for_checkpoint, _get_extra_state_offsets;
extensions/transformer_engine.py; tensor_parallel/layers.py; models/gpt/gpt_model.py:sharded_state_dict.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mtpconvert.tensors import TensorSpec

_PARAMETER = re.compile(r"(.+)\.(?:weight|bias|layer_norm_weight|layer_norm_bias)(?:\.[a-z]+)?")
_STATELESS = re.compile(r"embedding\..*|output_layer|.*\.router|.*\.conv1d")  # plain torch modules and parameters
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_ATTENTION = (".self_attention.linear_qkv", ".self_attention.linear_kv_up_proj")


def extra_state_keys(specs: Iterable[TensorSpec], stacked: frozenset[str], layers: int) -> list[str]:
    """Keys of the placeholder objects for a checkpoint of these canonical tensors, sorted by tensor.

    ``stacked``: names of tensors that are stored under a key of all ``layers`` layers; their modules' states are
    numbered by layer, those of experts by expert as well.
    """
    found: dict[str, None] = {}
    for spec in specs:
        module = _PARAMETER.fullmatch(spec.name)
        if module is None or _STATELESS.fullmatch(module[1]):
            continue
        modules = [module[1]]
        if module[1].endswith(_ATTENTION):
            modules.append(module[1].rsplit(".", 1)[0] + ".core_attention")
        for name in modules:
            key, offsets, sizes = name, [], []
            layer = _LAYER.fullmatch(name) if spec.name in stacked else None
            if layer:
                key, offsets, sizes = f"decoder.layers.{layer[2]}", [int(layer[1])], [layers]
            experts = spec.shape[0] if ".experts.experts." in name else None
            for expert in range(experts or 1):
                at = offsets if experts is None else [*offsets, expert]
                of = sizes if experts is None else [*sizes, experts]
                found[f"{key}._extra_state/shard_{_dotted(at or [0])}_{_dotted(of or [1])}"] = None
    return list(found)


def _dotted(numbers: list[int]) -> str:
    return ".".join(map(str, numbers))
