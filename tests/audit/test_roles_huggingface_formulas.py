"""Attention and feed-forward parts of each family: vocabulary.py's definitions, on the roles, are the real modules.

One forward per case, watched; what it shows must equal what the formulas give on the tensors put together by role.
"""

from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu

from tests.support.hf_probe import Probe
from tests.support.hf_roles import MLA, role_tensor, trunk_model

GQA_CASES = [
    "mixtral", "qwen2 moe", "qwen3 moe, first dense, biased", "phi3", "gpt oss", "hy, biased", "mellum", "exaone",
    "gemma 2", "gemma 3", "glm 4", "olmo 2", "olmo 3", "minimax", "mimo v2, biased",
]  # fmt: skip
MLA_CASES = ["deepseek", "deepseek v2", "deepseek v2 lite", "glm lite", "glm lite, rotary halves, sparse"]


class Formulas:
    """Role tensors of one layer of a case, and what the real forward showed there."""

    def __init__(self, case: str, monkeypatch: pytest.MonkeyPatch, layer: int = 0) -> None:
        self.probe, self.layer, self.seen = (probe := Probe(case, monkeypatch)), layer, probe.plain
        self.x = self.seen.inputs[f"model.layers.{layer}.self_attn"][0]  # [position, column]

    def __contains__(self, role: str) -> bool:
        return self.probe.has(role)

    def __getitem__(self, role: str) -> torch.Tensor:
        return role_tensor(self.probe.tensors, self.probe.placed, f"trunk.{self.layer}", role)

    def bias(self, role: str) -> Any:
        return self[f"{role}.bias"] if self.probe.has(f"{role}.bias") else 0

    def scaled(self, x: torch.Tensor, norm: str, axes: tuple[int, ...]) -> torch.Tensor:
        """``scale * x / rms(x)`` over ``axes``, where the family has ``norm`` in either convention."""
        eps = self.probe.config["rms_norm_eps"]
        normed = x * torch.rsqrt(x.pow(2).mean(axes, keepdim=True) + eps)
        if f"{norm}.minus_one" in self:
            return normed * (1 + self[f"{norm}.minus_one"])
        return normed * self[norm] if norm in self else x


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", GQA_CASES)
@pytest.mark.parametrize("layer", [0, 1])
def test_grouped_query_attention(case: str, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At position 0, where rotary turns nothing, and for values and the output at every position."""
    roles = Formulas(case, monkeypatch, layer)
    for letter, trace in (("q", "query"), ("k", "key")):
        made = torch.einsum("hdc,sc->shd", roles[f"attn.{letter}"], roles.x) + roles.bias(f"attn.{letter}")
        made = roles.scaled(made, f"attn.{letter}_norm", (-1,))
        made = roles.scaled(made, f"attn.{letter}_norm.joint", (-2, -1))
        assert close(made[0], getattr(roles.seen, trace)[layer][0, :, 0])
    values = torch.einsum("hdc,sc->shd", roles["attn.v"], roles.x) + roles.bias("attn.v")
    values = values * roles.probe.config.get("attention_value_scale", 1)
    assert close(values.transpose(0, 1), roles.seen.value[layer][0])
    attended = roles.seen.attended[layer][0]
    out = torch.einsum("rhd,shd->sr", roles["attn.out"], attended) + roles.bias("attn.out")
    assert close(out, roles.seen.outputs[f"model.layers.{layer}.self_attn"][0][0])


@pytest.mark.parametrize("case", MLA_CASES)
def test_latent_attention(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary dims 2p and 2p + 1 are turned by frequency p; the code then keeps first members before second ones."""
    roles = Formulas(case, monkeypatch)
    rope = MLA["qk_rope_head_dim"]
    angle = torch.arange(len(roles.x))[:, None] * 10_000.0 ** (-torch.arange(0, rope, 2) / rope)

    def turned(x: torch.Tensor) -> torch.Tensor:
        """[head, position, dim]."""
        first, second = x[..., 0::2], x[..., 1::2]
        pair = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
        return torch.stack(pair, dim=-1).flatten(-2) if "v2" in case else torch.cat(pair, dim=-1)

    down = roles.x
    if "mla.q_down" in roles:
        down = roles.scaled(roles.x @ roles["mla.q_down"].T, "mla.q_down_norm", (-1,))
    up = "mla.q_up" if "mla.q_down" in roles else "mla.q"
    nope, turning = (torch.einsum("hdr,sr->hsd", roles[f"{up}.{part}"], down) for part in ("nope", "rope"))
    assert close(torch.cat([nope, turned(turning)], dim=-1), roles.seen.query[0][0])
    latent = roles.scaled(roles.x @ roles["mla.kv_down.latent"].T, "mla.kv_norm", (-1,))
    keys = torch.einsum("hdr,sr->hsd", roles["mla.kv_up.k"], latent)
    shared = turned((roles.x @ roles["mla.kv_down.rope"].T)[None]).expand(keys.shape[0], -1, -1)
    assert close(torch.cat([keys, shared], dim=-1), roles.seen.key[0][0])
    assert close(torch.einsum("hdr,sr->hsd", roles["mla.kv_up.v"], latent), roles.seen.value[0][0])
    out = torch.einsum("rhd,shd->sr", roles["attn.out"], roles.seen.attended[0][0])
    assert close(out, roles.seen.outputs["model.layers.0.self_attn"][0][0])


@pytest.mark.parametrize("case", ["phi3", "glm 4", "gemma 2", "olmo 2", "qwen3 moe, first dense, biased", "mimo v2"])
def test_gated_feed_forward(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = Formulas(case, monkeypatch)
    x = roles.seen.inputs["model.layers.0.mlp"]
    act = torch.nn.GELU(approximate="tanh") if "gemma" in case else silu
    made = linear(act(linear(x, roles["mlp.gate"])) * linear(x, roles["mlp.up"]), roles["mlp.down"])
    assert close(made, roles.seen.outputs["model.layers.0.mlp"])


# case -> the name of its shared expert, "" for none
EXPERTS = {
    "deepseek": "shared_experts", "deepseek v2": "shared_experts", "glm lite": "shared_experts", "mixtral": "",
    "qwen3 moe": "", "qwen2 moe": "shared_expert", "hy": "shared_experts", "exaone": "shared_experts", "mellum": "",
    "minimax": "", "mimo v2": "", "qwen3 next": "shared_expert", "qwen3.5 moe": "shared_expert",
    "deepseek v3.2": "shared_experts", "glm 5": "shared_experts",
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("case", EXPERTS)
def test_experts_and_router(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert is asked alone, routed to by hand; the whole is what the router's choice makes of them."""
    probe, shared = Probe(case, monkeypatch), EXPERTS[case]
    torch.manual_seed(3)
    x = torch.randn(5, probe.config["hidden_size"])
    mlp = trunk_model(case, probe.tensors).model.layers[1].mlp

    def role(name: str) -> torch.Tensor:
        return role_tensor(probe.tensors, probe.placed, "trunk.1", name)

    gate, up, down = (role(f"expert.{name}") for name in ("gate", "up", "down"))
    for e in range(4):
        made = linear(silu(linear(x, gate[e])) * linear(x, up[e]), down[e])
        assert close(mlp.experts(x, torch.full((5, 1), e), torch.ones(5, 1)), made)
    if shared:
        made = linear(silu(linear(x, role("shared.gate"))) * linear(x, role("shared.up")), role("shared.down"))
        assert close(getattr(mlp, shared)(x), made)
    correction = [mlp.e_score_correction_bias] if case in ("hy", "minimax") else []
    logits, _, chosen = mlp.gate(x, *correction)
    assert close(logits, x @ role("router").T)
    sigmoid = "deepseek", "glm lite", "hy", "exaone", "minimax", "mimo v2", "deepseek v3.2", "glm 5"
    assert probe.has("router.correction") == (case in sigmoid)
    if case in sigmoid:
        bias = role("router.correction")
        assert close(bias, mlp.e_score_correction_bias if correction else mlp.gate.e_score_correction_bias)
        assert [set(row) for row in chosen.tolist()] == [
            set(row) for row in (logits.sigmoid() + bias).topk(2).indices.tolist()
        ]
    assert probe.has("shared.mix") == (shared == "shared_expert")
    if shared == "shared_expert":
        routed = mlp(x[None])[0] - mlp.experts(x, chosen, mlp.gate(x)[1])
        assert close(routed, torch.sigmoid(x @ role("shared.mix"))[:, None] * made)


@torch.no_grad()
def test_experts_of_gpt_oss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up stand in alternate columns of transposed weights; the limit and the 1.702 are its config's."""
    probe = Probe("gpt oss", monkeypatch)
    torch.manual_seed(3)
    x = torch.randn(5, probe.config["hidden_size"])
    mlp = trunk_model("gpt oss", probe.tensors).model.layers[1].mlp

    def role(name: str) -> torch.Tensor:
        return role_tensor(probe.tensors, probe.placed, "trunk.1", name)

    for e in range(4):
        gate = linear(x, role("expert.gate")[e], role("expert.gate.bias")[e]).clamp(max=7.0)
        up = linear(x, role("expert.up")[e], role("expert.up.bias")[e]).clamp(-7.0, 7.0)
        made = linear(
            (up + 1) * gate * torch.sigmoid(1.702 * gate), role("expert.down")[e], role("expert.down.bias")[e]
        )
        assert close(mlp.experts(x, torch.full((5, 1), e), torch.ones(5, 1)), made)
    assert close(mlp.router(x)[0], linear(x, role("router"), role("router.bias")))


@pytest.mark.parametrize(("case", "layer"), [("gpt oss", 0), ("mimo v2", 1)])
def test_sinks(case: str, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more logit in each head's softmax, without a value."""
    roles = Formulas(case, monkeypatch, layer)
    query, key, value = (trace[layer][0] for trace in (roles.seen.query, roles.seen.key, roles.seen.value))
    repeat = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeat, 0), value.repeat_interleave(repeat, 0)
    scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
    sinks = roles["attn.sink"][:, None, None].expand(-1, scores.shape[1], 1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    assert close((weights @ value).transpose(0, 1), roles.seen.attended[layer][0])
