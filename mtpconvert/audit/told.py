"""Megatron arguments that follow from what a Hugging Face checkpoint's numbers mean: what modules are where, how large.

Every family says these in config keys of its own; its roles say them in one way. Argument names:
megatron/training/arguments.py and core/transformer/transformer_config.py (0.16.1, 0.19.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.audit.roles.vocabulary import is_minus_one, scale_of
from mtpconvert.tensors import Shape

# argument -> role and axis; the first role that the model has, says
_SIZES: dict[str, tuple[tuple[str, int], ...]] = {
    "num_attention_heads": (("attn.q", 0), ("mla.kv_up.v", 0)),
    "num_query_groups": (("attn.k", 0),),
    "kv_channels": (("attn.q", 1),),
    "q_lora_rank": (("mla.q_down", 0),),
    "kv_lora_rank": (("mla.kv_down.latent", 0),),
    "qk_head_dim": (("mla.kv_up.k", 1),),
    "qk_pos_emb_head_dim": (("mla.kv_down.rope", 0),),
    "v_head_dim": (("mla.kv_up.v", 1),),
    "linear_num_key_heads": (("gdn.q", 0),),
    "linear_key_head_dim": (("gdn.q", 1),),
    "linear_num_value_heads": (("gdn.v", 0),),
    "linear_value_head_dim": (("gdn.v", 1),),
    "linear_conv_kernel_dim": (("gdn.conv.q", 2),),
    "dsa_indexer_n_heads": (("dsa.weights", 0),),
    "ffn_hidden_size": (("mlp.gate", 0),),
    "num_experts": (("router", 0),),
    "moe_ffn_hidden_size": (("expert.gate", 1),),
    "moe_shared_expert_intermediate_size": (("shared.gate", 0),),
}
# argument -> its value where the model has one of these roles
_THERE: dict[str, tuple[Any, tuple[str, ...]]] = {
    "group_query_attention": (True, ("attn.k",)),
    "multi_latent_attention": (True, ("mla.kv_down.latent",)),
    "add_qkv_bias": (True, ("attn.q.bias", "attn.k.bias", "attn.v.bias")),
    "add_bias_linear": (True, ("attn.out.bias", "mlp.down.bias", "expert.down.bias")),
    "qk_layernorm": (True, ("attn.q_norm", "attn.q_norm.joint", "mla.q_down_norm", "mla.kv_norm")),
    "attention_output_gate": (True, ("attn.gate",)),
    "softmax_type": ("learnable", ("attn.sink",)),
    "moe_router_enable_expert_bias": (True, ("router.correction",)),
    "moe_shared_expert_gate": (True, ("shared.mix",)),
    "untie_embeddings_and_output_weights": (True, ("head",)),
    "experimental_attention_variant": ("gated_delta_net", ("gdn.q",)),
}


class _Model:
    """Shapes of roles by name and place."""

    def __init__(self, placements: Iterable[Placement]) -> None:
        self.roles: dict[str, dict[str, Shape]] = {}
        self.less_one = False
        self.turned_apart = False
        last: tuple[str, str] = ("", "")
        for placement in placements:
            role = placement.role
            if (role.place, role.name) == last:  # experts, and the pieces of a split tensor
                continue
            last = role.place, role.name
            self.less_one = self.less_one or is_minus_one(role.name)
            self.turned_apart = self.turned_apart or (role.name == "dsa.k.rope" and placement.part != _full(role.shape))
            self.roles.setdefault(scale_of(role.name), {}).setdefault(role.place, role.shape)

    def trunk(self) -> list[str]:
        """Places of the trunk's layers, without a hole."""
        found = {place for shapes in self.roles.values() for place in shapes if place.startswith("trunk.")}
        return [f"trunk.{layer}" for layer in range(1 + max((int(place[6:]) for place in found), default=-1))]

    def mtp(self) -> list[str]:
        found = {place for shapes in self.roles.values() for place in shapes if place.startswith("mtp.")}
        return sorted(found, key=lambda place: int(place[4:]))

    def extent(self, name: str, axis: int) -> int | None:
        """One that all trunk layers agree on; of MTP layers, where no trunk layer has the role."""
        shapes = self.roles.get(name, {})
        trunk = {shape[axis] for place, shape in shapes.items() if not place.startswith("mtp.")}
        extents = trunk or {shape[axis] for shape in shapes.values()}
        return extents.pop() if len(extents) == 1 else None

    def layers_with(self, name: str) -> list[int]:
        """One or zero for each layer of the trunk."""
        shapes = self.roles.get(name, {})
        return [int(place in shapes) for place in self.trunk()]


def _full(shape: Shape) -> tuple[tuple[int, int], ...]:
    return tuple((0, extent) for extent in shape)


def facts_from_roles(placements: Iterable[Placement]) -> dict[str, Any]:
    """What the placements of a Hugging Face half say, under Megatron's names; sizes that layers differ in are left out.

    What no tensor tells (epsilons, how many experts answer) is for ``facts`` to read from the config.
    """
    model = _Model(placements)
    there = model.roles.keys()
    facts: dict[str, Any] = {
        "num_layers": len(model.trunk()),
        "mtp_num_layers": len(model.mtp()) or None,
        "vocab_size": model.extent("embedding", 0),
        "hidden_size": model.extent("embedding", 1),
        "untie_embeddings_and_output_weights": False,
        "apply_layernorm_1p": model.less_one or None,
        "multi_latent_attention": False,
        "attention_output_gate": False,
    }
    for argument, holders in _SIZES.items():
        facts[argument] = next((model.extent(role, axis) for role, axis in holders if role in there), None)
    for argument, (value, roles) in _THERE.items():
        if any(role in there for role in roles):
            facts[argument] = value
    if "attn.sink" in there and not all(model.layers_with("attn.sink")):
        del facts["softmax_type"]  # it is said for all layers, and here neither value holds for all
    if model.extent("attn.v", 1) != model.extent("attn.q", 1):
        facts["v_head_dim"] = model.extent("attn.v", 1)  # else its default stands, and means nothing
    if "router" in there:
        facts["moe_layer_freq"] = model.layers_with("router")
    if "gdn.q" in there:
        facts["linear_attention_freq"] = model.layers_with("gdn.q")
    if "dsa.k.rope" in there:
        facts |= _sparse(model)
    return {name: value for name, value in facts.items() if value is not None}


def _sparse(model: _Model) -> dict[str, Any]:
    """Of sparse attention: sizes, how the indexer's rotary dims lie, and which layers have an indexer of their own."""
    parts = [model.extent(f"dsa.k.{part}", 0) for part in ("nope", "rope")]
    facts: dict[str, Any] = {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_head_dim": None if None in parts else sum(part or 0 for part in parts),
        "dsa_indexer_rope_interleaved": not model.turned_apart,
    }
    own = dict(enumerate(model.layers_with("dsa.k.rope"), start=1))
    for every in range(1, len(own) + 1):
        for first in range(1, len(own) + 1):
            # experimental_attention_variant/dsa.py: is_dsa_skip_topk_layer
            if all(has == (max(number - first, 0) % every == 0) for number, has in own.items()):
                return facts | {"dsa_indexer_topk_freq": every, "dsa_indexer_skip_topk_offset": first}
    return facts
