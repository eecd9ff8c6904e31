"""The sparse-attention indexer (DeepSeek-V3.2, GLM-5): its scores from the roles, and the layers that have one."""

import sys
from typing import Any

import pytest
import torch
import transformers

from mtpconvert.audit.roles.huggingface import placements
from mtpconvert.errors import ConfigError
from tests.support.hf_probe import Probe, same
from tests.support.hf_roles import DSA, role_tensor, trunk_model


def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Dims 2p and 2p + 1 (last axis) turned together by ``angle[position, p]``; positions are axis 0."""
    first, second = x[..., 0::2], x[..., 1::2]
    angle = angle.view(angle.shape[0], *[1] * (x.dim() - 2), -1)
    pair = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
    return torch.stack(pair, dim=-1).flatten(-2)


@torch.no_grad()
@pytest.mark.parametrize("case", ["deepseek v3.2", "glm 5"])
def test_scores_of_the_indexer(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """relu(q . k) per head before the weights, as vocabulary.py defines the parts, is what the real module computes."""
    probe = Probe(case, monkeypatch)
    model = trunk_model(case, probe.tensors)
    indexer = model.model.layers[0].self_attn.indexer
    code = sys.modules[type(indexer).__module__]
    torch.manual_seed(3)
    x, latent = torch.randn(1, 5, DSA["hidden_size"]), torch.randn(1, 5, DSA["q_lora_rank"])
    positions = torch.arange(5)[None]
    spied: list[torch.Tensor] = []
    real = code.F.relu
    monkeypatch.setattr(code.F, "relu", lambda scores: real(spied.append(scores) or scores))
    indexer(x, latent, model.model.rotary_emb(x, positions), torch.zeros(1, 5, 5), positions)

    def role(name: str) -> torch.Tensor:
        return role_tensor(probe.tensors, probe.placed, "trunk.0", f"dsa.{name}")

    angle = torch.arange(5.0)[:, None] * model.model.rotary_emb.inv_freq
    parts = {}
    for part in ("rope", "nope"):
        parts[part] = (x[0] @ role(f"k.{part}").T, torch.einsum("hdr,sr->shd", role(f"q.{part}"), latent[0]))
    keys = torch.cat([parts["rope"][0], parts["nope"][0]], dim=-1)
    mean, spread = keys.mean(-1, keepdim=True), torch.rsqrt(keys.var(-1, unbiased=False, keepdim=True) + 1e-6)
    scores: Any = 0
    for part, (key, query) in parts.items():
        normed = (key - mean) * spread * role(f"k_norm.{part}") + role(f"k_norm.bias.{part}")
        if part == "rope":
            normed, query = turned(normed, angle), turned(query, angle)
        scores = scores + torch.einsum("shd,td->sht", query, normed)
    assert torch.allclose(spied[0][0], scores * DSA["index_head_dim"] ** -0.5, atol=1e-4)
    assert same(indexer.weights_proj(x[0]), x[0] @ role("weights").T)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"index_topk_freq": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "FSSFSF"},
        {"index_topk_pattern": ["full", "shared", "full", "full", "shared", "shared"]},
        {"indexer_types": ["full", "full", "shared", "full", "shared", "shared"], "index_topk_freq": 2},
    ],
)
def test_layers_of_glm_5_with_an_indexer_of_their_own(keys: dict[str, Any]) -> None:
    config = DSA | {"num_hidden_layers": 6, "mlp_layer_types": ["dense"] * 6} | keys
    real = transformers.GlmMoeDsaConfig(**config).indexer_types
    placed = placements(config | {"architectures": ["GlmMoeDsaForCausalLM"], "num_nextn_predict_layers": 1}, {})
    full = {f"trunk.{n}" for n, kind in enumerate(real) if kind == "full"}
    assert {p.role.place for p in placed if p.role.name == "dsa.weights"} == full | {"mtp.0"}
    assert {p.role.place for p in placed if p.role.name == "mla.kv_norm"} == {f"trunk.{n}" for n in range(6)} | {
        "mtp.0"
    }


def test_an_indexer_that_is_neither_full_nor_shared_is_an_error() -> None:
    config = DSA | {"architectures": ["GlmMoeDsaForCausalLM"], "indexer_types": ["full", "half"]}
    with pytest.raises(ConfigError, match="indexer of layer 1 is 'half'"):
        placements(config, {})
