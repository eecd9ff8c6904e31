"""What the numbers of transformers' attention modules mean: grouped-query attention and latent attention (MLA).

Sources (transformers 5.24.0, models/): qwen3/modeling_qwen3.py, qwen2/modeling_qwen2.py, llama/modeling_llama.py,
mistral/modeling_mistral.py and glm4_moe/modeling_glm4_moe.py, ``*Attention.__init__`` and ``.forward``, and the same
of the families that huggingface_families.py names;
deepseek_v3/modeling_deepseek_v3.py, ``DeepseekV3Attention.__init__``, ``.forward``, ``.expand_kv`` and
``apply_rotary_pos_emb_interleave``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.audit.roles.huggingface_site import Piece, Settings, Site
from mtpconvert.errors import ConfigError, NotRepresentableError

Module = Callable[[Site], Iterator[Placement]]


@dataclass(frozen=True)
class AttentionNames:
    """Names below the layer. ``joined``: the one projection that holds all of q, then k, then v; None: three."""

    module: str = "self_attn."
    joined: str | None = None
    out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"


class Heads(NamedTuple):
    """Query heads, key/value heads, dims of a query or key head, dims of a value head."""

    query: int
    kv: int
    dims: int
    value_dims: int


def shared_heads(settings: Settings) -> Heads:
    """Null key/value heads: as many as query heads; null dims: what the hidden size leaves."""
    heads, kv_heads = settings.count("num_attention_heads"), settings.optional("num_key_value_heads")
    kv_heads = heads if kv_heads is None else kv_heads
    if not heads or not kv_heads or heads % kv_heads:
        raise ConfigError(
            f"{heads} query heads cannot share {kv_heads} key/value heads evenly",
            where="config.json: num_attention_heads, num_key_value_heads",
        )
    head_dim = settings.optional("head_dim")
    dims = settings.count("hidden_size") // heads if head_dim is None else head_dim
    return Heads(heads, kv_heads, dims, dims)


def grouped_query(
    *,
    qkv_bias: bool | str = False,
    out_bias: bool | str = False,
    qk_norm: bool | str = False,
    joint: bool = False,
    gated: bool = False,
    sinks: tuple[str, ...] = (),
    heads: Callable[[Settings], Heads] = shared_heads,
    names: AttentionNames = AttentionNames(),
) -> Module:
    """q, k, v rows are (head, dim) by ``.view(*shape, -1, head_dim)``; o columns are (head, dim) by ``.reshape``.

    Query head h reads key/value head h // (heads / kv_heads): ``repeat_kv`` is a ``repeat_interleave`` of heads.
    Where only a leading part of head_dim is rotary (glm4_moe, ``apply_rotary_pos_emb``) the rows keep their places.
    ``gated``: each head's rows of q_proj are [query, gate] (``Qwen3NextAttention.forward``: ``.view(*, -1, head_dim *
    2)``, ``.chunk(2, -1)``). ``sinks``: spellings of one logit per query head (``GptOssAttention``,
    ``eager_attention_forward``). ``joint``: the norms are taken over all heads at once (``Olmo2Attention.forward``).
    """

    def place(site: Site) -> Iterator[Placement]:
        settings, module = site.settings, names.module
        hidden = settings.count("hidden_size")
        query_heads, kv_heads, head_dim, value_dim = heads(settings)
        counts = {"q": query_heads, "k": kv_heads, "v": kv_heads}

        if names.joined is not None:
            runs = [Piece(f"attn.{letter}", count) for letter, count in counts.items()]
            rows = (query_heads + 2 * kv_heads, head_dim)
            yield from site.split(f"{module}{names.joined}.weight", (rows, (hidden,)), 0, runs)
            if settings.on(qkv_bias):
                biases = [Piece(f"{piece.role}.bias", piece.length) for piece in runs]
                yield from site.split(f"{module}{names.joined}.bias", (rows,), 0, biases)
        else:
            for letter, count in counts.items():
                parts = [f"attn.{letter}"] + ["attn.gate"] * (gated and letter == "q")
                dims = value_dim if letter == "v" else head_dim
                rows, pieces = (count, len(parts) * dims), [Piece(role, dims) for role in parts]
                yield from site.split(f"{module}{letter}_proj.weight", (rows, (hidden,)), 1, pieces)
                if settings.on(qkv_bias):
                    biases = [Piece(f"{role}.bias", dims) for role in parts]
                    yield from site.split(f"{module}{letter}_proj.bias", (rows,), 1, biases)
        if joint:
            yield site.norm(f"{module}{names.q_norm}.weight", "attn.q_norm.joint", query_heads, head_dim)
            yield site.norm(f"{module}{names.k_norm}.weight", "attn.k_norm.joint", kv_heads, head_dim)
        elif settings.on(qk_norm):
            yield site.norm(f"{module}{names.q_norm}.weight", "attn.q_norm", head_dim)
            yield site.norm(f"{module}{names.k_norm}.weight", "attn.k_norm", head_dim)
        if sinks:
            yield site.whole(site.either(*(module + name for name in sinks)), "attn.sink", ((query_heads,),))
        yield site.whole(f"{module}{names.out}.weight", "attn.out", ((hidden,), (query_heads, value_dim)))
        if settings.on(out_bias):
            yield site.whole(f"{module}{names.out}.bias", "attn.out.bias", ((hidden,),))

    return place


def latent(*, interleaved: bool | str) -> Module:
    """Each query head's rows are [nope, rope]; each head's rows of kv_b are [key nope, value]; kv_a's [latent, rope].

    ``interleaved``: how rotary rows are stored (see ``rotary``), fixed by the modelling code or by a config key.
    """

    def place(site: Site) -> Iterator[Placement]:
        return _latent(site, site.settings.on(interleaved))

    return place


def _latent(site: Site, interleaved: bool) -> Iterator[Placement]:
    """Raises NotRepresentableError for ``attention_bias``: the biases of the down projections have no role."""
    settings = site.settings
    if settings.flag("attention_bias"):
        raise NotRepresentableError(
            "latent attention with biases on its down projections is not known to the auditor",
            where="config.json: attention_bias",
            next_step="audit the tensors byte by byte against another Hugging Face directory",
        )
    hidden, heads = settings.count("hidden_size"), settings.count("num_attention_heads")
    nope, rope = settings.count("qk_nope_head_dim"), settings.count("qk_rope_head_dim")
    value, kv_rank = settings.count("v_head_dim"), settings.count("kv_lora_rank")
    q_rank = settings.optional("q_lora_rank")

    def query(role: str) -> list[Piece]:
        return [Piece(f"{role}.nope", nope), *rotary(f"{role}.rope", rope, interleaved)]

    q_rows = (heads, nope + rope)
    if q_rank is None:
        yield from site.split("self_attn.q_proj.weight", (q_rows, (hidden,)), 1, query("mla.q"))
    else:
        yield site.whole("self_attn.q_a_proj.weight", "mla.q_down", ((q_rank,), (hidden,)))
        yield site.norm("self_attn.q_a_layernorm.weight", "mla.q_down_norm", q_rank)
        yield from site.split("self_attn.q_b_proj.weight", (q_rows, (q_rank,)), 1, query("mla.q_up"))

    down = [Piece("mla.kv_down.latent", kv_rank), *rotary("mla.kv_down.rope", rope, interleaved)]
    yield from site.split("self_attn.kv_a_proj_with_mqa.weight", ((kv_rank + rope,), (hidden,)), 0, down)
    yield site.norm("self_attn.kv_a_layernorm.weight", "mla.kv_norm", kv_rank)
    up = [Piece("mla.kv_up.k", nope), Piece("mla.kv_up.v", value)]
    yield from site.split("self_attn.kv_b_proj.weight", ((heads, nope + value), (kv_rank,)), 1, up)
    yield site.whole("self_attn.o_proj.weight", "attn.out", ((hidden,), (heads, value)))


def rotary(role: str, rope: int, interleaved: bool) -> list[Piece]:
    """The rotary rows as stored, in terms of dims of which 2p and 2p + 1 are turned together, by frequency p.

    ``interleaved`` stores them so (``apply_rotary_pos_emb_interleave``); else all first members of the pairs come
    first, then all second ones (``rotate_half``), and each row then stands for a dim elsewhere.
    """
    if interleaved:
        return [Piece(role, rope)]
    return [Piece(role, 1, 2 * pair + member, rope) for member in (0, 1) for pair in range(rope // 2)]
