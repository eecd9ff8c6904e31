"""Megatron-LM's command line for a converted checkpoint.

Megatron's ``--use-checkpoint-args`` restores some arguments (``load_args_from_checkpoint``) and not others: a model
launched without those others loads wrong, or without some of its weights, and says nothing. Flags are spelled as
``megatron/training/arguments.py`` of 0.19.2 defines them; ``tests/mcore_next`` parses them with Megatron's own parser.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtpconvert.convert.argument_names import MEANING

# Restored by --use-checkpoint-args (checkpointing.py:load_args_from_checkpoint, 0.19.2). Argument -> flag; a flag with
# "!" is given when the argument is False, one with "?" when it is True, of two with "|" the first for True and the
# second for False, any other with the value unless that is None.
RESTORED: dict[str, str] = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "group_query_attention": "--group-query-attention?",
    "num_query_groups": "--num-query-groups",
    "kv_channels": "--kv-channels",
    "max_position_embeddings": "--max-position-embeddings",
    "position_embedding_type": "--position-embedding-type",
    "rotary_base": "--rotary-base",
    "rotary_percent": "--rotary-percent",
    "add_bias_linear": "--disable-bias-linear!",
    "add_qkv_bias": "--add-qkv-bias?",
    "swiglu": "--swiglu?",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights?",
    "normalization": "--normalization",
    "attention_dropout": "--attention-dropout",
    "hidden_dropout": "--hidden-dropout",
    "mtp_num_layers": "--mtp-num-layers",
    "num_experts": "--num-experts",
    "moe_layer_freq": "--moe-layer-freq",
    "moe_ffn_hidden_size": "--moe-ffn-hidden-size",
    "moe_router_topk": "--moe-router-topk",
    "moe_router_pre_softmax": "--moe-router-pre-softmax?",
    "moe_grouped_gemm": "--moe-grouped-gemm?",
    "moe_shared_expert_intermediate_size": "--moe-shared-expert-intermediate-size",
    "moe_router_score_function": "--moe-router-score-function",
    "moe_router_enable_expert_bias": "--moe-router-enable-expert-bias?",
    "moe_router_topk_scaling_factor": "--moe-router-topk-scaling-factor",
    "padded_vocab_size": "--padded-vocab-size",
}
NOT_RESTORED: dict[str, str] = {
    "norm_epsilon": "--norm-epsilon",
    "qk_layernorm": "--qk-layernorm?",
    "multi_latent_attention": "--multi-latent-attention?",
    "q_lora_rank": "--q-lora-rank",
    "kv_lora_rank": "--kv-lora-rank",
    "qk_head_dim": "--qk-head-dim",
    "qk_pos_emb_head_dim": "--qk-pos-emb-head-dim",
    "v_head_dim": "--v-head-dim",
    "rope_type": "--rope-type",
    "rotary_scaling_factor": "--rotary-scaling-factor",
    "mscale": "--mscale",
    "mscale_all_dim": "--mscale-all-dim",
    "use_rope_scaling": "--use-rope-scaling?",
    "rope_scaling_factor": "--rope-scaling-factor",
    "rotary_seq_len_interpolation_factor": "--rotary-seq-len-interpolation-factor",
    "yarn_original_max_position_embeddings": "--yarn-original-max-position-embeddings",
    "yarn_beta_fast": "--yarn-beta-fast",
    "yarn_beta_slow": "--yarn-beta-slow",
    "yarn_correction_range_round_to_int": (
        "--yarn-correction-range-round-to-int|--no-yarn-correction-range-round-to-int"
    ),
    "window_size": "--window-size",
    "window_attn_skip_freq": "--window-attn-skip-freq",
    "moe_shared_expert_gate": "--moe-shared-expert-gate?",
    "no_rope_freq": "--no-rope-freq",
    "quick_geglu": "--quick-geglu?",
    "glu_linear_offset": "--glu-linear-offset",
    "activation_func_clamp_value": "--activation-func-clamp-value",
    "softmax_type": "--softmax-type",
    "experimental_attention_variant": "--experimental-attention-variant",
    "apply_layernorm_1p": "--apply-layernorm-1p?",
    "attention_output_gate": "--attention-output-gate?",
    "linear_attention_freq": "--linear-attention-freq",
    "linear_conv_kernel_dim": "--linear-conv-kernel-dim",
    "linear_key_head_dim": "--linear-key-head-dim",
    "linear_value_head_dim": "--linear-value-head-dim",
    "linear_num_key_heads": "--linear-num-key-heads",
    "linear_num_value_heads": "--linear-num-value-heads",
    "dsa_indexer_n_heads": "--dsa-indexer-n-heads",
    "dsa_indexer_head_dim": "--dsa-indexer-head-dim",
    "dsa_indexer_topk": "--dsa-indexer-topk",
    "dsa_indexer_topk_freq": "--dsa-indexer-topk-freq",
    "dsa_indexer_skip_topk_offset": "--dsa-indexer-skip-topk-offset",
    "dsa_indexer_rope_interleaved": "--dsa-indexer-rope-interleaved?",
    "dsa_indexer_k_norm_epsilon": "--dsa-indexer-k-norm-epsilon",
    "moe_router_num_groups": "--moe-router-num-groups",
    "moe_router_group_topk": "--moe-router-group-topk",
    "moe_router_dtype": "--moe-router-dtype",
    "moe_token_dispatcher_type": "--moe-token-dispatcher-type",
    "make_vocab_size_divisible_by": "--make-vocab-size-divisible-by",
    "transformer_impl": "--transformer-impl",
}
_MOE = ("moe_", "num_experts")
# Of ordinary attention with YaRN. 0.16.1's --position-embedding-type takes no "yarn" and the others are no flags of it.
_YARN = {
    "rotary_scaling_factor": "yarn_rotary_scaling_factor",
    "yarn_original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "yarn_beta_fast": "yarn_beta_fast",
    "yarn_beta_slow": "yarn_beta_slow",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
    "yarn_correction_range_round_to_int": "yarn_correction_range_round_to_int",
}


def launch_flags(arguments: Mapping[str, Any], *, version: str = "0.19", complete: bool = False) -> list[str]:
    """The flags to launch Megatron of ``version`` with, one list element per word.

    By default those that ``--use-checkpoint-args``, itself the first, does not restore; ``complete``: all that describe
    the model, for a launch without it.
    """
    unknown = {"position_embedding_type", *_YARN} if _needs_yarn_by_hand(arguments, version) else ()
    words = [] if complete else ["--use-checkpoint-args"]
    for argument, flag in ((RESTORED | NOT_RESTORED) if complete else NOT_RESTORED).items():
        if argument.startswith(_MOE) and arguments.get("num_experts") is None:
            continue
        if argument in unknown:
            continue  # ``without_flag`` says so
        if argument in MEANING and arguments.get(argument, MEANING[argument]) == MEANING[argument]:
            continue  # what Megatron assumes anyway
        words += _words(flag, arguments.get(argument))
    return words


def _words(flag: str, value: Any) -> list[str]:
    if flag.endswith("?"):
        return [flag[:-1]] if value else []
    if flag.endswith("!"):
        return [flag[:-1]] if value is False else []
    if value is None:
        return []
    if "|" in flag:
        return [flag.split("|")[0 if value else 1]]
    return [flag, _spelling(value)]


def _spelling(value: Any) -> str:
    """Tuples as "127,0" (arguments.py:tuple_type), lists as "[0]*3+[1]*58" (moe_freq_type), numbers as Python does."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if not isinstance(value, list):
        return str(value)
    runs: list[tuple[int, int]] = []
    for item in value:
        if runs and runs[-1][0] == item:
            runs[-1] = (item, runs[-1][1] + 1)
        else:
            runs.append((item, 1))
    return "+".join(f"[{item}]*{count}" for item, count in runs)


