"""Where megatron-core keeps attention: grouped-query (SelfAttention) and multi-head latent (MLASelfAttention).

Keys are relative to a layer, in torch_dist spelling; where two are given, the first is the Transformer Engine spec's.
"""

from __future__ import annotations

from mtpconvert.audit.roles.megatron_facts import Facts
from mtpconvert.audit.roles.megatron_layout import Cut, Entry, Param, cut, same, spelled
from mtpconvert.tensors import Shape


def gqa_attention(f: Facts) -> list[Entry]:
    """Grouped-query attention; rotary dims pair as (i, i + dim/2).

    Source: transformer/attention.py: Attention.__init__ (linear_proj), SelfAttention.__init__ (linear_qkv, norms),
    SelfAttention.get_query_key_value_tensors (row order); gpt_layer_specs.py: get_gpt_layer_local_spec (norm keys).
    """
    heads, dim, hidden = f.heads, f.head_dim, f.hidden
    return [
        spelled("attn.input_norm", (hidden,), "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        Entry(((_fused_qkv(f, "weight", (hidden,)),),)),
        *_if(_either(f.flag("add_bias_linear"), f.flag("add_qkv_bias")), _fused_qkv(f, "bias", ())),
        *_if(f.flag("qk_layernorm"), same("self_attention.q_layernorm.weight", "attn.q_norm", dim)),
        *_if(f.flag("qk_layernorm"), same("self_attention.k_layernorm.weight", "attn.k_norm", dim)),
        Entry(((same("self_attention.linear_proj.weight", "attn.out", hidden, (heads, dim)),),)),
        *_if(f.flag("add_bias_linear"), same("self_attention.linear_proj.bias", "attn.out.bias", hidden)),
    ]


def _fused_qkv(f: Facts, leaf: str, columns: Shape) -> Param:
    """Rows [group][its query heads, its key, its value][dim]; query head h belongs to group h // (heads / groups)."""
    groups, per_group, dim = f.groups, f.heads // f.groups, f.head_dim
    rest = [slice(0, extent) for extent in (dim, *columns)]
    suffix = "" if columns else ".bias"

    def queries(first: int, last: int) -> Cut:
        """Queries of groups ``first`` to ``last``: one axis of the role, two of the grid, so one of these is 1."""
        part = ((first * per_group, last * per_group), (0, dim), *((0, c) for c in columns))
        box = (slice(first, last), slice(0, per_group), *rest)
        return cut("attn.q" + suffix, (f.heads, dim, *columns), *box, part=part)

    def one(name: str, at: int) -> Cut:
        return cut(name + suffix, (groups, dim, *columns), slice(0, groups), slice(at, at + 1), *rest)

    q = [queries(0, groups)] if per_group == 1 else [queries(g, g + 1) for g in range(groups)]
    cuts = (*q, one("attn.k", per_group), one("attn.v", per_group + 1))
    return Param(f"self_attention.linear_qkv.{leaf}", ((groups, per_group + 2, dim), *((c,) for c in columns)), cuts)


def mla_attention(f: Facts) -> list[Entry]:
    """Multi-head latent attention; rotary dims pair as (2i, 2i+1), with or without ``rotary_interleaved``.

    Source: transformer/multi_latent_attention.py: MultiLatentAttention.__init__ (linear_proj), MLASelfAttention
    .__init__ and .get_query_key_value_tensors (splits), .sharded_state_dict of 0.19.2 (a fused down projection is
    saved as its two parts); gpt_layer_specs.py: get_gpt_layer_with_transformer_engine_spec (norms in the up
    projections), get_gpt_layer_local_spec (norms apart).
    """
    heads, hidden, rank = f.heads, f.hidden, f.need("kv_lora_rank")
    nope, rope, value = f.need("qk_head_dim"), f.need("qk_pos_emb_head_dim"), f.need("v_head_dim")
    at = "self_attention"
    kv_down = Param(f"{at}.linear_kv_down_proj.weight", ((rank + rope,), (hidden,)), (
        cut("mla.kv_down.latent", (rank, hidden), slice(0, rank), slice(0, hidden)),
        cut("mla.kv_down.rope", (rope, hidden), slice(rank, rank + rope), slice(0, hidden)),
    ))  # fmt: skip
    kv_up = _by_head(f"{at}.linear_kv_up_proj.weight", heads, rank, ("mla.kv_up.k", nope), ("mla.kv_up.v", value))
    norm = _latent_norm(f, "mla.kv_norm", rank, f"{at}.linear_kv_up_proj", f"{at}.kv_layernorm")
    return [
        spelled("attn.input_norm", (hidden,), "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        *_mla_queries(f, nope, rope),
        Entry(((kv_down,),)),
        *norm,
        Entry(((kv_up,),)),
        Entry(((same(f"{at}.linear_proj.weight", "attn.out", hidden, (heads, value)),),)),
        *_if(f.flag("add_bias_linear"), same(f"{at}.linear_proj.bias", "attn.out.bias", hidden)),
    ]


def _mla_queries(f: Facts, nope: int, rope: int) -> list[Entry]:
    """Queries through a latent where ``q_lora_rank`` is set, else straight from the hidden state.

    Without a latent, ``qk_layernorm`` adds no norm to queries in 0.16.1. 0.19.2 (mla_qk_norm_config.py:
    QKNormConfigResolver) then norms the normed input once more, ``linear_q_proj.layer_norm_weight``: no role is that.
    """
    heads, hidden, rank, at = f.heads, f.hidden, f.maybe("q_lora_rank"), "self_attention"
    if rank is None:
        q = _by_head(f"{at}.linear_q_proj.weight", heads, hidden, ("mla.q.nope", nope), ("mla.q.rope", rope))
        return [Entry(((q,),))]
    up = _by_head(f"{at}.linear_q_up_proj.weight", heads, rank, ("mla.q_up.nope", nope), ("mla.q_up.rope", rope))
    return [
        Entry(((same(f"{at}.linear_q_down_proj.weight", "mla.q_down", rank, hidden),),)),
        *_latent_norm(f, "mla.q_down_norm", rank, f"{at}.linear_q_up_proj", f"{at}.q_layernorm"),
        Entry(((up,),)),
    ]


def _by_head(key: str, heads: int, columns: int, first: tuple[str, int], second: tuple[str, int]) -> Param:
    """Rows [head][dims of the first role, dims of the second]."""
    (one, a), (two, b) = first, second
    return Param(key, ((heads, a + b), (columns,)), (
        cut(one, (heads, a, columns), slice(0, heads), slice(0, a), slice(0, columns)),
        cut(two, (heads, b, columns), slice(0, heads), slice(a, a + b), slice(0, columns)),
    ))  # fmt: skip


def _latent_norm(f: Facts, name: str, rank: int, fused: str, apart: str) -> list[Entry]:
    flag = f.flag("qk_layernorm")
    keys = (f"{fused}.layer_norm_weight", f"{apart}.weight")
    return [] if flag is False else [spelled(name, (rank,), *keys, required=flag is True)]


def _either(*flags: bool | None) -> bool | None:
    """True if one is True; False if all are False; else nobody knows."""
    return True if True in flags else None if None in flags else False


def _if(flag: bool | None, param: Param) -> list[Entry]:
    """An entry that the arguments ask for (True), exclude (False), or say nothing about (None: where it is found)."""
    return [] if flag is False else [Entry(((param,),), required=flag is True)]
