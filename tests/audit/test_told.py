"""Megatron arguments as a Hugging Face checkpoint's roles tell them, by family; checkpoints without arguments."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpconvert.audit.api import audit
from mtpconvert.audit.describe import describe
from mtpconvert.audit.facts import facts_of
from mtpconvert.audit.readers.opening import open_side
from mtpconvert.audit.roles.algebra import Placement, Role
from mtpconvert.audit.told import facts_from_roles
from mtpconvert.convert.result import Callbacks
from mtpconvert.convert.to_mcore import ToMcore, hf2mcore
from mtpconvert.tensors import whole
from tests.support.family_tables import CASES, write_case
from tests.support.scratch import memory, scratch

__all__ = ["memory"]

GQA = {"num_attention_heads": 6, "num_query_groups": 2, "kv_channels": 10, "group_query_attention": True}
MOE = {"num_experts": 4, "moe_router_topk": 2}
# From each case's config.json (mappings/configs) by what megatron/training/arguments.py calls these things.
EXPECTED: dict[str, dict[str, Any]] = {
    "Qwen3-MoE, every second layer": GQA | MOE | {
        "moe_layer_freq": [0, 1, 0], "moe_ffn_hidden_size": 20, "ffn_hidden_size": 52, "qk_layernorm": True,
        "untie_embeddings_and_output_weights": True, "moe_shared_expert_intermediate_size": None,
        "mtp_num_layers": None, "apply_layernorm_1p": None, "add_qkv_bias": None, "multi_latent_attention": False,
    },
    "Qwen2-MoE": GQA | MOE | {
        "kv_channels": 6, "moe_layer_freq": [1, 0, 1], "moe_shared_expert_intermediate_size": 28,
        "moe_shared_expert_gate": True, "add_qkv_bias": True, "add_bias_linear": None, "qk_layernorm": None,
    },
    "GLM-5.2": MOE | {
        "multi_latent_attention": True, "num_attention_heads": 4, "q_lora_rank": 28, "kv_lora_rank": 18,
        "v_head_dim": 14, "qk_head_dim": 10, "qk_pos_emb_head_dim": 6, "kv_channels": None,
        "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
        "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 4, "dsa_indexer_head_dim": 10,
        "dsa_indexer_rope_interleaved": True, "dsa_indexer_topk_freq": 3, "dsa_indexer_skip_topk_offset": 2,
        "moe_router_enable_expert_bias": True, "mtp_num_layers": 1,
    },
    "DeepSeek-V3.2": {
        "experimental_attention_variant": "dsa", "dsa_indexer_rope_interleaved": False, "dsa_indexer_topk_freq": 1,
        "qk_layernorm": True, "num_query_groups": None,
    },
    "Qwen3-Next, no count": GQA | MOE | {
        "apply_layernorm_1p": True, "attention_output_gate": True, "mtp_num_layers": 1, "moe_layer_freq": [1, 0, 1, 1],
        "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": [1, 1, 1, 0],
        "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_num_value_heads": 4, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    },
    "Qwen3.5 with vision": GQA | {
        "num_layers": 4, "hidden_size": 36, "vocab_size": 98, "ffn_hidden_size": 52, "norm_epsilon": 1e-6,
        "num_experts": None, "linear_attention_freq": [1, 1, 1, 0], "mtp_num_layers": 1, "apply_layernorm_1p": True,
    },
    "gpt-oss": GQA | MOE | {
        "softmax_type": "learnable", "add_qkv_bias": True, "add_bias_linear": True, "moe_ffn_hidden_size": 20,
        "moe_layer_freq": [1, 1, 1], "ffn_hidden_size": None, "attention_output_gate": False,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folders() -> Iterator[dict[str, Path]]:
    """Of each case its source "hf" and its conversion "mc"."""
    with scratch() as root:
        made = {name: root / str(number) for number, name in enumerate(EXPECTED)}
        for name, folder in made.items():
            version = "0.19" if "0.16" in CASES[name].unsupported else "0.16"
            hf2mcore(
                write_case(name, folder / "hf"), folder / "mc", ToMcore(mcore_version=version), Callbacks(gate=None)
            )
        yield made


@pytest.mark.parametrize("name", EXPECTED)
def test_every_family_says_it_alike(name: str, folders: dict[str, Path]) -> None:
    left, right = (open_side(folders[name] / part, label) for part, label in (("hf", "left"), ("mc", "right")))
    facts = describe(left, right).facts
    assert {argument: facts.get(argument) for argument in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_checkpoint_without_arguments_is_read_all_the_same(name: str, folders: dict[str, Path], memory: Path) -> None:
    hf, mc = folders[name] / "hf", memory / "mc"
    shutil.copytree(folders[name] / "mc", mc)
    (mc / "release" / "common.pt").unlink()
    for left, right in ((hf, mc), (mc, hf)):
        report = audit(left, right)
        assert report.failing("warning") == []
        assert report.tensors > 0
    assert audit(hf, mc).nbytes == audit(hf, folders[name] / "mc").nbytes


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("Qwen3-MoE, every second layer", "moe_layer_freq", 1),
        ("Qwen3-MoE, every second layer", "moe_layer_freq", [0, 1, 1]),
        ("Qwen2-MoE", "moe_shared_expert_intermediate_size", 14),
        ("Qwen3-Next, no count", "linear_attention_freq", 2),
        ("Qwen3-Next, no count", "experimental_attention_variant", None),
        ("Qwen3-Next, no count", "attention_output_gate", False),
        ("Qwen3.5 with vision", "linear_num_key_heads", 4),
        ("gpt-oss", "softmax_type", "vanilla"),
    ],
)
def test_an_argument_that_says_otherwise_is_named(
    name: str, argument: str, value: Any, folders: dict[str, Path], memory: Path
) -> None:
    hf, mc = folders[name] / "hf", memory / "mc"
    shutil.copytree(folders[name] / "mc", mc)
    common = torch.load(mc / "release" / "common.pt", weights_only=False)
    assert getattr(common["args"], argument) != value
    setattr(common["args"], argument, value)
    torch.save(common, mc / "release" / "common.pt")
    named = [f for f in audit(hf, mc, level="headers").findings if f.code == "argument-mismatch"]
    assert argument in {finding.detail["key"] for finding in named}


def test_every_fourth_layer_and_a_list_are_one_thing(folders: dict[str, Path], memory: Path) -> None:
    """``linear_attention_freq`` 4: all but every fourth (experimental_attention_variant_module_specs.py)."""
    name = "Qwen3-Next, no count"
    mc = memory / "mc"
    shutil.copytree(folders[name] / "mc", mc)
    common = torch.load(mc / "release" / "common.pt", weights_only=False)
    common["args"].linear_attention_freq = 4
    torch.save(common, mc / "release" / "common.pt")
    assert audit(folders[name] / "hf", mc, level="headers").failing("warning") == []


def test_zero_centred_on_one_side_of_two_checkpoints_is_named(folders: dict[str, Path], memory: Path) -> None:
    name = "Qwen3-Next, no count"
    left, right = folders[name] / "mc", memory / "mc"
    shutil.copytree(left, right)
    common = torch.load(right / "release" / "common.pt", weights_only=False)
    common["args"].apply_layernorm_1p = common["args"].layernorm_zero_centered_gamma = False
    torch.save(common, right / "release" / "common.pt")
    (found,) = audit(left, right).failing("warning")
    assert (found.code, found.detail["key"]) == ("argument-mismatch", "apply_layernorm_1p")


def of(place: str, name: str, *shape: int) -> Placement:
    block = whole(f"{place}.{name}", shape)
    return Placement(Role(place, name, shape), block.box, block)


def test_sizes_that_layers_differ_in_are_left_out() -> None:
    facts = facts_from_roles([of("trunk.0", "mlp.gate", 8, 4), of("trunk.1", "mlp.gate", 6, 4)])
    assert "ffn_hidden_size" not in facts
    assert facts["num_layers"] == 2


def test_an_mtp_layer_says_what_the_trunk_has_none_of() -> None:
    layers = [of("trunk.0", "router", 4, 8), of("mtp.0", "mlp.gate", 6, 8), of("mtp.0", "router", 5, 8)]
    facts = facts_from_roles(layers)
    assert (facts["ffn_hidden_size"], facts["num_experts"]) == (6, 4)


def test_indexers_in_an_order_that_no_argument_gives() -> None:
    """Layers 2 and 3 alone: the first layer always has one of its own (dsa.py: is_dsa_skip_topk_layer)."""
    layers = [of("trunk.0", "mlp.gate", 8, 4), *(of(f"trunk.{n}", "dsa.k.rope", 4, 8) for n in (1, 2))]
    assert "dsa_indexer_topk_freq" not in facts_from_roles(layers)


def test_what_no_tensor_tells_is_the_config_s() -> None:
    facts = facts_of({"rms_norm_eps": 1e-5, "num_experts_per_tok": 3, "hidden_size": 999}, [])
    assert (facts["norm_epsilon"], facts["moe_router_topk"], facts.get("hidden_size")) == (1e-5, 3, None)
