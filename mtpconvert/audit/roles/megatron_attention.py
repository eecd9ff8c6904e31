"""Where megatron-core keeps grouped-query attention (SelfAttention), with or without an output gate and sinks.

Keys are relative to a layer, in torch_dist spelling; where two are given, the first is the Transformer Engine spec's.
"""

from __future__ import annotations

from mtpconvert.audit.roles.megatron_facts import Facts
from mtpconvert.audit.roles.megatron_layout import Cut, Entry, Param, cut, same, spelled, where
from mtpconvert.tensors import Shape


def gqa_attention(f: Facts) -> list[Entry]:
    """Grouped-query attention; rotary dims pair as (i, i + dim/2).

    Source: transformer/attention.py: Attention.__init__ (linear_proj), SelfAttention.__init__ (linear_qkv, norms),
    SelfAttention.get_query_key_value_tensors (row order); gpt_layer_specs.py: get_gpt_layer_local_spec (norm keys).
    """
    heads, dim, hidden = f.heads, f.head_dim, f.hidden
    # qk_l2_norm takes the place of both norms and has no weight
    normed = False if f.flag("qk_l2_norm") else f.flag("qk_layernorm")
    return [
        spelled("attn.input_norm", (hidden,), "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        Entry(((_fused_qkv(f, "weight", (hidden,)),),)),
        *where(_either(f.flag("add_bias_linear"), f.flag("add_qkv_bias")), _fused_qkv(f, "bias", ())),
        *where(normed, same("self_attention.q_layernorm.weight", "attn.q_norm", dim)),
        *where(normed, same("self_attention.k_layernorm.weight", "attn.k_norm", dim)),
        *sinks(f),
        Entry(((same("self_attention.linear_proj.weight", "attn.out", hidden, (heads, dim)),),)),
        *where(f.flag("add_bias_linear"), same("self_attention.linear_proj.bias", "attn.out.bias", hidden)),
    ]


def sinks(f: Facts) -> list[Entry]:
    """One logit per query head that joins the softmax and is dropped from its result.

    Source: transformer/dot_product_attention.py: DotProductAttention.__init__, .sharded_state_dict (and
    extensions/transformer_engine.py: TEDotProductAttention.sharded_state_dict); fusions/fused_softmax.py: SoftmaxOne.
    """
    return where(f.learnt_sinks, same("self_attention.core_attention.softmax_offset", "attn.sink", f.heads))


def _fused_qkv(f: Facts, leaf: str, columns: Shape) -> Param:
    """Rows [group][its query heads, their gates, its key, its value][dim]; head h is of group h // (heads / groups).

    Gates are there with ``attention_output_gate``: sigmoid of a gate multiplies what its query head attended
    (Attention._apply_output_gate).
    """
    groups, per_group, dim = f.groups, f.heads // f.groups, f.head_dim
    rest = [slice(0, extent) for extent in (dim, *columns)]
    suffix = "" if columns else ".bias"

    def by_head(name: str, at: int, first: int, last: int) -> Cut:
        """Heads of groups ``first`` to ``last``: one axis of the role, two of the grid, so one of these is 1."""
        part = ((first * per_group, last * per_group), (0, dim), *((0, c) for c in columns))
        box = (slice(first, last), slice(at, at + per_group), *rest)
        return cut(name + suffix, (f.heads, dim, *columns), *box, part=part)

    def all_heads(name: str, at: int) -> list[Cut]:
        if per_group == 1:
            return [by_head(name, at, 0, groups)]
        return [by_head(name, at, group, group + 1) for group in range(groups)]

    def one(name: str, at: int) -> Cut:
        return cut(name + suffix, (groups, dim, *columns), slice(0, groups), slice(at, at + 1), *rest)

    gates = all_heads("attn.gate", per_group) if f.flag("attention_output_gate") else []
    key = 2 * per_group if gates else per_group
    cuts = (*all_heads("attn.q", 0), *gates, one("attn.k", key), one("attn.v", key + 1))
    return Param(f"self_attention.linear_qkv.{leaf}", ((groups, key + 2, dim), *((c,) for c in columns)), cuts)


def _either(*flags: bool | None) -> bool | None:
    """True if one is True; False if all are False; else nobody knows."""
    return True if True in flags else None if None in flags else False
