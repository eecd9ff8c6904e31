"""What a checkpoint's keys and shapes say and no argument of Megatron-LM does: the modules of Megatron-Bridge.

A stock model needs nothing of this: its arguments say what modules it has. Bridge builds some families of modules of
its own (src/megatron/bridge/models: common/te_layers.py, minimax_m2, olmoe, mimo_v2_flash, gemma, exaone), and keeps
what they need in providers that no checkpoint's ``args`` repeat. What is seen in one layer is asked of all of them, so
that a norm that one layer lacks is a tensor that is not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mtpconvert.audit.roles.megatron_facts import Facts, Seen
from mtpconvert.audit.roles.megatron_layout import Home
from mtpconvert.tensors import Inventory, Shape

Homes = tuple[Home, ...]

_AT = "self_attention."
_BEFORE_ATTENTION = (f"{_AT}linear_qkv.layer_norm_weight", "input_layernorm.weight", f"{_AT}in_proj.layer_norm_weight")
_AFTER_ATTENTION = (f"{_AT}linear_proj.post_layernorm.weight",)
_BEFORE_MLP = ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
_AFTER_MLP = ("mlp.linear_fc2.post_layernorm.weight", "post_mlp_layernorm.weight")


def in_model(f: Facts, layers: Sequence[Homes], inventory: Inventory) -> Seen:
    """What is the same in all ``layers``, trunk and MTP; ``groups`` is left to ``in_layer``."""

    def anywhere(keys: tuple[str, ...]) -> bool:
        return any(home.prefix + key in inventory for homes in layers for home in homes for key in keys)

    after_attention, after_mlp = anywhere(_AFTER_ATTENTION), anywhere(_AFTER_MLP)
    seen = Seen(
        attention_before=not after_attention or anywhere(_BEFORE_ATTENTION),
        attention_after=after_attention,
        mlp_before=not after_mlp or anywhere(_BEFORE_MLP),
        mlp_after=after_mlp,
    )
    if f.flag("multi_latent_attention"):
        return seen
    seen = replace(seen, value_dim=_value_dim(f, layers, inventory))
    groups = {_groups(f.given(seen), homes, inventory) for homes in layers} - {None}
    return replace(
        seen,
        joint_norms=any(_norms_jointly(f.given(seen), homes, inventory) for homes in layers),
        mixed=seen.value_dim is not None or len(groups) > 1,
    )


def in_layer(f: Facts, homes: Homes, inventory: Inventory) -> Seen:
    """What was seen of the model, and how many key/value heads this layer has, where layers differ in it."""
    return replace(f.seen, groups=_groups(f, homes, inventory)) if f.seen.mixed else f.seen


def _shape(homes: Homes, inventory: Inventory, key: str) -> Shape:
    """Of the tensor of one layer, () if there is none."""
    for home in homes:
        spec = inventory.get(home.prefix + key)
        if spec is not None:
            return spec.shape if home.index is None else spec.shape[1:]
    return ()


def _value_dim(f: Facts, layers: Sequence[Homes], inventory: Inventory) -> int | None:
    """Dims of a value head by what most layers' ``linear_proj`` reads, where ``kv_channels`` says another number.

    None too where ``v_head_dim`` is told and is neither.
    Source: mimo_v2_flash/modeling_mimo_v2_flash.py: MiMoV2FlashSelfAttention.__init__.
    """
    shapes = [_shape(homes, inventory, f"{_AT}linear_proj.weight") for homes in layers]
    columns = Counter(shape[1] for shape in shapes if len(shape) == 2)
    if not columns:
        return None
    (most, _), *_ = columns.most_common(1)
    dim, rest = divmod(most, f.heads)
    told = f.maybe("v_head_dim")
    return None if rest or dim in (0, f.head_dim) or told not in (None, dim) else dim


def _groups(f: Facts, homes: Homes, inventory: Inventory) -> int | None:
    """Key/value heads of a layer by the rows of its own ``linear_qkv``; None where they are no whole number of groups.

    Source: mimo_v2_flash/modeling_mimo_v2_flash.py: MiMoV2FlashSelfAttention.__init__ (linear_qkv_out_dim), which
    takes the number from the kind of the layer; transformer/attention.py: SelfAttention.__init__ (gates).
    """
    shape = _shape(homes, inventory, f"{_AT}linear_qkv.weight")
    if len(shape) != 2:
        return None
    queries = f.heads * f.head_dim * (2 if f.flag("attention_output_gate") else 1)
    groups, rest = divmod(shape[0] - queries, f.head_dim + f.value_dim)
    return None if rest or groups < 1 or f.heads % groups else groups


def _norms_jointly(f: Facts, homes: Homes, inventory: Inventory) -> bool:
    """Whether the layer's norm of queries, or of keys, has a scale for each dim of each head."""
    groups = _groups(f, homes, inventory) or 1
    widths = {"q": f.heads * f.head_dim, "k": groups * f.head_dim}
    return any(
        _shape(homes, inventory, f"{_AT}{part}_layernorm.weight") == (width,) and width != f.head_dim
        for part, width in widths.items()
    )