def _needs_yarn_by_hand(arguments: Mapping[str, Any], version: str) -> bool:
    return version == "0.16" and arguments.get("position_embedding_type") == "yarn"


def without_flag(arguments: Mapping[str, Any], version: str = "0.19") -> list[str]:
    """One sentence for each value that this model needs and no flag of Megatron-LM ``version`` brings into it."""
    sentences = []
    if _needs_yarn_by_hand(arguments, version):
        # megatron/core/models/gpt/gpt_model.py of 0.16.1 reads them with getattr; transformer_config.py declares none
        by_hand = ", ".join(f"{field} = {arguments[name]}" for name, field in _YARN.items())
        sentences.append(
            "position_embedding_type is yarn: Megatron-LM 0.16 has no flags for it and stops; run 0.19, whose flags"
            f" --mcore-version 0.19 gives, or set on TransformerConfig before the model is made: {by_hand}"
        )
    if arguments.get("multi_latent_attention") and arguments.get("rope_type") == "yarn":
        fields = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
        for name, built_in in fields.items():
            if arguments[name] != built_in:
                sentences.append(
                    f"{name} is {arguments[name]}: Megatron-LM has no flag for it and uses {built_in}; "
                    f"set it on MLATransformerConfig"
                )
    factor = arguments.get("rope_scaling_factor")
    if arguments.get("use_rope_scaling") and factor != 8.0:
        sentences.append(
            f"rope_scaling_factor is {factor}: 0.19.2 parses --rope-scaling-factor but builds GPTModel with 8.0; "
            f"pass rope_scaling_factor to GPTModel"
        )
    return sentences
