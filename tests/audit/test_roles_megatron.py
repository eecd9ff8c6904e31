"""The Megatron half against the real megatron-core: every element placed once, and in the place the model means."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtpconvert.audit.roles.megatron import dialect, expected_dtype, placements
from mtpconvert.tensors import Inventory
from tests.support.mcore import model_from_args
from tests.support.mcore_cpu import quietly
from tests.support.mcore_forward import hidden_states
from tests.support.mcore_roles import ARGUMENTS, inventory, randomise, saved_tensors, te_inventories
from tests.support.roles_cover import check_exact_cover
from tests.support.roles_forward import Forward, gather

TOKENS = torch.tensor([3, 17, 28, 5, 11, 0, 9])


@pytest.fixture(scope="module", params=list(ARGUMENTS))
def real(request: pytest.FixtureRequest) -> SimpleNamespace:
    """One real model with random weights: its name, arguments, what it saves, and the model."""
    arguments = ARGUMENTS[request.param]
    model = randomise(model_from_args(arguments), seed=len(request.param))
    return SimpleNamespace(name=request.param, facts=arguments, model=model, tensors=saved_tensors(model))


def covered(facts: dict[str, Any], held: Inventory) -> None:
    check_exact_cover(placements(facts, held), held)


def test_local_spec_is_covered_exactly(real: SimpleNamespace) -> None:
    covered(real.facts, inventory(real.tensors))


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_te_spec_is_covered_exactly(name: str) -> None:
    covered(ARGUMENTS[name], te_inventories()[name])


def test_halves_and_experts_in_tensors_of_their_own_are_covered_exactly(real: SimpleNamespace) -> None:
    single = saved_tensors(real.model, singleton=True)
    covered(real.facts, inventory(single))
    whole, parts = (gather(placements(real.facts, inventory(t)), t) for t in (real.tensors, single))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[role], parts[role]) for role in whole)


def test_both_specs_name_the_same_roles(real: SimpleNamespace) -> None:
    local, te = (
        {(p.role, p.part) for p in placements(real.facts, held)}
        for held in (inventory(real.tensors), te_inventories()[real.name])
    )
    assert local == te


def test_a_forward_pass_from_the_vocabulary_alone_is_the_models_own(real: SimpleNamespace) -> None:
    """Trunk and MTP hidden states and logits, to float32 rounding: each role is where the real model reads it."""
    roles = gather(placements(real.facts, inventory(real.tensors)), real.tensors)
    forward = Forward(roles, real.facts)
    theirs = [state[:, 0] for state in hidden_states(real.model, TOKENS[None])]
    ours = forward.hidden_states(TOKENS)
    assert len(ours) == len(theirs) == 1 + (real.facts["mtp_num_layers"] or 0)
    head = (
        real.model.shared_embedding_or_output_weight() if ("", "head") not in roles else real.model.output_layer.weight
    )
    for mine, state in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, state, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(
            forward.logits(mine), state @ head[: real.facts["vocab_size"]].T, rtol=1e-4, atol=1e-4
        )


@quietly
def one_layer(name: str) -> tuple[Any, dict[str, Any], Any]:
    """Roles, facts and model of ``name``, for looking into single modules."""
    model = randomise(model_from_args(ARGUMENTS[name]), seed=1)
    saved = saved_tensors(model)
    return gather(placements(ARGUMENTS[name], inventory(saved)), saved), ARGUMENTS[name], model


@torch.no_grad()
def test_query_groups_are_the_ones_that_the_real_attention_splits() -> None:
    roles, facts, model = one_layer("gqa-qkv-bias")
    x = torch.randn(4, 1, facts["hidden_size"], generator=torch.Generator().manual_seed(2))
    real_qkv = model.decoder.layers[2].self_attention.get_query_key_value_tensors(x)
    for name, theirs in zip("qkv", real_qkv, strict=True):
        weight, bias = roles["trunk.2", f"attn.{name}"], roles["trunk.2", f"attn.{name}.bias"]
        assert weight.shape[:2] == theirs.shape[2:]
        torch.testing.assert_close(torch.einsum("sc,hdc->shd", x[:, 0], weight) + bias, theirs[:, 0])


@torch.no_grad()
def test_mla_splits_are_the_ones_of_the_real_attention() -> None:
    """At position 0 nothing rotates: the real query and key are [nope, rope dims 0 2 .. 1 3 ..]."""
    roles, facts, model = one_layer("mla-no-q-latent")
    x = torch.randn(1, 1, facts["hidden_size"], generator=torch.Generator().manual_seed(2))
    q, k, v = (t[0, 0] for t in model.decoder.layers[0].self_attention.get_query_key_value_tensors(x)[:3])
    at, row = "trunk.0", x[0, 0]
    latent = roles[at, "mla.kv_down.latent"] @ row
    order = [0, 2, 1, 3]
    torch.testing.assert_close(q[:, :12], roles[at, "mla.q.nope"] @ row)
    torch.testing.assert_close(q[:, 12:], (roles[at, "mla.q.rope"] @ row)[:, order])
    torch.testing.assert_close(k[:, :12], roles[at, "mla.kv_up.k"] @ latent)
    torch.testing.assert_close(k[:, 12:], (roles[at, "mla.kv_down.rope"] @ row)[order].expand(6, -1))
    torch.testing.assert_close(v, roles[at, "mla.kv_up.v"] @ latent)


@torch.no_grad()
@pytest.mark.parametrize("half, activated", [("mlp.gate", True), ("mlp.up", False)])
def test_the_gate_goes_through_the_activation(half: str, activated: bool) -> None:
    """Scaling one half by -3: the output scales with it only if no activation stands between."""
    _, facts, model = one_layer("gqa-dense")
    held = inventory(saved_tensors(model))
    mlp = model.decoder.layers[0].mlp
    (p,) = (p for p in placements(facts, held) if (p.role.place, p.role.name) == ("trunk.0", half))
    x = torch.randn(4, 1, facts["hidden_size"], generator=torch.Generator().manual_seed(2))
    before, _ = quietly(mlp)(x)
    mlp.linear_fc1.weight.reshape(p.block.grid[1:])[tuple(slice(*i) for i in p.block.box[1:])] *= -3
    after, _ = quietly(mlp)(x)
    assert torch.allclose(after, -3 * before, rtol=1e-4, atol=1e-5) is not activated


@torch.no_grad()
def test_the_halves_of_eh_proj() -> None:
    roles, facts, model = one_layer("mla-moe")
    hidden, embedding = torch.randn(2, 4, 1, facts["hidden_size"], generator=torch.Generator().manual_seed(2))
    layer = model.mtp.layers[1]
    join = quietly(layer._concat_embeddings)
    for norm in (layer.enorm, layer.hnorm):
        norm.weight.fill_(1.0)
    silence = torch.zeros_like(hidden)
    for name, joined, alone in (
        ("mtp.proj.hidden", join(hidden, silence), hidden),
        ("mtp.proj.embedding", join(silence, embedding), embedding),
    ):
        normed = alone * (alone.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        torch.testing.assert_close(joined, normed @ roles["mtp.1", name].T)


def test_experts_are_numbered_over_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two expert-parallel ranks, with 4 experts of its own, saves experts 4 to 7 of 8."""
    _, _, model = one_layer("mla-moe")
    experts = model.decoder.layers[1].mlp.experts
    monkeypatch.setattr(experts, "ep_group", SimpleNamespace(size=lambda: 2, rank=lambda: 1))
    shards = quietly(experts.sharded_state_dict)("mlp.experts.", (), None)
    for local in range(4):
        down = shards[f"mlp.experts.local_experts.{local}.linear_fc2.weight"]
        assert (down.key, down.global_shape[0]) == ("mlp.experts.experts.linear_fc2.weight", 8)
        assert down.global_offset[0] == 4 + local


def test_the_expert_bias_alone_has_a_dtype_of_its_own() -> None:
    """bf16 models save it in fp32 too."""
    model = model_from_args(ARGUMENTS["mla-moe"], dtype=torch.bfloat16)
    for key, spec in inventory(saved_tensors(model)).items():
        assert (expected_dtype(key) or "BF16") == spec.dtype, key
    assert expected_dtype("router.correction") == "F32"


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_stock_models_have_nothing_that_only_bridge_has(name: str) -> None:
    """Whatever ``v_head_dim`` says of models without latent attention: its default is in every checkpoint's args."""
    held, facts = te_inventories()[name], ARGUMENTS[name]
    with_default = facts if facts["multi_latent_attention"] else facts | {"v_head_dim": 128}
    assert dialect(facts, held) == dialect(with_default, held) == ""
    assert placements(with_default, held) == placements(facts, held)
