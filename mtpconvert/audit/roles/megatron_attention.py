"""Where megatron-core keeps grouped-query attention (SelfAttention), with or without an output gate and sinks.

Keys are relative to a layer, in torch_dist spelling; where two are given, the first is the Transformer Engine spec's.
What stock megatron-core has no module for is where Megatron-Bridge's modules (src/megatron/bridge/models) have it.
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
    hidden = f.hidden
    fused_qkv = _fused_qkv if f.value_dim == f.head_dim else _uneven_qkv
    return [
        input_norm(f, "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        Entry(((fused_qkv(f, "weight", (hidden,)),),)),
        *where(_either(f.flag("add_bias_linear"), f.flag("add_qkv_bias")), fused_qkv(f, "bias", ())),
        *_query_and_key_norms(f),
        *sinks(f),
        Entry(((same("self_attention.linear_proj.weight", "attn.out", hidden, (f.heads, f.value_dim)),),)),
        *where(f.flag("add_bias_linear"), same("self_attention.linear_proj.bias", "attn.out.bias", hidden)),
        output_norm(f),
    ]


def input_norm(f: Facts, *keys: str) -> Entry:
    """Of what attention reads. Bridge's post-norm layers have none (exaone/exaone4/exaone4_provider.py)."""
    return spelled("attn.input_norm", (f.hidden,), *keys, required=f.seen.attention_before)


def output_norm(f: Facts) -> Entry:
    """Of what attention gives, before the residual. Source: common/te_layers.py: TERowParallelLinearLayerNorm."""
    key = "self_attention.linear_proj.post_layernorm.weight"
    return spelled("attn.output_norm", (f.hidden,), key, required=f.seen.attention_after)


def _query_and_key_norms(f: Facts) -> list[Entry]:
    """Of each head, or of all heads together, then with a scale for each dim of each.

    Source of the latter: minimax_m2/minimax_m2_provider.py: FullDimQNorm, FullDimKNorm; olmoe/olmoe_provider.py:
    OLMoESelfAttention. Both norm [heads * dim] in the order in which ``linear_qkv`` gives heads.
    """
    # qk_l2_norm takes the place of both norms and has no weight
    normed = False if f.flag("qk_l2_norm") else f.flag("qk_layernorm")
    keys = "self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"
    if f.seen.joint_norms:
        q = same(keys[0], "attn.q_norm.joint", (f.heads, f.head_dim))
        k = same(keys[1], "attn.k_norm.joint", (f.groups, f.head_dim))
    else:
        q, k = same(keys[0], "attn.q_norm", f.head_dim), same(keys[1], "attn.k_norm", f.head_dim)
    return [*where(normed, q), *where(normed, k)]


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


def _uneven_qkv(f: Facts, leaf: str, columns: Shape) -> Param:
    """The same rows where a value has another number of dims than a query and a key; there are no gates.

    Source: mimo_v2_flash/modeling_mimo_v2_flash.py: MiMoV2FlashSelfAttention.get_query_key_value_tensors.
    """
    heads, groups, dim, value = f.heads, f.groups, f.head_dim, f.value_dim
    per_group = heads // groups
    rest = [slice(0, extent) for extent in columns]
    suffix = "" if columns else ".bias"

    def query(head: int) -> Cut:
        group, at = divmod(head, per_group)
        part = ((head, head + 1), *((0, extent) for extent in (dim, *columns)))
        box = (slice(group, group + 1), slice(at * dim, (at + 1) * dim), *rest)
        return cut(f"attn.q{suffix}", (heads, dim, *columns), *box, part=part)

    def one(name: str, start: int, extent: int) -> Cut:
        box = (slice(0, groups), slice(start, start + extent), *rest)
        return cut(name + suffix, (groups, extent, *columns), *box)

    key = per_group * dim
    cuts = (*(query(head) for head in range(heads)), one("attn.k", key, dim), one("attn.v", key + dim, value))
    return Param(f"self_attention.linear_qkv.{leaf}", ((groups, key + dim + value), *((c,) for c in columns)), cuts)


def _either(*flags: bool | None) -> bool | None:
    """True if one is True; False if all are False; else nobody knows."""
    return True if True in flags else None if None in flags else False
