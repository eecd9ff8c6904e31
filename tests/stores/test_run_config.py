"""run_config.yaml as the converter reads it: Megatron-Bridge's own files, and files that come from anywhere."""

from pathlib import Path
from typing import Any

import pytest

from mtpconvert.errors import CheckpointError
from mtpconvert.stores.torch_dist.bridge_arguments import bridge_arguments
from mtpconvert.stores.torch_dist.run_config import is_bridge, read_model
from tests.support.run_configs import BOMB, BROKEN, ITSELF, NAME, write

# By hand from tests/support/tiny_families.py, under the names of megatron/training/arguments.py
QWEN3 = {
    "num_layers": 3, "hidden_size": 36, "ffn_hidden_size": 52, "num_attention_heads": 6, "num_query_groups": 2,
    "group_query_attention": True, "kv_channels": 10, "normalization": "RMSNorm", "norm_epsilon": 1e-6, "swiglu": True,
    "quick_geglu": False, "squared_relu": False, "openai_gelu": False, "qk_layernorm": True, "add_bias_linear": False,
    "add_qkv_bias": False, "untie_embeddings_and_output_weights": True, "position_embedding_type": "rope",
    "rotary_base": 10000.0, "rotary_percent": 1.0, "rotary_interleaved": False, "use_rope_scaling": False,
    "rotary_seq_len_interpolation_factor": None, "multi_latent_attention": False, "num_experts": None,
    "mtp_num_layers": None, "apply_layernorm_1p": False, "window_size": None, "hybrid_layer_pattern": None,
    "spec": None, "vocab_size": 98, "padded_vocab_size": 98, "max_position_embeddings": 4096,
}  # fmt: skip
DEEPSEEK = {
    "num_layers": 3, "multi_latent_attention": True, "q_lora_rank": 28, "kv_lora_rank": 18, "qk_head_dim": 10,
    "qk_pos_emb_head_dim": 6, "v_head_dim": 14, "rope_type": "rope", "rotary_scaling_factor": 1.0, "num_experts": 4,
    "moe_layer_freq": [0, 1, 1], "moe_ffn_hidden_size": 12, "moe_shared_expert_intermediate_size": 12,
    "moe_router_topk": 2, "moe_router_num_groups": 2, "moe_router_group_topk": 1, "mtp_num_layers": 1,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "swiglu": True,
    "moe_router_topk_scaling_factor": 2.5, "moe_mlp_glu_interleave_size": None, "spec": None,
}  # fmt: skip
LLAMA = {  # a model config: fields of the transformer one level below, the activation function by its name
    "num_layers": 3, "hidden_size": 48, "ffn_hidden_size": 68, "num_attention_heads": 8, "num_query_groups": 4,
    "swiglu": True, "rotary_base": 10000.0, "untie_embeddings_and_output_weights": True, "normalization": "RMSNorm",
    "position_embedding_type": "rope", "hybrid_override_pattern": None, "padded_vocab_size": 98, "spec": None,
}  # fmt: skip


def arguments(folder: Path) -> dict[str, Any]:
    model = read_model(folder)
    assert model is not None
    return bridge_arguments(model).values


@pytest.mark.parametrize(("family", "wanted"), [("qwen3", QWEN3), ("deepseek_v3", DEEPSEEK), ("llama", LLAMA)])
def test_fields_become_arguments(family: str, wanted: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, family)
    found = arguments(tmp_path)
    assert {name: found.get(name, "not there") for name in wanted} == wanted
    assert "layernorm_zero_centered_gamma" not in found and "num_moe_experts" not in found


