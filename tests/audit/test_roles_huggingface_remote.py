"""Families that transformers has no class for: MiMo-7B, Ling/Ring 2.0, openPangu, by their published modelling code.

The reference modules are written here from the definitions in ``modeling_mimo.py`` (``MiMoMTPLayers.forward``) and
``modeling_bailing_moe_v2.py`` (``BailingMoeV2Attention``, ``BailingMoeV2MTPLayer``), out of transformers' Qwen2 parts.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from mtpconvert.audit.roles.huggingface import expected_dtype, placements
from tests.support.hf_probe import ALL, only, same
from tests.support.hf_roles import GQA, Tensors, edited, inventory, role_tensor, saved
from tests.support.roles_cover import check_exact_cover

HIDDEN = GQA["hidden_size"]


class MiMoMtpLayer(nn.Module):
    """``input_proj`` reads [hidden_layernorm(hidden), token_layernorm(embedding)]; then a Qwen2 layer and a norm."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            setattr(self, name, Qwen2RMSNorm(HIDDEN))
        self.input_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.layer = Qwen2DecoderLayer(config, 0)
        self.rotary = Qwen2RotaryEmbedding(config)

    def forward(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        joined = self.input_proj(torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedding)], -1))
        turned = self.rotary(joined, torch.arange(joined.shape[1])[None])
        return self.final_layernorm(self.layer(joined, position_embeddings=turned))


def mimo() -> tuple[dict[str, Any], Tensors]:
    """The names of XiaomiMiMo/MiMo-7B-Base: a Qwen2 trunk and ``model.mtp_layers.0``."""
    config, trunk = saved("qwen2")
    config = config | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    layer = MiMoMtpLayer(Qwen2Config(**GQA))
    names = {"model.mtp_layers.0." + k.removeprefix("layer."): v.shape for k, v in layer.state_dict().items()}
    torch.manual_seed(11)
    return config, trunk | {name: torch.randn(shape) for name, shape in names.items()}


def test_mimo_is_covered_exactly() -> None:
    config, tensors = mimo()
    assert len([name for name in tensors if "mtp_layers" in name]) == 16  # knowledge/families.md, section 6, class C
    check_exact_cover(placements(config, inventory(tensors)), inventory(tensors))
    undeclared = placements(config | {"num_nextn_predict_layers": 0}, inventory(tensors))
    assert undeclared == placements(config, inventory(tensors))
    declared = placements(config | {"num_nextn_predict_layers": 2}, {})
    assert {p.role.place for p in declared if p.role.is_mtp} == {"mtp.0", "mtp.1"}


@torch.no_grad()
def test_mimo_reads_the_hidden_state_first() -> None:
    config, tensors = mimo()
    placed = placements(config, inventory(tensors))
    torch.manual_seed(5)
    embeddings, hiddens = torch.randn(2, 2, 1, 4, HIDDEN)

    def out(role: str | None, embedding: int, hidden: int, where: Any = ALL) -> torch.Tensor:
        changed = tensors if role is None else edited(tensors, placed, "mtp.0", role, where)
        model = MiMoMtpLayer(Qwen2Config(**GQA, attn_implementation="eager"))
        own = {name.removeprefix("model.mtp_layers.0."): v for name, v in changed.items() if "mtp_layers" in name}
        inside = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
        model.load_state_dict({"layer." * k.startswith(inside) + k: v for k, v in own.items()})
        return model(embeddings[embedding], hiddens[hidden])

    for roles, kept in (
        (("mtp.proj.embedding", "mtp.embedding_norm"), (1, 0)),
        (("mtp.proj.hidden", "mtp.hidden_norm"), (0, 1)),
    ):
        for role in roles:
            assert same(out(role, 0, 0), out(role, *kept))
            assert not same(out(role, 0, 0), out(role, *reversed(kept)))
    assert only(out("mtp.final_norm", 0, 0, 5), out(None, 0, 0), (0, ALL, 5))


