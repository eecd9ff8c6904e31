"""Gated attention, gated delta nets and zero-centred norms (Qwen3-Next, Qwen3.5): what the real modules compute."""

import sys
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import conv1d, silu, softplus

from mtpconvert.audit.roles.huggingface import other_prefixes, placements
from mtpconvert.audit.roles.vocabulary import minus_one
from tests.support.hf_probe import ALL, IDS, Probe, Seen, only, same
from tests.support.hf_roles import HYBRID, HYBRID_MOE, Tensors, inventory, role_tensor, saved, trunk_model
from tests.support.roles_cover import check_exact_cover

CASES = ["qwen3 next", "qwen3.5", "qwen3.5 moe"]
ATTENTION, DELTA = "model.layers.1.self_attn", "model.layers.0.linear_attn"
HEADS, HEAD_DIM = HYBRID["num_attention_heads"], HYBRID["head_dim"]


@pytest.mark.parametrize("case", ["qwen3 next", "qwen3 next, biased, a dense layer", "qwen3.5"])
def test_gated_attention(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of q_proj are query and gate by head; half of what was attended passes a gate of zero."""
    probe = Probe(case, monkeypatch)

    def zero(name: str, where: Any) -> Seen:
        return probe.after(*(("trunk.1", r, where) for r in (name, f"{name}.bias") if probe.has(r)))

    def passed(seen: Seen) -> torch.Tensor:
        return seen.inputs[f"{ATTENTION}.o_proj"].view(1, IDS.numel(), HEADS, HEAD_DIM)

    plain = probe.plain
    seen = zero("attn.q", 4)
    assert only(seen.query[0], plain.query[0], (0, 4))
    assert same(seen.key[0], plain.key[0])
    seen = zero("attn.gate", (2, 3))
    assert same(seen.query[0], plain.query[0])
    expected = passed(plain).clone()
    expected[:, :, 2, 3] = plain.attended[0][:, :, 2, 3] / 2  # sigmoid(0)
    assert same(passed(seen), expected)
    for role, trace in (("attn.k", "key"), ("attn.v", "value")):
        assert only(getattr(zero(role, 1), trace)[0], getattr(plain, trace)[0], (0, 1))


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_gated_delta_net(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vocabulary.py's definitions, on the roles, give what the real module feeds its recurrence and makes of it."""
    probe = Probe(case, monkeypatch)

    def recurrence(tensors: Tensors) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
        module = trunk_model(case, tensors).model.layers[0].linear_attn
        code = sys.modules[type(module).__module__]
        seen: list[Any] = []
        real = code.torch_chunk_gated_delta_rule

        def spy(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            seen.append((args, kwargs, result[0]))
            return result

        torch.manual_seed(3)
        x = torch.randn(1, 5, HYBRID["hidden_size"])
        with monkeypatch.context() as patch:
            patch.setattr(code, "torch_chunk_gated_delta_rule", spy)
            out = module(x)
        ((args, kwargs, core),) = seen
        return (*args, kwargs["g"], kwargs["beta"]), core, out, x

    def role(name: str) -> torch.Tensor:
        return role_tensor(probe.tensors, probe.placed, "trunk.0", f"gdn.{name}")

    (query, key, value, decay, beta), core, out, x = recurrence(probe.tensors)
    for name, real in (("q", query), ("k", key), ("v", value)):
        heads, dims, taps = role(f"conv.{name}").shape
        rows = torch.einsum("hdc,bsc->bhds", role(name), x).reshape(1, heads * dims, -1)
        kernel = role(f"conv.{name}").reshape(heads * dims, 1, taps)
        mixed = silu(conv1d(rows, kernel, padding=taps - 1, groups=heads * dims)[..., : x.shape[1]])
        assert same(real, mixed.view(1, heads, dims, -1).permute(0, 3, 1, 2))
    assert same(beta, torch.sigmoid(x @ role("b").T))
    assert same(decay, -role("a_log").exp() * softplus(x @ role("a").T + role("dt_bias")))
    z = torch.einsum("hdc,bsc->bshd", role("z"), x)
    normed = core * torch.rsqrt(core.pow(2).mean(-1, keepdim=True) + 1e-6) * role("norm") * silu(z)
    assert torch.allclose(out, torch.einsum("rhd,bshd->bsr", role("out"), normed), atol=1e-4)

    blind = dict(probe.tensors)
    for name in ("q", "conv.q"):
        blind = probe.edit(blind, "trunk.0", f"gdn.{name}", 1)
    assert only(recurrence(blind)[1], core, (ALL, ALL, [3, 4, 5]))  # six value heads read two key heads


@pytest.mark.parametrize("case", CASES)
def test_norms_keep_the_scale_less_one(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(case, monkeypatch)
    plain = probe.plain

    def erased(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, -1)

    for role, reader in (("attn.input_norm", "self_attn"), ("mlp.norm", "mlp")):
        name = f"model.layers.1.{reader}"
        seen = probe.after(("trunk.1", minus_one(role), 5, erased))
        assert only(seen.inputs[name], plain.inputs[name], (0, ALL, 5))
    seen = probe.after(("", minus_one("final_norm"), 5, erased))
    assert only(seen.outputs["model.norm"], plain.outputs["model.norm"], (0, ALL, 5))
    for role, trace in (("attn.q_norm", "query"), ("attn.k_norm", "key")):
        seen = probe.after(("trunk.1", minus_one(role), 3, erased))
        assert only(getattr(seen, trace)[0][:, :, 0], getattr(plain, trace)[0][:, :, 0], (0, ALL, 3))
    zero_centred = {p.role.name for p in probe.placed if p.role.name.endswith(".minus_one")}
    assert {p.role.name for p in probe.placed if p.role.name.endswith("norm")} == {"gdn.norm"}
    assert {minus_one(f"mtp.{name}_norm") for name in ("embedding", "hidden", "final")} <= zero_centred


def test_layers_of_each_kind_without_layer_types() -> None:
    """``full_attention_interval``: Qwen3NextConfig.__post_init__."""
    config = HYBRID_MOE | {"num_hidden_layers": 5, "full_attention_interval": 3, "layer_types": None}
    real = transformers.Qwen3NextConfig(**config).layer_types
    placed = placements(config | {"architectures": ["Qwen3NextForCausalLM"]}, {})
    linear = {p.role.place for p in placed if p.role.name == "gdn.out"}
    assert linear == {f"trunk.{n}" for n, kind in enumerate(real) if kind == "linear_attention"} != set()
    assert {p.role.place for p in placed if p.role.name == "attn.out"} == {f"trunk.{n}" for n in range(5)} - linear


def test_experts_stacked_in_the_trunk_and_single_in_the_mtp_layer() -> None:
    """Qwen3.5's published files (knowledge/families.md, section 6)."""
    config, tensors = saved("qwen3.5 moe")
    mixed = {k: v for k, v in tensors.items() if not k.startswith("model.") or ".mlp.experts." not in k}
    for n in range(2):
        layer = f"model.layers.{n}.mlp.experts."
        mixed[f"{layer}gate_up_proj"] = torch.zeros(4, 24, 24)
        mixed[f"{layer}down_proj"] = torch.zeros(4, 24, 12)
    assert "mtp.layers.0.mlp.experts.3.up_proj.weight" in mixed
    check_exact_cover(placements(config, inventory(mixed)), inventory(mixed))


VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 24}


@pytest.mark.parametrize(
    ("family", "text"), [("Qwen3_5", HYBRID | {"intermediate_size": 11}), ("Qwen3_5Moe", HYBRID_MOE)]
)
def test_the_language_model_of_a_vision_language_model(family: str, text: dict[str, Any]) -> None:
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=VISION, tie_word_embeddings=True)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    names = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    named = {"architectures": [f"{family}ForConditionalGeneration"]}
    written = config.to_dict() | named
    written["text_config"] |= {"mtp_num_hidden_layers": 1, "tie_word_embeddings": False}
    _, small = saved("qwen3.5" if family == "Qwen3_5" else "qwen3.5 moe")
    names |= {k: v for k, v in small.items() if k.startswith("mtp.")}
    mine = {k: v for k, v in names.items() if not k.startswith(other_prefixes(written))}
    assert {k.split(".")[1] for k in names.keys() - mine.keys()} == {"visual"}
    check_exact_cover(placements(written, inventory(mine)), inventory(mine))
