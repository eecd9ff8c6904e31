"""What a model computes with, besides its tensors: rotary embedding, norms, router. Megatron arguments against config.

Sources. transformers 5.24.0: modeling_rope_utils.py (``standardize_rope_params``, ``_compute_yarn_parameters``,
``_compute_llama3_parameters``), deepseek_v3/modeling_deepseek_v3.py and qwen3_moe/modeling_qwen3_moe.py (routers).
megatron-core 0.16.1: transformer_config.py (``MLATransformerConfig``, ``moe_router_*``), rotary_pos_embedding.py
(``_apply_scaling``), moe/moe_utils.py (``topk_routing_with_score_function``); 0.19.2: training/argument_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

# Fixed in rotary_pos_embedding.py: _apply_scaling.
_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
_KINDS = {"default": "no scaling", "linear": "linear scaling", "llama3": "llama3 scaling", "yarn": "YaRN"}
# config key (of the rope parameters) -> spellings of the argument, the model's class's own first
_YARN = {
    "beta_fast": ("beta_fast", "yarn_beta_fast"),
    "beta_slow": ("beta_slow", "yarn_beta_slow"),
    "mscale": ("mscale",),
    "mscale_all_dim": ("mscale_all_dim",),
    "original_max_position_embeddings": ("original_max_position_embeddings", "yarn_original_max_position_embeddings"),
}


# Model types whose attention, not a latent one, rotates dims 2i and 2i + 1 together: glm4/modeling_glm4.py. Others pair
# i with i + half, as megatron-core does unless ``rotary_interleaved`` (rope_utils.py: _rotate_half).
_ADJACENT = frozenset({"glm4"})


class Contradiction(NamedTuple):
    """An argument and what it says, against what config.json says, and what the difference does."""

    argument: str
    said: Any
    wanted: Any
    why: str


def contradictions(arguments: dict[str, Any], config: dict[str, Any]) -> list[Contradiction]:
    """Where both speak and do not agree. What either leaves to a default of its class is not compared."""
    text = config.get("text_config")
    level = {**config, **text} if isinstance(text, dict) else config
    return [*_pairing(arguments, level), *_rotary(arguments, level), *_router(arguments, level)]


def rotates_adjacent(config: dict[str, Any]) -> bool:
    """Whether dims 2i and 2i + 1 of a query rotate together."""
    return bool(config.get("rope_interleave", "kv_lora_rank" in config or config.get("model_type") in _ADJACENT))


def _pairing(arguments: dict[str, Any], config: dict[str, Any]) -> Iterator[Contradiction]:
    """What is set where it should not be is for ``meaning_arguments``; latent attention asks no argument."""
    said = arguments.get("rotary_interleaved")
    if said is False and config.get("model_type") in _ADJACENT:
        yield Contradiction("rotary_interleaved", said, True, "query and key dims rotate as pairs (i, i + dim/2)")


def _rotary(arguments: dict[str, Any], config: dict[str, Any]) -> Iterator[Contradiction]:
    rope = _rope(config)
    if rope is None:
        return
    theta, base = rope.get("rope_theta"), arguments.get("rotary_base")
    if not _agree(base, theta):
        yield Contradiction("rotary_base", base, theta, "positions are rotated by other angles")
    latent = bool(arguments.get("multi_latent_attention"))
    share, percent = rope.get("partial_rotary_factor"), arguments.get("rotary_percent")
    if not latent and not _agree(percent, share):
        yield Contradiction("rotary_percent", percent, share, "another part of each head is rotated")
    wanted, factor = _kind(rope)
    argument, kind, said = _latent_scaling(arguments) if latent else _scaling(arguments)
    if kind is None or wanted not in _KINDS:
        return
    if kind != wanted:
        why = "long contexts are rotated otherwise, and YaRN scales attention too"
        yield Contradiction(argument, _KINDS[kind], _KINDS[wanted], why)
        return
    if not _agree(said, factor):
        yield Contradiction(argument, said, factor, "long contexts are rotated by other angles")
    if kind == "llama3":
        for key, fixed in _LLAMA3.items():
            if not _agree(fixed, rope.get(key)):
                yield Contradiction(argument, f"{key} {fixed}, which is fixed", rope[key], "other bands are scaled")
    for key, names in _YARN.items() if kind == "yarn" else ():
        name = next((name for name in names if arguments.get(name) is not None), names[0])
        if not _agree(arguments.get(name), rope.get(key)):
            yield Contradiction(name, arguments[name], rope[key], "YaRN computes other angles or another scale")


def _rope(config: dict[str, Any]) -> dict[str, Any] | None:
    """The rope parameters with what stands beside them; None where nothing is said, or several, by layer type."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        return None
    beside = ("rope_theta", "partial_rotary_factor")
    return {**{key: config[key] for key in beside if config.get(key) is not None}, **found} or None


