# ruff: noqa: E501 (tables)
"""What no tensor says: rotary embedding, norms and router of Megatron's arguments against config.json.

Expected values are those of the frameworks' own sources, named in ``audit/computed.py``, and of published configs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpconvert.audit.api import audit
from mtpconvert.audit.computed import contradictions
from tests.support.handmade import megatron_args, megatron_arrays, read_arrays, write_torch_dist
from tests.support.tiny import write_tiny

YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
# DeepSeek-V3's and Llama-3.1's own config.json, and the arguments that Megatron-LM's examples train them with.
DEEPSEEK = {"rope_theta": 10000, "rope_scaling": YARN, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
            "scoring_func": "sigmoid", "norm_topk_prob": True, "topk_method": "noaux_tc"}  # fmt: skip
DEEPSEEK_ARGS = {
    "multi_latent_attention": True, "rope_type": "yarn", "rotary_base": 10000, "rotary_scaling_factor": 40.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "num_experts": 256, "moe_router_topk_scaling_factor": 2.5,
    "moe_router_num_groups": 8, "moe_router_group_topk": 4, "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,
}  # fmt: skip
LLAMA = {"rope_theta": 500000.0, "rope_scaling": LLAMA3}
LLAMA_ARGS = {"rotary_base": 500000, "position_embedding_type": "rope", "use_rope_scaling": True, "rope_scaling_factor": 8.0,
              "rotary_percent": 1.0}  # fmt: skip
QWEN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "norm_topk_prob": True}
QWEN_ARGS = {"rotary_base": 1000000, "position_embedding_type": "rope", "use_rope_scaling": False, "num_experts": 128,
             "moe_router_score_function": "softmax", "moe_router_pre_softmax": False,
             "moe_router_topk_scaling_factor": None, "moe_router_num_groups": None}  # fmt: skip
MODELS = {"deepseek": (DEEPSEEK_ARGS, DEEPSEEK), "llama": (LLAMA_ARGS, LLAMA), "qwen": (QWEN_ARGS, QWEN)}


@pytest.mark.parametrize("model", MODELS)
def test_what_agrees_is_silent(model: str) -> None:
    arguments, config = MODELS[model]
    assert contradictions(arguments, config) == []
    assert contradictions(arguments, {"text_config": config}) == []
    assert contradictions({}, config) == []
    assert contradictions(arguments, {}) == []


@pytest.mark.parametrize(
    ("model", "arguments", "config", "found"),
    [
        ("deepseek", {"rotary_base": 50000}, {}, "rotary_base"),
        ("deepseek", {"rotary_scaling_factor": 1.0}, {}, "rope_type"),
        ("deepseek", {"rope_type": "rope"}, {}, "rope_type"),
        ("deepseek", {"rotary_scaling_factor": 32}, {}, "rotary_scaling_factor"),
        ("deepseek", {"mscale": 0.707}, {}, "mscale"),
        ("deepseek", {"mscale_all_dim": 0.0}, {}, "mscale_all_dim"),
        ("deepseek", {"beta_fast": 16}, {}, "beta_fast"),
        ("deepseek", {"original_max_position_embeddings": 8192}, {}, "original_max_position_embeddings"),
        ("deepseek", {}, {"rope_scaling": None}, "rotary_scaling_factor"),
        ("deepseek", {"moe_router_topk_scaling_factor": None}, {}, "moe_router_topk_scaling_factor"),
        ("deepseek", {"moe_router_num_groups": None}, {}, "moe_router_num_groups"),
        ("deepseek", {"moe_router_group_topk": 8}, {}, "moe_router_group_topk"),
        ("deepseek", {"moe_router_score_function": "softmax", "moe_router_pre_softmax": False}, {}, "moe_router_score_function"),
        ("llama", {"rotary_base": 10000}, {}, "rotary_base"),
        ("llama", {"rotary_percent": 0.5}, {"partial_rotary_factor": 0.25}, "rotary_percent"),
        ("llama", {"use_rope_scaling": False}, {}, "use_rope_scaling"),
        ("llama", {"rope_scaling_factor": 32.0}, {}, "rope_scaling_factor"),
        ("llama", {}, {"rope_scaling": {**LLAMA3, "high_freq_factor": 2.0}}, "rope_scaling_factor"),
        ("llama", {}, {"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling_factor"),
        ("qwen", {"use_rope_scaling": True}, {}, "rope_scaling_factor"),
        ("qwen", {"rotary_seq_len_interpolation_factor": 2}, {}, "rotary_seq_len_interpolation_factor"),
        ("qwen", {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0}, {}, "rotary_scaling_factor"),
        ("qwen", {"moe_router_pre_softmax": True}, {}, "moe_router_pre_softmax"),
        ("qwen", {}, {"norm_topk_prob": False}, "moe_router_pre_softmax"),
        ("qwen", {}, {"routed_scaling_factor": 2.0}, "moe_router_topk_scaling_factor"),
    ],
)  # fmt: skip
def test_what_differs_is_named(model: str, arguments: dict[str, Any], config: dict[str, Any], found: str) -> None:
    before, said = MODELS[model]
    assert [fault.argument for fault in contradictions({**before, **arguments}, {**said, **config})] == [found]


@pytest.mark.parametrize(
    ("model", "arguments", "config"),
    [
        ("qwen", {}, {"n_group": 1, "topk_group": 1}),  # one group is none
        ("deepseek", {"moe_router_num_groups": None, "moe_router_group_topk": None}, {"topk_method": "greedy"}),
        ("deepseek", {"rotary_scaling_factor": None}, {}),  # left to the class
        ("qwen", {}, {"rope_parameters": {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 6.0}}}),
        ("qwen", {}, {"rope_parameters": {"rope_type": "yarn", "factor": 1.0, "rope_theta": 1000000.0}}),
        ("llama", {}, {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}),  # which Megatron does not have
    ],
)  # fmt: skip
def test_what_means_the_same_or_cannot_be_said_is_silent(
    model: str, arguments: dict[str, Any], config: dict[str, Any]
) -> None:
    before, said = MODELS[model]
    assert contradictions({**before, **arguments}, {**said, **config}) == []


def test_an_audit_across_frameworks_reports_them_with_their_key(tmp_path: Path) -> None:
    hf = write_tiny("deepseek_v3", tmp_path / "hf")
    config = json.loads((hf / "config.json").read_text())
    said = {"rotary_base": 777, "norm_epsilon": 0.5, "moe_router_topk_scaling_factor": 77.0, "moe_router_topk": 1}
    arguments = {**megatron_args(config), **said}
    write_torch_dist(tmp_path / "mc", megatron_arrays(read_arrays(hf), config), arguments)
    config |= {"rope_theta": 10000.0, "routed_scaling_factor": 2.5, "num_experts_per_tok": 2}
    (hf / "config.json").write_text(json.dumps(config))
    found = audit(hf, tmp_path / "mc", level="headers").findings
    assert {f.detail["key"] for f in found if f.code == "argument-mismatch"} == set(said)
