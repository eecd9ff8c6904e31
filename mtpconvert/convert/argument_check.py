"""The ``args`` of a Megatron checkpoint against what the reference's config.json stands for.

Two kinds of argument matter on the way back. Those that the config decides too must agree, or the config.json that is
written would describe another model. Those that no config.json knows, but that change what a stored number means
without changing a name or a shape, must have the value that the mapping stands for. Everything else (optimizer, data,
parallel sizes, sequence length, dropout) says nothing about the weights and is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtpconvert.convert.argument_rules import megatron_arguments
from mtpconvert.errors import ConfigError
from mtpconvert.mapping.dims import Scope

# Compared with what the config gives. Groups: names of one argument in different versions of Megatron.
DECIDED: tuple[tuple[str, ...], ...] = (
    ("num_layers",),
    ("hidden_size",),
    ("ffn_hidden_size",),
    ("num_attention_heads",),
    ("num_query_groups",),
    ("kv_channels",),
    ("normalization",),
    ("norm_epsilon", "layernorm_epsilon"),
    ("swiglu",),
    ("qk_layernorm",),
    ("add_bias_linear",),
    ("add_qkv_bias",),
    ("untie_embeddings_and_output_weights",),
    ("position_embedding_type",),
    ("rotary_base",),
    ("rotary_percent",),
    ("rotary_seq_len_interpolation_factor",),
    ("use_rope_scaling",),
    ("rope_scaling_factor",),
    ("rope_type",),
    ("rotary_scaling_factor",),
    ("mscale",),
    ("mscale_all_dim",),
    ("original_max_position_embeddings",),
    ("beta_fast",),
    ("beta_slow",),
    ("yarn_original_max_position_embeddings",),
    ("yarn_beta_fast",),
    ("yarn_beta_slow",),
    ("window_size",),
    ("window_attn_skip_freq",),
    ("multi_latent_attention",),
    ("q_lora_rank",),
    ("kv_lora_rank",),
    ("qk_head_dim",),
    ("qk_pos_emb_head_dim",),
    ("v_head_dim",),
    ("num_experts",),
    ("moe_layer_freq",),
    ("moe_ffn_hidden_size",),
    ("moe_shared_expert_intermediate_size",),
    ("moe_router_topk",),
    ("moe_router_num_groups",),
    ("moe_router_group_topk",),
    ("moe_router_score_function",),
    ("moe_router_enable_expert_bias",),
    ("moe_router_topk_scaling_factor",),
    ("mtp_num_layers",),
)

# Change the meaning of stored numbers, not their names or shapes. Value: what the shipped mappings stand for.
MEANING: dict[str, Any] = {
    # order of the rows of a gated fc1: megatron/core/transformer/mlp.py, moe/experts.py (0.19.2)
    "moe_mlp_glu_interleave_size": None,
    "moe_shared_expert_glu_interleave_size": None,
    # order of the rotated rows of q and k: models/common/embeddings/rope_utils.py
    "rotary_interleaved": False,
    "no_rope_freq": None,
    "mrope_section": None,
    # a norm's weight stands for 1 + w
    "apply_layernorm_1p": False,
    "layernorm_zero_centered_gamma": False,
    # one MTP layer used at every depth, or another kind of MTP layer
    "mtp_use_repeated_layer": False,
    "mtp_hybrid_override_pattern": None,
    # another model class, or layers of other kinds
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "heterogeneous_layers_config_path": None,
    "heterogeneous_layers_config_encoded_json": None,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    "spec": None,
    # what is computed with the weights: transformer_config.py
    "squared_relu": False,
    "quick_geglu": False,
    "openai_gelu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "attention_output_gate": False,
    "qk_l2_norm": False,
    "softmax_type": "vanilla",
    "apply_residual_connection_post_layernorm": False,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
    "moe_shared_expert_gate": False,
    "moe_single_grouped_weight": False,
    "use_mup": False,
}

# Only meaningful where another argument has a value: (argument) -> (other, its value)
ONLY_WITH: dict[str, tuple[str, Any]] = {
    "num_query_groups": ("group_query_attention", True),
    "kv_channels": ("multi_latent_attention", False),
    "rope_scaling_factor": ("use_rope_scaling", True),
    "rope_type": ("multi_latent_attention", True),
    "original_max_position_embeddings": ("rope_type", "yarn"),
    "beta_fast": ("rope_type", "yarn"),
    "beta_slow": ("rope_type", "yarn"),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim"), ("multi_latent_attention", True)),
    **dict.fromkeys(("qk_pos_emb_head_dim", "v_head_dim"), ("multi_latent_attention", True)),
    **dict.fromkeys(
        ("yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
        ("position_embedding_type", "yarn"),
    ),
}


@dataclass(frozen=True, slots=True)
class ArgumentCheck:
    """``problems``: one sentence each. ``unchecked``: arguments that the checkpoint does not carry."""

    problems: list[str]
    unchecked: list[str]

    def require(self, where: str) -> None:
        """Raise ConfigError with every problem unless there is none."""
        if self.problems:
            raise ConfigError(
                "the checkpoint's Megatron arguments contradict the reference:\n    " + "\n    ".join(self.problems),
                where=where,
                next_step="give the --reference whose config.json describes this model; weights stored in another "
                "arrangement cannot be converted by this mapping",
            )


def check_arguments(
    checkpoint: Mapping[str, Any] | None, rules: Mapping[str, Any], scope: Scope, *, where: str
) -> list[str]:
    """Check the ``args`` of the checkpoint ``where``; notes on what could not be checked.

    ``rules`` and ``scope`` as for ``megatron_arguments``, of the reference. Raises ConfigError naming every argument
    that contradicts it, and what ``megatron_arguments`` raises.
    """
    expected = megatron_arguments(rules, scope)
    if checkpoint is None:
        return [
            "the checkpoint carries no Megatron arguments: only names and shapes were checked against the reference"
        ]
    check = compare_arguments(checkpoint, expected)
    check.require(where)
    if not check.unchecked:
        return []
    return [f"Megatron arguments that the checkpoint does not carry, so unchecked: {', '.join(check.unchecked)}"]


def compare_arguments(checkpoint: Mapping[str, Any], expected: Mapping[str, Any]) -> ArgumentCheck:
    """Compare the checkpoint's ``args`` with ``megatron_arguments`` of the reference's config.

    ``checkpoint`` may hold anything that training put there, unreadable placeholders included; only the arguments
    above are looked at. ``expected`` as ``megatron_arguments`` gives it, with ``mtp_num_layers`` of the reference.
    """
    problems: list[str] = []
    unchecked: list[str] = []
    for names in DECIDED:
        if not _matters(names[0], expected):
            continue
        present = [name for name in names if name in checkpoint]
        if not present:
            unchecked.append(names[0])
        for name in present:
            _compare(name, checkpoint[name], expected.get(names[0]), problems)
    for name, stands_for in MEANING.items():
        if name in checkpoint:
            _compare(name, checkpoint[name], expected.get(name, stands_for), problems)
        else:
            unchecked.append(name)
    _vocabulary(checkpoint, expected, problems)
    return ArgumentCheck(problems, unchecked)


def _matters(name: str, expected: Mapping[str, Any]) -> bool:
    if name in ONLY_WITH:
        other, value = ONLY_WITH[name]
        return bool(expected.get(other, False) == value)
    if name.startswith(("rotary_scaling_factor", "mscale")):
        return expected.get("rope_type") == "yarn" or expected.get("position_embedding_type") == "yarn"
    if name.startswith("moe_"):
        return expected.get("num_experts") is not None
    return True


def _compare(name: str, found: Any, wanted: Any, problems: list[str]) -> None:
    if not _is_plain(found):
        problems.append(f"{name} is {found!r}, which cannot be read; the reference stands for {wanted!r}")
    elif _normal(name, found) != _normal(name, wanted):
        problems.append(f"{name} is {found!r}; the reference stands for {wanted!r}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(type(item) in (int, bool) for item in value)
    return value is None or type(value) in (str, int, float, bool)


def _normal(name: str, value: Any) -> Any:
    """One spelling per meaning: absent switches are off, no MTP layers are zero, sequences are lists.

    ``moe_layer_freq`` 1 and a list of ones mean the same layers.
    """
    if isinstance(value, list | tuple):
        listed = [int(item) for item in value]
        return 1 if name == "moe_layer_freq" and all(item == 1 for item in listed) else listed
    if name == "mtp_num_layers":
        return value or 0
    return False if value is None else value


def _vocabulary(checkpoint: Mapping[str, Any], expected: Mapping[str, Any], problems: list[str]) -> None:
    rows, needed = checkpoint.get("padded_vocab_size"), expected.get("vocab_size")
    if type(rows) is int and type(needed) is int and rows < needed:
        problems.append(f"padded_vocab_size is {rows}; the reference's vocabulary has {needed} tokens")