def _kind(rope: dict[str, Any]) -> tuple[str, Any]:
    kind, factor = str(rope.get("rope_type", rope.get("type", "default"))), rope.get("factor")
    return ("default", 1.0) if kind in _KINDS and _number(factor) == 1.0 else (kind, factor)


def _latent_scaling(arguments: dict[str, Any]) -> tuple[str, str | None, Any]:
    """(argument, kind of scaling or None if it is not said, factor) of multi-latent attention; YaRN is its default."""
    factor = arguments.get("rotary_scaling_factor")
    if arguments.get("rope_type") == "rope" or _number(factor) == 1.0:
        return "rope_type", "default", None
    return "rotary_scaling_factor", None if factor is None else "yarn", factor


def _scaling(arguments: dict[str, Any]) -> tuple[str, str | None, Any]:
    """The same of common attention."""
    if arguments.get("position_embedding_type") == "yarn":
        factor = arguments.get("rotary_scaling_factor")
        return "rotary_scaling_factor", "default" if _number(factor) == 1.0 else "yarn", factor
    if arguments.get("use_rope_scaling"):
        return "rope_scaling_factor", "llama3", arguments.get("rope_scaling_factor")
    factor = arguments.get("rotary_seq_len_interpolation_factor")
    if factor is not None and _number(factor) != 1.0:
        return "rotary_seq_len_interpolation_factor", "linear", factor
    said = "use_rope_scaling" in arguments or arguments.get("position_embedding_type") == "rope"
    return "use_rope_scaling", "default" if said else None, None


def _router(arguments: dict[str, Any], config: dict[str, Any]) -> Iterator[Contradiction]:
    if not arguments.get("num_experts"):
        return
    scale, said = config.get("routed_scaling_factor"), arguments.get("moe_router_topk_scaling_factor")
    told = "moe_router_topk_scaling_factor" in arguments
    if told and not _agree(1.0 if said is None else said, scale):
        yield Contradiction("moe_router_topk_scaling_factor", said, scale, "experts' outputs are scaled otherwise")
    if str(config.get("topk_method")) != "greedy":
        for key, name in (("n_group", "moe_router_num_groups"), ("topk_group", "moe_router_group_topk")):
            groups, said = config.get(key), arguments.get(name)
            alone = config.get("n_group") == 1 and said is None
            if name in arguments and not alone and not _agree(1 if said is None else said, groups):
                yield Contradiction(name, said, groups, "experts are chosen from other groups")
    function, score = config.get("scoring_func"), arguments.get("moe_router_score_function")
    if function is not None and score is not None and function != score:
        yield Contradiction("moe_router_score_function", score, function, "experts are weighted otherwise")
    normed, early = config.get("norm_topk_prob"), arguments.get("moe_router_pre_softmax")
    if score == "softmax" and isinstance(normed, bool) and early is not None and bool(early) is normed:
        why = "the weights of the chosen experts sum to one only if the softmax follows the choice"
        yield Contradiction("moe_router_pre_softmax", early, not normed, why)


def _agree(said: Any, wanted: Any) -> bool:
    """Whether two numbers are equal; True where either is not said, or is no number."""
    one, two = _number(said), _number(wanted)
    return one is None or two is None or one == two


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
