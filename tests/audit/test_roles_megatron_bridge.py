"""The Megatron half on modules that only Megatron-Bridge has: inventories of its own classes, and real megatron-core
models with such modules, whose forward pass must be the vocabulary's. What no argument says is read off the names."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.audit.roles.megatron import dialect, placements
from mtpconvert.tensors import Inventory, TensorSpec, inventory_of
from tests.support.mcore_bridge import MODELS, build
from tests.support.mcore_forward import hidden_states
from tests.support.mcore_roles import inventory, randomise, saved_tensors
from tests.support.roles_cover import check_exact_cover
from tests.support.roles_forward import Forward, gather

TOKENS = torch.tensor([3, 17, 28, 5, 11, 0, 9])
RECORDED = Path(__file__).parents[2] / "fixtures" / "inventories"

# Sizes that fixtures/inventories/bridge_models.py gave Bridge's providers, under Megatron-LM's names
_SIZES = {
    "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2,
    "kv_channels": 12, "ffn_hidden_size": 40, "vocab_size": 98, "add_bias_linear": False, "add_qkv_bias": False,
    "qk_layernorm": True, "untie_embeddings_and_output_weights": False, "mtp_num_layers": None,
    "v_head_dim": 128,  # megatron/training/arguments.py of 0.16.1: the default, in every checkpoint's args
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 20, "moe_layer_freq": 1}
_TINY = _SIZES | {"hidden_size": 36, "num_attention_heads": 6, "kv_channels": 10, "ffn_hidden_size": 52}
_ROUTED = _TINY | _EXPERTS | {"untie_embeddings_and_output_weights": True, "moe_router_enable_expert_bias": True}
_NORMED, _OUTPUT = {"attn.input_norm", "mlp.norm"}, {"attn.output_norm", "mlp.output_norm"}
_EACH, _JOINT = {"attn.q_norm", "attn.k_norm"}, {"attn.q_norm.joint", "attn.k_norm.joint"}
BRIDGE: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {  # arguments; norms that each trunk layer has, has not
    "exaone4": (_SIZES, _OUTPUT | _EACH, _NORMED | _JOINT),
    "olmoe": (_SIZES | _EXPERTS | {"num_query_groups": 4}, _NORMED | _JOINT, _OUTPUT | _EACH),
    "gemma2": (_TINY | {"qk_layernorm": False}, _NORMED | _OUTPUT, _EACH | _JOINT),
    "gemma3": (_TINY, _NORMED | _OUTPUT | _EACH, _JOINT),
    "minimax_m2": (_ROUTED, _NORMED | _JOINT, _OUTPUT | _EACH),
    "mimo_v2_flash": (
        _ROUTED | {
            "num_layers": 4, "num_attention_heads": 8, "kv_channels": 12, "v_head_dim": 10, "qk_layernorm": False,
            "moe_layer_freq": [0, 1, 1, 1], "mtp_num_layers": 2,
        },
        _NORMED, _OUTPUT | _EACH | _JOINT,
    ),
}  # fmt: skip


def recorded(name: str) -> Inventory:
    lines = next(RECORDED.glob(f"bridge-{name}.*.txt")).read_text().splitlines()
    entries = (line.split(" ", 2) for line in lines if line.startswith("T "))
    return inventory_of(TensorSpec(key, tuple(json.loads(shape)), "F32") for _, key, shape in entries)


def by_layer(found: list[Placement]) -> dict[str, set[str]]:
    """Names of roles by place."""
    roles: dict[str, set[str]] = {}
    for p in found:
        roles.setdefault(p.role.place, set()).add(p.role.name)
    return roles


def test_each_layer_of_mimo_has_its_own_key_value_heads_and_sinks_or_none() -> None:
    """Layers 1 and 2 slide, as both MTP layers do (modeling_mimo_v2_flash.py: MiMoV2FlashMTPSelfAttention)."""
    facts, _, _ = BRIDGE["mimo_v2_flash"]
    found = placements(facts, recorded("mimo_v2_flash"))
    shapes = {(p.role.place, p.role.name): p.role.shape for p in found}
    places = [*(f"trunk.{layer}" for layer in range(4)), "mtp.0", "mtp.1"]
    assert [shapes[place, "attn.k"][0] for place in places] == [2, 4, 4, 2, 4, 4]
    assert {shapes[place, "attn.v"][1] for place in places} == {10}
    assert [place for place in places if (place, "attn.sink") in shapes] == ["trunk.1", "trunk.2", "mtp.0", "mtp.1"]
    assert {place for place in places if (place, "router") in shapes} == {"trunk.1", "trunk.2", "trunk.3"}


@pytest.mark.parametrize("name", list(BRIDGE))
def test_what_bridges_own_classes_save_is_covered_exactly(name: str) -> None:
    facts, there, absent = BRIDGE[name]
    held = recorded(name)
    found = placements(facts, held)
    check_exact_cover(found, held)
    assert dialect(facts, held) == "bridge"
    for layer in range(facts["num_layers"]):
        roles = by_layer(found)[f"trunk.{layer}"]
        assert there <= roles and not absent & roles


@pytest.fixture(scope="module", params=list(MODELS))
def real(request: pytest.FixtureRequest) -> SimpleNamespace:
    """One real model with random weights: its name, arguments, what it saves, and the model."""
    with torch.compiler.set_stance("force_eager"):
        model = randomise(build(request.param), seed=len(request.param))
    return SimpleNamespace(name=request.param, facts=MODELS[request.param], model=model, tensors=saved_tensors(model))


def test_every_element_is_placed_once(real: SimpleNamespace) -> None:
    held = inventory(real.tensors)
    check_exact_cover(placements(real.facts, held), held)
    assert dialect(real.facts, held) == "bridge"


def test_a_forward_pass_from_the_vocabulary_alone_is_the_models_own(real: SimpleNamespace) -> None:
    """Trunk and MTP hidden states to float32 rounding."""
    forward = Forward(gather(placements(real.facts, inventory(real.tensors)), real.tensors), real.facts)
    with torch.compiler.set_stance("force_eager"):
        theirs = [state[:, 0] for state in hidden_states(real.model, TOKENS[None])]
    ours = forward.hidden_states(TOKENS)
    assert len(ours) == len(theirs) == 1 + (real.facts["mtp_num_layers"] or 0)
    for mine, state in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, state, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("argument", ["apply_layernorm_1p", "layernorm_zero_centered_gamma"])
def test_zero_centred_norms_are_all_of_them(real: SimpleNamespace, argument: str) -> None:
    """TERowParallelLinearLayerNorm's is a TENorm of the same config, as OLMoESelfAttention's are."""
    held = inventory(real.tensors)
    plain, less_one = placements(real.facts, held), placements(real.facts | {argument: True}, held)
    assert [p.block for p in plain] == [p.block for p in less_one]
    names = {one.role.name: two.role.name for one, two in zip(plain, less_one, strict=True)}
    norms = {name for name in names if name.split(".joint")[0].endswith("norm")}
    assert {name for name in names if names[name] == f"{name}.minus_one"} == norms >= {"final_norm"}
