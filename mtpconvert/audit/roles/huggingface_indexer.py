"""What the numbers of transformers' sparse-attention indexer mean: latent attention of DeepSeek-V3.2 and GLM-5.

Sources (transformers 5.24.0, models/): deepseek_v32/modeling_deepseek_v32.py, ``DeepseekV32Indexer.__init__`` and
``.forward`` (each head's rows, and the key's, are [rope, nope]; rotary by ``rotate_half``);
glm_moe_dsa/modeling_glm_moe_dsa.py, ``GlmMoeDsaIndexer`` (rotary in pairs), ``GlmMoeDsaAttention.__init__`` (no indexer
where ``indexer_types`` says "shared"); glm_moe_dsa/configuration_glm_moe_dsa.py, ``GlmMoeDsaConfig.__post_init__``.
"""

from __future__ import annotations

from collections.abc import Iterator

from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.audit.roles.huggingface_attention import Module, latent, rotary
from mtpconvert.audit.roles.huggingface_site import Piece, Settings, Site
from mtpconvert.errors import ConfigError


def indexed(*, interleaved: bool) -> Module:
    """Latent attention with its rotary rows in pairs, and an indexer; ``interleaved``: the indexer's rows too."""
    attention = latent(interleaved=True)

    def place(site: Site) -> Iterator[Placement]:
        yield from attention(site)
        yield from _indexer(site, interleaved)

    return place


def has_indexer(settings: Settings, layer: int) -> bool:
    """Whether a trunk layer of GLM-5 has an indexer of its own: ``indexer_types`` first, then ``index_topk_pattern``,
    then every ``index_topk_freq``-th layer from ``index_skip_topk_offset`` on. Raises ConfigError for another word.
    """
    layers = settings.count("num_hidden_layers")
    pattern = settings.raw("index_topk_pattern")
    if settings.raw("indexer_types") is None and isinstance(pattern, str):
        types: list[object] | None = list(pattern)
    else:
        types = settings.listed("indexer_types", layers) or settings.listed("index_topk_pattern", layers)
    if types is None:
        every = max(settings.count("index_topk_freq"), 1)
        return max(layer - settings.count("index_skip_topk_offset") + 1, 0) % every == 0
    word = types[layer] if layer < len(types) else None
    if word not in ("full", "F", "shared", "S"):
        raise ConfigError(
            f"the indexer of layer {layer} is {word!r}, neither full nor shared",
            where="config.json: indexer_types, index_topk_pattern",
        )
    return word in ("full", "F")


def _indexer(site: Site, interleaved: bool) -> Iterator[Placement]:
    settings = site.settings
    hidden, rank = settings.count("hidden_size"), settings.count("q_lora_rank")
    heads, dims = settings.count("index_n_heads"), settings.count("index_head_dim")
    rope = settings.count("qk_rope_head_dim")

    def parts(role: str) -> list[Piece]:
        return [*rotary(f"{role}.rope", rope, interleaved), Piece(f"{role}.nope", dims - rope)]

    yield from site.split("self_attn.indexer.wq_b.weight", ((heads, dims), (rank,)), 1, parts("dsa.q"))
    yield from site.split("self_attn.indexer.wk.weight", ((dims,), (hidden,)), 0, parts("dsa.k"))
    yield from site.split("self_attn.indexer.k_norm.weight", ((dims,),), 0, parts("dsa.k_norm"))
    yield from site.split("self_attn.indexer.k_norm.bias", ((dims,),), 0, parts("dsa.k_norm.bias"))
    yield site.whole("self_attn.indexer.weights_proj.weight", "dsa.weights", ((heads,), (hidden,)))