@pytest.mark.parametrize(
    ("family", "fields", "wanted"),
    [
        ("qwen3", {"gated_linear_unit": "false"}, {"swiglu": False, "squared_relu": False}),
        ("qwen3", {"activation_func": "{_target_: megatron.core.activations.squared_relu}"}, {"swiglu": False}),
        ("qwen3", {"activation_func": "{_target_: torch._C._nn.gelu}"}, {"swiglu": False, "openai_gelu": False}),
        (
            "qwen3",
            {"activation_func": "{_target_: torch._C._nn.gelu, _partial_: true, approximate: tanh}"},
            {"openai_gelu": True},
        ),
        ("llama", {"activation_func": "quick_gelu"}, {"quick_geglu": True, "swiglu": False}),
        ("llama", {"activation_func": "sigmoid"}, {"swiglu": "not there"}),
        ("qwen3", {"layernorm_zero_centered_gamma": "true"}, {"apply_layernorm_1p": True}),
        ("qwen3", {"rotary_base": "[10000, 1000000]"}, {"rotary_base": "not there", "use_rope_scaling": "not there"}),
        ("qwen3", {"_target_": "x.Gemma2ModelProvider", "window_size": "[4095, 0]"}, {"window_size": "not there"}),
        ("qwen3", {"window_size": "!!python/tuple [127, 0]"}, {"window_size": [127, 0]}),
        ("qwen3", {"window_size": "!!python/object/apply:os.getcwd []"}, {"window_size": []}),
        ("qwen3", {"window_size": "!!python/name:os.getcwd ''"}, {"window_size": None}),
        ("qwen3", {"transformer_layer_spec": "{_target_: x.exaone4_layer_spec}"}, {"spec": "not there"}),
        ("qwen3", {"should_pad_vocab": "true", "tensor_model_parallel_size": "3"}, {"padded_vocab_size": 102}),
        (
            "qwen3",
            {"num_query_groups": "null"},
            {"num_query_groups": "not there", "group_query_attention": "not there"},
        ),
        # stored as gate and up all the same; but that is not for a file to say
        ("deepseek_v3", {"moe_mlp_glu_interleave_size": "32"}, {"moe_mlp_glu_interleave_size": "not there"}),
        ("deepseek_v3", {"moe_router_num_groups": "4", "moe_router_group_topk": "4"}, {"moe_router_num_groups": None}),
        ("deepseek_v3", {"rotary_scaling_factor": "40.0"}, {"rope_type": "yarn", "rotary_scaling_factor": 40.0}),
        (
            "qwen3",
            {"position_embedding_type": "yarn", "yarn_rotary_scaling_factor": "4.0", "rotary_scaling_factor": "7.0"},
            {"rotary_scaling_factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.0, "yarn_beta_fast": "not there"},
        ),
    ],
)
def test_what_other_values_stand_for(
    family: str, fields: dict[str, str], wanted: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, family, **fields)
    found = arguments(tmp_path)
    assert {name: found.get(name, "not there") for name in wanted} == wanted


def test_a_model_config_leaves_functions_out() -> None:
    """megatron/training/models/base.py:ModelConfig.as_dict; a layer spec that is not said may be any."""
    assert "spec" not in bridge_arguments({"_target_": "x.BridgeGPTModelConfig", "num_layers": 3}).values


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_no_run_config_is_refused(broken: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(BROKEN[broken])
    with pytest.raises(CheckpointError) as error:
        read_model(tmp_path)
    assert error.value.exit_code == 6 and str(tmp_path / NAME) in str(error.value) and error.value.next_step


@pytest.mark.parametrize(
    ("text", "why"),
    [(BOMB, "aliases"), (ITSELF, "aliases"), ("model: {a: !!int x}", "type"), ("a: 2020-99-99", "type")],
)
def test_what_would_grow_or_has_another_type_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(CheckpointError, match=why):
        read_model(tmp_path)


def test_a_file_without_a_model_says_nothing(tmp_path: Path) -> None:
    assert read_model(tmp_path) is None and not is_bridge(tmp_path)
    tagged = "model: !!python/object:os.path {num_layers: 3}\n"
    for text in ("", "train: {train_iters: 2}\n", "model: 3\n", "- 1\n", "# nothing\n", tagged):
        (tmp_path / NAME).write_text(text)
        assert read_model(tmp_path) is None and is_bridge(tmp_path)


def test_aliases_and_merge_keys_are_read(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("a: &a {num_layers: 3, hidden_size: 8}\nmodel: {<<: *a, hidden_size: 16}\n")
    assert read_model(tmp_path) == {"num_layers": 3, "hidden_size": 16}
