"""The Megatron half against megatron-core 0.19.2: what 0.16.1 has, once more, and the sparse attention that it has not.

``DSAttention`` falls back to torch where none of its kernels is there, so the real module runs.
"""

from typing import Any
from unittest import mock

import pytest
import torch

from mtpconvert.audit.roles.megatron import meaning_arguments, placements
from tests.audit.test_roles_megatron_kinds import *  # noqa: F403
from tests.audit.test_roles_megatron_kinds import TOKENS, alone
from tests.support import mcore_modules
from tests.support.mcore_cpu import quietly
from tests.support.mcore_forward import hidden_states
from tests.support.mcore_kinds import KINDS, build
from tests.support.mcore_roles import inventory, randomise, saved_tensors
from tests.support.roles_forward import Forward, gather

FACTS = KINDS["sparse-shared-index"] | {"apply_layernorm_1p": False}


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