LING = {
    "architectures": ["BailingMoeV2ForCausalLM"], "vocab_size": 23, "hidden_size": HIDDEN, "intermediate_size": 11,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 5, "use_qk_norm": True,
    "num_experts": 4, "num_shared_experts": 2, "moe_intermediate_size": 7, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip


def ling(config: dict[str, Any]) -> Tensors:
    """What the modules of modeling_bailing_moe_v2.py are called, and their shapes."""

    def mlp(prefix: str, units: int) -> dict[str, tuple[int, ...]]:
        shapes = {"gate_proj": (units, HIDDEN), "up_proj": (units, HIDDEN), "down_proj": (HIDDEN, units)}
        return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}

    shapes: dict[str, tuple[int, ...]] = {
        "model.word_embeddings.weight": (23, HIDDEN), "lm_head.weight": (23, HIDDEN), "model.norm.weight": (HIDDEN,),
    }  # fmt: skip
    for n in range(3):
        layer = f"model.layers.{n}."
        shapes |= {f"{layer}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}attention.{name}_layernorm.weight": (5,) for name in ("query", "key")}
        shapes[f"{layer}attention.query_key_value.weight"] = (12 * 5, HIDDEN)
        shapes[f"{layer}attention.dense.weight"] = (HIDDEN, 6 * 5)
        if config.get("use_bias"):
            shapes[f"{layer}attention.dense.bias"] = (HIDDEN,)
        if config.get("use_qkv_bias"):
            shapes[f"{layer}attention.query_key_value.bias"] = (12 * 5,)
        if n == 0:
            shapes |= mlp(f"{layer}mlp.", 11)
            continue
        shapes |= {f"{layer}mlp.gate.weight": (4, HIDDEN), f"{layer}mlp.gate.expert_bias": (4,)}
        shapes |= mlp(f"{layer}mlp.shared_experts.", 2 * 7)
        for e in range(4):
            shapes |= mlp(f"{layer}mlp.experts.{e}.", 7)
        if n == 2:
            shapes |= {f"{layer}{name}.weight": (HIDDEN,) for name in ("enorm", "hnorm", "final_layernorm")}
            shapes[f"{layer}eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    torch.manual_seed(13)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("more", [{}, {"use_bias": True, "use_qkv_bias": True}])
def test_ling_is_covered_exactly(more: dict[str, Any]) -> None:
    tensors = ling(LING | more)
    check_exact_cover(placements(LING | more, inventory(tensors)), inventory(tensors))
    assert expected_dtype("model.layers.2.mlp.gate.expert_bias", LING) == "F32"


def test_queries_keys_and_values_of_ling() -> None:
    """``.view(b, s, heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], -2)``."""
    tensors = ling(LING | {"use_qkv_bias": True})
    placed = placements(LING | {"use_qkv_bias": True}, inventory(tensors))
    x = torch.randn(1, 4, HIDDEN)
    fused = "model.layers.1.attention.query_key_value."
    parts = linear(x, tensors[fused + "weight"], tensors[fused + "bias"]).view(1, 4, 12, 5).split([6, 3, 3], dim=-2)
    for letter, real in zip("qkv", parts, strict=True):
        weight, bias = (role_tensor(tensors, placed, "trunk.1", f"attn.{letter}{end}") for end in ("", ".bias"))
        assert same(torch.einsum("hdc,bsc->bshd", weight, x) + bias, real)
    joined = tensors["model.layers.2.eh_proj.weight"]  # reads [enorm(embedding), hnorm(hidden)]
    assert same(role_tensor(tensors, placed, "mtp.0", "mtp.proj.embedding"), joined[:, :HIDDEN])


PANGU = {
    "architectures": ["PanguUltraMoEForCausalLM"], "vocab_size": 23, "hidden_size": 16, "intermediate_size": 11,
    "moe_intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 3, "num_shared_experts": 2,
    "num_routed_experts": 4, "attention_kv_lora_dim": 7, "attention_q_lora_dim": 9, "attention_qk_rope_dim": 4,
    "attention_v_dim": 5, "attention_qk_dim": 6, "num_dense_layers": 1, "num_mtp_layers": 1, "sandwich_norm": True,
}  # fmt: skip


def test_pangu_is_deepseek_with_a_norm_around_each_part() -> None:
    """``OpenPanguDecoderLayer.forward`` under ``sandwich_norm``; no ``e_score_correction_bias`` in ``MoEGate``."""
    config, deepseek = saved("deepseek, one MTP layer")  # the same sizes, and rotary as openPangu has it
    tensors = {k: v for k, v in deepseek.items() if not k.endswith("e_score_correction_bias")}
    for n in range(3):
        tensors |= {f"model.layers.{n}.{name}_mlp_layernorm.weight": torch.zeros(16) for name in ("pre", "post")}
    found = placements(PANGU, inventory(tensors))
    check_exact_cover(found, inventory(tensors))
    roles = {p.block.tensor: p.role.name for p in found}
    named = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
    assert [roles[f"model.layers.2.{name}.weight"] for name in named] == [
        "attn.input_norm", "attn.output_norm", "mlp.norm", "mlp.output_norm",
    ]  # fmt: skip
    inside = [p for p in placements(config, inventory(deepseek)) if "proj" in p.block.tensor]
    assert inside == [p for p in found if "proj" in p.block.tensor]
    later = {k: v for k, v in config.items() if k != "architectures"} | {"architectures": PANGU["architectures"]}
    assert placements(later, inventory(tensors)) == found
