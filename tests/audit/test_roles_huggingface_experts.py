"""Routers and experts of every family that has them: the real modules are asked, one expert at a time."""

from typing import Any

import pytest
import torch

from tests.support.hf_probe import ALL, IDS, Probe, negated, only, same
from tests.support.hf_roles import edited, role_tensor, trunk_model

# case -> the name of its shared expert, "" for none
CASES = {
    "deepseek": "shared_experts",
    "mixtral": "",
    "qwen3 moe": "",
    "qwen2 moe": "shared_expert",
    "deepseek v2": "shared_experts",
    "glm lite": "shared_experts",
    "hy": "shared_experts",
    "exaone": "shared_experts",
    "mellum": "",
    "minimax": "",
    "mimo v2": "",
}
LAYER = "model.layers.1.mlp"


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_experts(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routed by hand to each expert: gate goes through the activation, up does not, down gives the output's rows."""
    probe, shared = Probe(case, monkeypatch), CASES[case]
    torch.manual_seed(3)
    hidden = torch.randn(5, probe.config["hidden_size"])

    def ask(*edit: Any) -> list[torch.Tensor]:
        tensors = edited(probe.tensors, probe.placed, "trunk.1", *edit) if edit else probe.tensors
        mlp = trunk_model(case, tensors).model.layers[1].mlp
        routed = [mlp.experts(hidden, torch.full((5, 1), e), torch.ones(5, 1)) for e in range(4)]
        return routed + ([getattr(mlp, shared)(hidden)] if shared else [])

    plain = ask()
    for role, index in [("expert", 2)] + [("shared", 4)] * bool(shared):
        one: Any = (2,) if role == "expert" else ()
        turned = ask(f"{role}.up", (*one, ...), negated)
        assert same(turned[index], -plain[index])
        bent = ask(f"{role}.gate", (*one, ...), negated)
        assert not same(bent[index].abs(), plain[index].abs())
        units = [ask(f"{role}.{name}", (*one, 3)) for name in ("gate", "up")] + [ask(f"{role}.down", (*one, ALL, 3))]
        assert same(units[0][index], units[1][index]) and same(units[0][index], units[2][index])
        row = ask(f"{role}.down", (*one, 5))
        assert only(row[index], plain[index], (ALL, 5))
        for changed in (turned, bent, *units, row):
            assert all(same(changed[i], plain[i]) for i in range(len(plain)) if i != index)


@pytest.mark.parametrize("case", CASES)
def test_router(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of an expert gives its logit, and a correction its choice alone."""
    probe = Probe(case, monkeypatch)
    plain = probe.plain.outputs[f"{LAYER}.gate"]
    blind = probe.after(("trunk.1", "router", 2)).outputs[f"{LAYER}.gate"]
    assert only(blind[0], plain[0], (ALL, 2))
    if probe.has("router.correction"):
        for sign, present in ((1, True), (-1, False)):
            shift = ("trunk.1", "router.correction", 2, lambda x, sign=sign: x + 99 * sign)
            logits, _, chosen = probe.after(shift).outputs[f"{LAYER}.gate"]
            assert same(logits, plain[0])
            assert (chosen == 2).any(dim=1).eq(present).all()


@pytest.mark.parametrize("case", ["qwen2 moe"])
def test_the_shared_expert_is_mixed_in_by_one_number_per_token(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(case, monkeypatch)
    seen = probe.after(("trunk.1", "shared.mix", ALL))
    routed, shared = (seen.outputs[f"{LAYER}.{name}"] for name in ("experts", "shared_expert"))
    assert same(seen.outputs[LAYER].flatten(0, 1), routed + shared / 2)  # sigmoid(0)
    column = probe.after(("trunk.1", "shared.mix", 5)).outputs[f"{LAYER}.shared_expert_gate"]
    plain = probe.plain.outputs[f"{LAYER}.shared_expert_gate"]
    weight = probe.tensors[f"{LAYER}.shared_expert_gate.weight"][0, 5]
    read = probe.plain.inputs[f"{LAYER}.shared_expert_gate"][..., 5:6]
    assert plain.shape[:1] == (IDS.numel(),)
    assert same(plain - column, weight * read)


@torch.no_grad()
def test_experts_of_gpt_oss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up stand in alternate columns of transposed weights: the formula on the roles is the real module."""
    probe = Probe("gpt oss", monkeypatch)
    gate, up, down = (
        role_tensor(probe.tensors, probe.placed, "trunk.1", f"expert.{n}") for n in ("gate", "up", "down")
    )
    b_gate, b_up, b_down = (
        role_tensor(probe.tensors, probe.placed, "trunk.1", f"expert.{n}.bias") for n in ("gate", "up", "down")
    )
    torch.manual_seed(3)
    x = torch.randn(5, probe.config["hidden_size"])
    mlp = trunk_model("gpt oss", probe.tensors).model.layers[1].mlp
    for e in range(4):
        g = (x @ gate[e].T + b_gate[e]).clamp(max=7.0)
        u = (x @ up[e].T + b_up[e]).clamp(-7.0, 7.0)
        expected = (u + 1) * g * torch.sigmoid(1.702 * g) @ down[e].T + b_down[e]
        real = mlp.experts(x, torch.full((5, 1), e), torch.ones(5, 1))
        assert torch.allclose(real, expected, rtol=1e-4, atol=1e-3)
        assert not torch.allclose(real, (g + 1) * u * torch.sigmoid(1.702 * u) @ down[e].T + b_down[e], atol=1e-1)
    router, bias = (role_tensor(probe.tensors, probe.placed, "trunk.1", r) for r in ("router", "router.bias"))
    assert torch.allclose(mlp.router(x)[0], x @ router.T + bias, atol=1e-4)


def test_sinks_of_gpt_oss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one takes all of its head's attention and none of the others'."""
    probe = Probe("gpt oss", monkeypatch)
    seen = probe.after(("trunk.0", "attn.sink", 2, lambda x: x + 999))
    assert only(seen.attended[0], probe.plain.attended[0], (ALL, ALL, 2))
