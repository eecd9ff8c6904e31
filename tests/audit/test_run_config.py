"""run_config.yaml as the auditor reads it, by code of its own."""

from pathlib import Path
from typing import Any

import pytest

from mtpconvert.audit.readers.run_config import bridge_arguments, called
from mtpconvert.errors import CheckpointError
from tests.support.run_configs import BOMB, BROKEN, ITSELF, NAME, write

# By hand from tests/support/tiny_families.py, under the names of megatron/training/arguments.py
WANTED: dict[str, dict[str, Any]] = {
    "qwen3": {
        "num_layers": 3, "hidden_size": 36, "ffn_hidden_size": 52, "num_attention_heads": 6, "num_query_groups": 2,
        "group_query_attention": True, "kv_channels": 10, "norm_epsilon": 1e-6, "swiglu": True, "num_experts": None,
        "untie_embeddings_and_output_weights": True, "rotary_base": 10000.0, "use_rope_scaling": False,
        "apply_layernorm_1p": False, "vocab_size": 98, "padded_vocab_size": 98, "mtp_num_layers": None,
    },
    "deepseek_v3": {
        "num_layers": 3, "q_lora_rank": 28, "kv_lora_rank": 18, "qk_head_dim": 10, "qk_pos_emb_head_dim": 6,
        "v_head_dim": 14, "num_experts": 4, "moe_layer_freq": [0, 1, 1], "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": 12, "moe_router_topk": 2, "mtp_num_layers": 1, "swiglu": True,
        "rotary_scaling_factor": 1.0, "moe_router_topk_scaling_factor": 2.5, "mscale_all_dim": 1.0,
    },
    "llama": {
        "num_layers": 3, "hidden_size": 48, "num_query_groups": 4, "swiglu": True, "rotary_percent": 1.0,
        "untie_embeddings_and_output_weights": True, "norm_epsilon": 1e-6,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", WANTED)
def test_fields_become_arguments(family: str, tmp_path: Path) -> None:
    write(tmp_path, family)
    found = bridge_arguments(tmp_path) or {}
    assert {name: found.get(name, "not there") for name in WANTED[family]} == WANTED[family]


@pytest.mark.parametrize(
    ("family", "fields", "wanted"),
    [
        ("qwen3", {"gated_linear_unit": "false"}, {"swiglu": False}),
        ("qwen3", {"num_query_groups": "6"}, {"group_query_attention": False}),
        ("qwen3", {"rotary_base": "[10000, 1000000]"}, {"rotary_base": None, "position_embedding_type": None}),
        ("qwen3", {"window_size": "!!python/tuple [127, 0]"}, {"window_size": [127, 0]}),
        ("qwen3", {"window_size": "!!python/name:os.getcwd ''"}, {"window_size": None}),
        ("qwen3", {"should_pad_vocab": "true", "tensor_model_parallel_size": "3"}, {"padded_vocab_size": 102}),
        ("qwen3", {"position_embedding_type": "yarn", "yarn_mscale": "0.7"}, {"mscale": 0.7, "rope_type": None}),
        (
            "deepseek_v3",
            {"moe_shared_expert_glu_interleave_size": "32"},
            {"moe_shared_expert_glu_interleave_size": None},
        ),
        ("deepseek_v3", {"yarn_mscale": "0.7"}, {"mscale": 1.0}),
        ("deepseek_v3", {"moe_router_topk": "&n 8", "num_moe_experts": "*n"}, {"num_experts": 8}),
    ],
)
def test_what_other_values_stand_for(
    family: str, fields: dict[str, str], wanted: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, family, **fields)
    found = bridge_arguments(tmp_path) or {}
    assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_no_run_config_is_refused(broken: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(BROKEN[broken])
    with pytest.raises(CheckpointError) as error:
        bridge_arguments(tmp_path)
    assert NAME in str(error.value) and str(tmp_path) in str(error.value) and error.value.next_step


def test_aliases_cost_nothing_and_a_node_is_not_inside_itself(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(BOMB + "model: {num_layers: 3, moe_layer_freq: *a9}\n")
    assert bridge_arguments(tmp_path) == {"num_layers": 3}
    (tmp_path / NAME).write_text(ITSELF)
    with pytest.raises(CheckpointError, match=r"\*model"):
        bridge_arguments(tmp_path)


def test_a_file_without_a_model_says_nothing(tmp_path: Path) -> None:
    assert bridge_arguments(tmp_path) is None
    tagged = "model: !!python/object:os.path {num_layers: 3}\n"
    for text in ("", "train: {train_iters: 2}\n", "model: 3\n", "- 1\n", tagged):
        (tmp_path / NAME).write_text(text)
        assert bridge_arguments(tmp_path) is None


def test_what_people_read() -> None:
    assert called("num_experts") == "num_experts (run_config.yaml: num_moe_experts)"
    assert called("kv_channels") == "kv_channels (run_config.yaml)"
