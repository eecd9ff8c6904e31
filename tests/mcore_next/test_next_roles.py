"""The Megatron half against megatron-core 0.19.2: what 0.16.1 has, once more, and the sparse attention that it has not.

``DSAttention`` falls back to torch where none of its kernels is there, so the real module runs.
"""

from typing import Any
from unittest import mock

import pytest
import torch

from mtpconvert.audit.roles.megatron import meaning_arguments, placements
from tests.audit.test_roles_megatron_bridge import *  # noqa: F403
from tests.audit.test_roles_megatron_kinds import *  # noqa: F403
from tests.audit.test_roles_megatron_kinds import TOKENS, alone
from tests.support import mcore_modules
from tests.support.mcore_cpu import cpu_patches, quiet, quietly
from tests.support.mcore_forward import hidden_states
from tests.support.mcore_kinds import KINDS, build
from tests.support.mcore_roles import ARGUMENTS, inventory, randomise, saved_tensors, te_inventories
from tests.support.roles_cover import check_exact_cover
from tests.support.roles_forward import Forward, gather

FACTS = KINDS["sparse-shared-index"] | {"apply_layernorm_1p": False}


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_what_both_versions_save_is_covered_exactly(name: str) -> None:
    check_exact_cover(placements(ARGUMENTS[name], te_inventories()[name]), te_inventories()[name])


def unseen(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]


@torch.no_grad()
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_real_sparse_attention_computes_what_the_vocabulary_says(interleaved: bool) -> None:
    """Seven positions of which each sees the three that its indexer picks."""
    facts = FACTS | {"dsa_indexer_rope_interleaved": interleaved}
    module = mcore_modules.sparse_attention(facts)
    forward, x = alone(module, facts)
    assert {name for _, name in forward.roles} >= {"dsa.q.rope", "dsa.k_norm.bias.nope", "dsa.weights"}
    theirs, _ = quietly(module)(x, unseen(len(x)))
    picks = ~forward.not_picked(x[:, 0], "trunk.0")
    assert picks.sum(1).tolist() == [1, 2, 3, 3, 3, 3, 3] and not bool(picks.tril(-3).sum() == 0)
    torch.testing.assert_close(forward.attention(x[:, 0], "trunk.0"), theirs[:, 0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_scores_of_the_real_indexer(interleaved: bool) -> None:
    """Numbers, not only which are highest: every dim, the norm's bias and the heads' weights count."""
    facts = FACTS | {"dsa_indexer_rope_interleaved": interleaved}
    module = mcore_modules.sparse_attention(facts)
    forward, x = alone(module, facts)
    reads = forward.norm(x[:, 0] @ forward.get("trunk.0", "mla.q_down").T, "trunk.0", "mla.q_down_norm")
    theirs, _ = quietly(module.core_attention.indexer.forward_with_scores)(x, reads[:, None])
    scale = (FACTS["dsa_indexer_n_heads"] * FACTS["dsa_indexer_head_dim"]) ** -0.5  # the same for all, so of no account
    ours = forward.index_scores(x[:, 0], "trunk.0") * scale
    torch.testing.assert_close(ours, theirs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", range(1, 7))
def test_which_layers_have_an_indexer_of_their_own(number: int) -> None:
    module: Any = mcore_modules.sparse_attention(FACTS, number)
    assert (module.core_attention.indexer is not None) == (number not in (4, 6))


def test_one_mtp_layer_serves_every_depth() -> None:
    """``mtp.layers.0`` is applied three times, its input its own last output; the arguments say so, no name does."""
    facts, model = KINDS["repeated-mtp"], randomise(build("repeated-mtp"), seed=5)
    saved = saved_tensors(model)
    placed = placements(facts, inventory(saved))
    assert {p.role.place for p in placed if p.role.is_mtp} == {"mtp.0"}
    assert [name for name, _, _ in meaning_arguments(facts)] == ["mtp_use_repeated_layer"]
    theirs: list[torch.Tensor] = []
    (layer,) = model.mtp.layers
    handle = layer.final_layernorm.register_forward_hook(lambda _module, _input, output: theirs.append(output[:, 0]))
    with mock.patch.object(model.mtp, "layers", torch.nn.ModuleList([layer] * 3)):  # the rig looks for three
        hidden_states(model, TOKENS[None])
    handle.remove()
    ours = Forward(gather(placed, saved), facts).hidden_states(TOKENS)[1:]
    assert len(ours) == len(theirs) == 3
    for mine, state in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, state, rtol=1e-4, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_that_keep_gate_and_up_in_turn(ranks: int) -> None:
    """Two experts of 12 units in blocks of 2, split over ``ranks``, saved by the real factory, read by the real class.

    With 3 blocks of each on a rank, the halves that saving cuts fall inside a pair of blocks.
    """
    cpu_patches()
    with quiet():
        from megatron.core.dist_checkpointing.mapping import ShardedTensor
        from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
        from megatron.core.transformer.moe.experts import TEGroupedMLP

    facts = KINDS["biased-moe-with-sinks"] | {
        "num_experts": 2, "moe_ffn_hidden_size": 12, "moe_mlp_glu_interleave_size": 2, "moe_grouped_gemm": True,
        "expert_tensor_parallel_size": ranks, "tensor_model_parallel_size": 4,
    }  # fmt: skip
    key = "decoder.layers.mlp.experts.experts.linear_fc1.bias"
    local = torch.randn(2, ranks, 24 // ranks, generator=torch.Generator().manual_seed(6))
    saved = torch.full((3, 2, 24), 0.0)
    for expert in range(2):
        for rank in range(ranks):
            axes = ((0, 1, 3), (1, expert, 2))
            mine = ShardedTensor.from_rank_offsets(
                key, local[expert, rank], *axes, (2, rank, ranks), prepend_axis_num=2
            )
            for shard in apply_swiglu_sharded_factory(mine, axes).build():
                first = shard.global_offset[2]
                saved[1, expert, first : first + len(shard.data)] = shard.data
    found = [p for p in placements(facts, inventory({key: saved})) if p.block.tensor == key]
    roles = gather(found, {key: saved})
    in_halves = TEGroupedMLP._remove_glu_interleaving(local.flatten(0, 1), 2).view(2, ranks, 2, 12 // ranks)
    for half, name in enumerate(("expert.gate.bias", "expert.up.bias")):
        assert torch.equal(roles["trunk.1", name], in_halves[:, :, half].flatten(1))
