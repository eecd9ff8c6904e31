"""A checkpoint's Megatron arguments against the reference's config, and the flags to launch Megatron with."""

from typing import Any

import pytest

from mtpconvert.convert.argument_check import ArgumentCheck, compare_arguments
from mtpconvert.convert.argument_names import DECIDED, MEANING
from mtpconvert.convert.arguments import Facts, check_arguments, launch_flags, megatron_arguments, without_flag
from mtpconvert.errors import ConfigError
from mtpconvert.mapping.catalogue import mapping_for
from mtpconvert.mapping.dims import Scope
from tests.support.argument_configs import LLAMA3, V3_ROPE, arguments
from tests.support.tiny_families import CONFIGS


def problems(found: dict[str, Any], family: str = "deepseek_v3", **options: Any) -> list[str]:
    expected = arguments(family, mtp_layers=1 if family == "deepseek_v3" else 0)
    return compare_arguments(expected | found, expected).problems


def test_equal_arguments_have_no_problems_and_nothing_unchecked() -> None:
    for family in CONFIGS:
        expected = arguments(family)
        assert compare_arguments(expected, expected) == ArgumentCheck([], [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 4), ("num_attention_heads", 8), ("hidden_size", 40), ("ffn_hidden_size", 48),
        ("norm_epsilon", 1e-5), ("layernorm_epsilon", 1e-5), ("rotary_base", 500000), ("qk_layernorm", False),
        ("mtp_num_layers", 2), ("mtp_num_layers", None), ("moe_layer_freq", [1, 1, 1]),
        ("moe_router_topk_scaling_factor", 1.0),
        ("moe_router_score_function", "softmax"), ("q_lora_rank", None), ("multi_latent_attention", False),
        ("untie_embeddings_and_output_weights", False), ("window_size", (127, 0)), ("padded_vocab_size", 64),
    ],
)  # fmt: skip
def test_a_contradiction_is_named_with_both_values(name: str, value: Any) -> None:
    (problem,) = problems({name: value})
    assert name in problem and repr(value) in problem


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_mlp_glu_interleave_size", 32), ("moe_shared_expert_glu_interleave_size", 32),
        ("rotary_interleaved", True), ("layernorm_zero_centered_gamma", True), ("apply_layernorm_1p", True),
        ("mtp_use_repeated_layer", True),
        ("hybrid_layer_pattern", "M*M*"), ("attention_output_gate", True), ("softmax_type", "learnable"),
        ("glu_linear_offset", 1.0), ("no_rope_freq", [0, 1, 0]), ("use_mup", True), ("moe_single_grouped_weight", True),
    ],
)  # fmt: skip
def test_what_changes_the_meaning_of_numbers_is_refused(name: str, value: Any) -> None:
    (problem,) = problems({name: value})
    assert name in problem and repr(value) in problem


def test_a_value_that_cannot_be_read_is_refused_where_it_matters_alone() -> None:
    class Placeholder:
        def __repr__(self) -> str:
            return "<some.package.Enum, not imported>"

    assert "cannot be read" in problems({"rotary_interleaved": Placeholder()})[0]
    assert "cannot be read" in problems({"num_layers": Placeholder()})[0]
    assert problems({"attention_backend": Placeholder(), "params_dtype": Placeholder()}) == []


def test_other_spellings_of_the_same() -> None:
    """What Megatron's parser leaves for "off", lists for tuples, 1 for a list of ones."""
    same = {"rotary_interleaved": None, "rotary_base": 10000.0, "mtp_use_repeated_layer": None, "num_query_groups": 1}
    assert problems(same | {"rope_scaling_factor": 8.0, "kv_channels": 9}) == []
    expected = arguments("mistral", sliding_window=4096)
    assert compare_arguments(expected | {"window_size": [4095, 0]}, expected).problems == []
    all_moe = arguments("deepseek_v3", first_k_dense_replace=0)
    assert compare_arguments(all_moe | {"moe_layer_freq": 1}, all_moe).problems == []
    assert compare_arguments(all_moe | {"ffn_hidden_size": 8}, all_moe).problems == []  # of no layer
    assert problems({"moe_router_pre_softmax": True}) == []  # sigmoid scores
    layers = {"num_layers": 4}  # transformer_config.py:__post_init__; transformer/utils.py:is_layer_window_attention
    for name, every, each in (("no_rope_freq", 2, [0, 1, 0, 1]), ("window_attn_skip_freq", 2, (1, 0, 1, 0))):
        assert compare_arguments(layers | {name: each}, layers | {name: every}).problems == []
        assert compare_arguments(layers | {name: 4}, layers | {name: each}).problems != []
    assert problems({"mtp_num_layers": 0}, "qwen3") == []


def test_what_the_run_decides_is_not_looked_at() -> None:
    run = {"seq_length": 1, "attention_dropout": 0.5, "tensor_model_parallel_size": 8, "max_position_embeddings": 1}
    assert problems(run) == []


