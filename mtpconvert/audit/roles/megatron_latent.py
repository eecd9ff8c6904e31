"""Where megatron-core keeps multi-head latent attention (MLASelfAttention), dense or sparse (DSA of 0.19.2).

Keys are relative to a layer, in torch_dist spelling; where two are given, the first is what the stock spec of the
variant writes. Rotary dims of queries and of the shared key pair as (2i, 2i+1), with or without
``rotary_interleaved``; those of the indexer pair as ``dsa_indexer_rope_interleaved`` says.
"""

from __future__ import annotations

from mtpconvert.audit.roles.megatron_attention import input_norm, output_norm, sinks
from mtpconvert.audit.roles.megatron_facts import Facts
from mtpconvert.audit.roles.megatron_layout import Cut, Entry, Param, cut, full, same, spelled, where
from mtpconvert.tensors import Shape

_AT = "self_attention"


def mla_attention(f: Facts) -> list[Entry]:
    """Latent attention over all positions.

    Source: transformer/multi_latent_attention.py: MultiLatentAttention.__init__ (linear_proj), MLASelfAttention
    .__init__ and .get_query_key_value_tensors (splits), .sharded_state_dict of 0.19.2 (a fused down projection is
    saved as its two parts); gpt_layer_specs.py: get_gpt_layer_with_transformer_engine_spec (norms in the up
    projections), get_gpt_layer_local_spec (norms apart).
    """
    return [*_latent(f), *sinks(f)]


def dsa_attention(f: Facts) -> list[Entry]:
    """Latent attention over the positions that an indexer of the layer's own picks.

    Source: experimental_attention_variant/absorbed_mla.py: AbsorbedMLASelfAttention (the rows of MLASelfAttention,
    norms apart: experimental_attention_variant_module_specs.py), dsa.py: DSAIndexer.__init__, .forward_before_topk,
    ._apply_rope (rotary dims first), _compute_index_scores. 0.16.1 has modules of this name that split the other
    way, and no block spec that reaches them.
    """
    return [*_latent(f), *_indexer(f)]


def dsa_shared_attention(f: Facts) -> list[Entry]:
    """Latent attention over the positions that an earlier layer's indexer picked (dsa.py: DSAttention.skip_topk)."""
    return _latent(f)


def _latent(f: Facts) -> list[Entry]:
    heads, hidden, rank = f.heads, f.hidden, f.need("kv_lora_rank")
    nope, rope, value = f.need("qk_head_dim"), f.need("qk_pos_emb_head_dim"), f.need("v_head_dim")
    kv_down = Param(f"{_AT}.linear_kv_down_proj.weight", ((rank + rope,), (hidden,)), (
        cut("mla.kv_down.latent", (rank, hidden), slice(0, rank), slice(0, hidden)),
        cut("mla.kv_down.rope", (rope, hidden), slice(rank, rank + rope), slice(0, hidden)),
    ))  # fmt: skip
    kv_up = _by_head(f"{_AT}.linear_kv_up_proj.weight", heads, rank, ("mla.kv_up.k", nope), ("mla.kv_up.v", value))
    return [
        input_norm(f, "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        *_queries(f, nope, rope),
        Entry(((kv_down,),)),
        *_latent_norm(f, "mla.kv_norm", rank, "linear_kv_up_proj", "kv_layernorm"),
        Entry(((kv_up,),)),
        Entry(((same(f"{_AT}.linear_proj.weight", "attn.out", hidden, (heads, value)),),)),
        *where(f.flag("add_bias_linear"), same(f"{_AT}.linear_proj.bias", "attn.out.bias", hidden)),
        output_norm(f),
    ]


def _queries(f: Facts, nope: int, rope: int) -> list[Entry]:
    """Queries through a latent where ``q_lora_rank`` is set, else straight from the hidden state.

    Without a latent, ``qk_layernorm`` adds no norm to queries in 0.16.1. 0.19.2 (mla_qk_norm_config.py:
    QKNormConfigResolver) then norms the normed input once more, ``linear_q_proj.layer_norm_weight``: no role is that.
    """
    heads, hidden, rank = f.heads, f.hidden, f.maybe("q_lora_rank")
    if rank is None:
        q = _by_head(f"{_AT}.linear_q_proj.weight", heads, hidden, ("mla.q.nope", nope), ("mla.q.rope", rope))
        return [Entry(((q,),))]
    up = _by_head(f"{_AT}.linear_q_up_proj.weight", heads, rank, ("mla.q_up.nope", nope), ("mla.q_up.rope", rope))
    return [
        Entry(((same(f"{_AT}.linear_q_down_proj.weight", "mla.q_down", rank, hidden),),)),
        *_latent_norm(f, "mla.q_down_norm", rank, "linear_q_up_proj", "q_layernorm"),
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
    """In the projection behind it, or apart: the indexer needs what is normed, so DSA never fuses."""
    flag = f.flag("qk_layernorm")
    keys = [f"{_AT}.{fused}.layer_norm_weight", f"{_AT}.{apart}.weight"]
    if f.sparse:
        keys.reverse()
    return [] if flag is False else [spelled(name, (rank,), *keys, required=flag is True)]


def _indexer(f: Facts) -> list[Entry]:
    """Index queries read the normed query latent, keys and weights the layer's normed input.

    The Hadamard rotation of both (``dsa_indexer_rotate_activation``) leaves every score as it is.
    """
    heads, hidden, rank = f.need("dsa_indexer_n_heads"), f.hidden, f.need("q_lora_rank")
    at = f"{_AT}.core_attention.indexer"
    return [
        _split_index(f, f"{at}.linear_wq_b.weight", "dsa.q", (heads,), (rank,)),
        _split_index(f, f"{at}.linear_wk.weight", "dsa.k", (), (hidden,)),
        _split_index(f, f"{at}.k_norm.weight", "dsa.k_norm", (), ()),
        _split_index(f, f"{at}.k_norm.bias", "dsa.k_norm.bias", (), ()),
        Entry(((same(f"{at}.linear_weights_proj.weight", "dsa.weights", heads, hidden),),)),
    ]


def _split_index(f: Facts, key: str, name: str, before: Shape, after: Shape) -> Entry:
    """Rows [*before][rotary dims, the others] of a tensor with the axes ``after`` behind them.

    Roles count rotary dims in pairs that turn together; here pair p is (2p, 2p+1) if interleaved, else (p, p + half).
    """
    dims, rope = f.need("dsa_indexer_head_dim"), f.need("qk_pos_emb_head_dim")
    half = rope // 2

    def piece(kind: str, extent: int, start: int, at: int, count: int) -> Cut:
        """Stored dims ``start`` and on are dims ``at`` and on of the role, ``count`` of them."""
        around = [slice(0, n) for n in before], [slice(0, n) for n in after]
        part = (*full(before), (at, at + count), *full(after))
        box = (*around[0], slice(start, start + count), *around[1])
        return cut(f"{name}.{kind}", (*before, extent, *after), *box, part=part)

    if f.flag("dsa_indexer_rope_interleaved"):
        turned = [piece("rope", rope, 0, 0, rope)]
    else:
        turned = [piece("rope", rope, p + second * half, 2 * p + second, 1) for p in range(half) for second in (0, 1)]
    axes = ((*before, dims), *((n,) for n in after))
    return Entry(((Param(key, axes, (*turned, piece("nope", dims - rope, rope, 0, dims - rope))),),))
