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
from mtpconvert.audit.computed import contradictions, rotates_adjacent
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
# GLM-4's own, which no example trains
GLM = {
    "model_type": "glm4",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
GLM_ARGS = {"rotary_base": 10000, "rotary_percent": 0.5, "rotary_interleaved": True, "use_rope_scaling": False}
MODELS = {
    "deepseek": (DEEPSEEK_ARGS, DEEPSEEK), "llama": (LLAMA_ARGS, LLAMA), "qwen": (QWEN_ARGS, QWEN), "glm": (GLM_ARGS, GLM),
}  # fmt: skip


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
        ("glm", {"rotary_interleaved": False}, {}, "rotary_interleaved"),
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


@pytest.mark.parametrize(("family", "adjacent"), [("glm4", True), ("llama", False)])
def test_which_dims_rotate_together_is_what_transformers_own_model_does(family: str, adjacent: bool) -> None:
    """Scores are unmoved where the pairs of queries and of keys are turned by one more angle each, and only then."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 20, "head_dim": 8}
    config = AutoConfig.for_model(family, **sizes, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0,
                                  attention_bias=False, rope_parameters={"rope_type": "default", "rope_theta": 100.0,
                                                                         "partial_rotary_factor": 1.0})  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens, weights = torch.arange(1, 9)[None], model.state_dict()

    def moved(pairs: list[tuple[int, int]]) -> bool:
        turn = torch.eye(8)
        for number, (one, two) in enumerate(pairs):
            angle = torch.tensor(0.3 + 0.4 * number)
            turn[one, one] = turn[two, two] = angle.cos()
            turn[two, one], turn[one, two] = angle.sin(), -angle.sin()
        changed = dict(weights)
        for part in "qk":
            name = f"model.layers.0.self_attn.{part}_proj.weight"
            changed[name] = (turn @ weights[name].unflatten(0, (-1, 8))).flatten(0, 1)
        before = model(tokens).logits
        after = torch.func.functional_call(model, changed, (tokens,)).logits
        return not torch.allclose(before, after, atol=1e-5)

    with torch.no_grad():
        assert moved([(2 * i, 2 * i + 1) for i in range(4)]) is not adjacent
        assert moved([(i, i + 4) for i in range(4)]) is adjacent
    assert rotates_adjacent({"model_type": family}) is adjacent