def test_absent_arguments_are_listed() -> None:
    """A save of 0.19.2 has its own name for the epsilon; an older one knows no interleaving."""
    expected = arguments("qwen3")
    older = {
        key: value for key, value in expected.items() if key not in ("norm_epsilon", "moe_mlp_glu_interleave_size")
    }
    assert compare_arguments(older, expected) == ArgumentCheck([], ["moe_mlp_glu_interleave_size"])
    nothing = compare_arguments({}, expected)
    assert nothing.problems == [] and {"num_layers", "norm_epsilon", "rotary_interleaved"} <= set(nothing.unchecked)
    assert not {"moe_router_topk", "q_lora_rank", "layernorm_epsilon"} & set(nothing.unchecked)


def test_check_raises_with_every_problem_and_notes_the_rest() -> None:
    mapping = mapping_for(CONFIGS["qwen3"])
    scope = Scope(CONFIGS["qwen3"], mapping.defaults)
    found = megatron_arguments(mapping.arguments, scope)
    assert check_arguments(found, mapping.arguments, scope, where="here") == []
    (note,) = check_arguments(None, mapping.arguments, scope, where="here")
    assert "carries no Megatron arguments" in note
    with pytest.raises(ConfigError) as caught:
        check_arguments(found | {"num_layers": 9, "rotary_interleaved": True}, mapping.arguments, scope, where="here")
    assert caught.value.where == "here" and caught.value.exit_code == 5
    assert "num_layers is 9" in str(caught.value) and "rotary_interleaved is True" in str(caught.value)


def test_meaning_and_decided_name_nothing_twice() -> None:
    names = [name for group in DECIDED for name in group]
    assert len(names) == len(set(names)) and not set(names) & set(MEANING)


def test_flags_of_qwen3() -> None:
    found = arguments("qwen3", Facts(vocab_size=98, padded_vocab_size=128))
    assert launch_flags(found) == [
        "--use-checkpoint-args", "--norm-epsilon", "1e-06", "--qk-layernorm", "--make-vocab-size-divisible-by", "128",
        "--transformer-impl", "transformer_engine",
    ]  # fmt: skip


def test_flags_spell_lists_and_tuples_as_megatron_parses_them() -> None:
    found = arguments("deepseek_v3", Facts(vocab_size=98, padded_vocab_size=128, moe_layer_freq=[0, 1, 1]))
    words = launch_flags(found, complete=True)
    assert words[words.index("--moe-layer-freq") + 1] == "[0]*1+[1]*2"
    assert "--use-checkpoint-args" not in words and "--disable-bias-linear" in words
    words = launch_flags(arguments("mistral", sliding_window=4096))
    assert words[words.index("--window-size") + 1] == "4095,0"


def test_yarn_of_ordinary_attention_has_no_flags_in_0_16() -> None:
    """core_v0.16.1 megatron/training/arguments.py: _add_network_size_args takes no "yarn", no flag begins with --yarn;
    megatron/core/models/gpt/gpt_model.py:GPTModel reads seven fields that TransformerConfig does not declare."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    found = arguments("llama", rope_parameters=rope, max_position_embeddings=40960)
    (sentence,) = without_flag(found, "0.16")
    assert "yarn_rotary_scaling_factor = 4.0, yarn_original_max_position_embeddings = 40960" in sentence
    assert sentence.count(" = ") == 7
    assert without_flag(found) == []
    for complete in (False, True):
        here = launch_flags(found, version="0.16", complete=complete)
        assert not [word for word in here if "yarn" in word or word.startswith("--position")]
        assert "--yarn-beta-fast" in launch_flags(found, complete=complete)
    latent = arguments("deepseek_v3", rope_parameters=..., rope_theta=1e4, rope_scaling=V3_ROPE)
    assert launch_flags(latent, version="0.16") == launch_flags(latent)


def test_values_without_a_flag_are_said() -> None:
    kimi = V3_ROPE | {"beta_fast": 1.0, "factor": 32.0}
    (sentence,) = without_flag(arguments("deepseek_v3", rope_parameters=..., rope_theta=5e4, rope_scaling=kimi))
    assert sentence.startswith("beta_fast is 1.0")
    (sentence,) = without_flag(arguments("llama", rope_parameters=LLAMA3))
    assert sentence.startswith("rope_scaling_factor is 32.0")
    assert without_flag(arguments("deepseek_v3", rope_parameters=..., rope_theta=1e4, rope_scaling=V3_ROPE)) == []


def test_a_mapping_without_arguments() -> None:
    """It says nothing of sizes; what a number means, and the count of MTP layers, is held to all the same."""
    scope = Scope({"vocab_size": 128}, {}, {"mtp_layers": 1})
    found = {**MEANING, "num_layers": 9, "hidden_size": 7, "mtp_num_layers": 1, "padded_vocab_size": 128}
    (note,) = check_arguments(found, {}, scope, where="here")
    assert note.startswith("the mapping has no [arguments]: ")
    for wrong in ({"rotary_interleaved": True}, {"mtp_num_layers": None}, {"padded_vocab_size": 64}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is {next(iter(wrong.values()))}"):
            check_arguments(found | wrong, {}, scope, where="here")
