"""The Megatron half on the kinds of module that only some families have, against the real ones of megatron-core.

Whole models of the local spec run; a delta net exists in the Transformer Engine spec only and runs alone, as the real
module over local linear layers.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mtpconvert.audit.roles.megatron import placements
from mtpconvert.tensors import Inventory
from tests.support import mcore_modules
from tests.support.mcore_cpu import quietly
from tests.support.mcore_forward import hidden_states
from tests.support.mcore_kinds import KINDS, LOCAL, NEXT, NO_QUERY_LATENT, build
from tests.support.mcore_roles import inventory, randomise, saved_tensors, te_inventories, te_norms
from tests.support.roles_cover import check_exact_cover
from tests.support.roles_forward import Forward, gather

pytestmark = pytest.mark.usefixtures("as_written")
TOKENS = torch.tensor([3, 17, 28, 5, 11, 0, 9])


@pytest.fixture(scope="module")
def as_written() -> Iterator[None]:
    """megatron-core compiles its gates and norms at first use, which takes half a minute here."""
    with torch.compiler.set_stance("force_eager"):
        yield


def named(facts: dict[str, Any], held: Inventory) -> set[Any]:
    return {(p.role, p.part) for p in placements(facts, held)}


@pytest.mark.parametrize("name", list(KINDS))
def test_te_spec_is_covered_exactly(name: str) -> None:
    held = te_inventories()[name]
    check_exact_cover(placements(KINDS[name], held), held)


def test_latent_attention_without_a_query_latent_and_with_sinks() -> None:
    """``qk_layernorm`` adds no norm for queries; where 0.19.2 norms the normed input again, that has no role."""
    held = te_inventories()["no-query-latent"]
    again = {key for key in held if key.endswith("linear_q_proj.layer_norm_weight")}
    assert bool(again) == NEXT
    check_exact_cover(placements(NO_QUERY_LATENT, held), {key: held[key] for key in held.keys() - again})
    assert "attn.sink" in {p.role.name for p in placements(NO_QUERY_LATENT, held)}


@pytest.mark.parametrize("name", list(LOCAL))
def test_local_spec_means_the_same_and_a_forward_pass_from_the_vocabulary_is_the_models_own(name: str) -> None:
    """Trunk and MTP hidden states to float32 rounding: sinks, gates, biases and MTP layers are where they are read."""
    facts, model = KINDS[name], randomise(build(name), seed=len(name))
    saved, single = saved_tensors(model), saved_tensors(model, singleton=True)
    for tensors in (saved, single):
        check_exact_cover(placements(facts, inventory(tensors)), inventory(tensors))
    assert named(facts, inventory(saved)) == named(facts, te_inventories()[name])
    roles, parts = (gather(placements(facts, inventory(t)), t) for t in (saved, single))
    assert roles.keys() == parts.keys() and all(torch.equal(roles[role], parts[role]) for role in roles)
    theirs = [state[:, 0] for state in hidden_states(model, TOKENS[None])]
    ours = Forward(roles, facts).hidden_states(TOKENS)
    assert len(ours) == len(theirs) == 1 + facts["mtp_num_layers"]
    for mine, state in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, state, rtol=1e-4, atol=2e-5)


def alone(module: Any, facts: dict[str, Any]) -> tuple[Forward, torch.Tensor]:
    """The vocabulary's forward over what the attention module ``module`` of layer 0 saves; an input [s, 1, h]."""
    saved = saved_tensors(mcore_modules.Alone(randomise(module, seed=3)))
    found = [p for p in placements(facts, inventory(saved)) if p.block.tensor in saved]
    check_exact_cover(found, inventory(saved))
    return Forward(gather(found, saved), facts), torch.randn(
        7, 1, facts["hidden_size"], generator=torch.Generator().manual_seed(4)
    )


@torch.no_grad()
def test_the_real_delta_net_computes_what_the_vocabulary_says() -> None:
    facts = KINDS["delta-net"] | {"apply_layernorm_1p": False}
    module = mcore_modules.delta_net(facts)
    forward, x = alone(module, facts)
    assert {name for _, name in forward.roles} >= {"gdn.q", "gdn.conv.v", "gdn.a_log", "gdn.norm", "gdn.out"}
    theirs, bias = quietly(module)(x, None)
    assert bias is None
    torch.testing.assert_close(forward.delta_net(x[:, 0], "trunk.0"), theirs[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, facts in KINDS.items() if facts["apply_layernorm_1p"]])
def test_the_norms_that_transformer_engine_is_told_are_zero_centred_keep_their_scale_less_one(name: str) -> None:
    """All of them, also of a delta net and of MTP. Transformer Engine multiplies such a norm by 1 + weight."""
    norms = te_norms(name)
    assert all(norms.values()) and norms.keys() <= te_inventories()[name].keys()
    less_one = {p.block.tensor for p in placements(KINDS[name], te_inventories()[name]) if "minus_one" in p.role.name}
    assert less_one == norms.keys()
    plain = placements(KINDS[name] | {"apply_layernorm_1p": False}, te_inventories()[name])
    assert not [p for p in plain if "minus_one" in p.role.name]
