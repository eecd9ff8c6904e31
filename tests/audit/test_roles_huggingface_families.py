"""Which tensors the HF half expects of each family: spellings, layers of each kind, MTP layouts, published sizes."""

import json
from collections import Counter
from typing import Any

import pytest
import torch
import transformers

from mtpconvert.audit.roles.huggingface import other_prefixes, placements
from tests.support.hf_roles import inventory, saved
from tests.support.roles_cover import check_exact_cover


def places(config: dict[str, Any], tensors: dict[str, torch.Tensor], role: str) -> set[str]:
    return {p.role.place for p in placements(config, inventory(tensors)) if p.role.name == role}


def test_mixtral_as_transformers_keeps_it_in_memory() -> None:
    config, tensors = saved("mixtral")
    renamed = {k.replace("block_sparse_moe", "mlp"): v for k, v in tensors.items()}
    check_exact_cover(placements(config, inventory(renamed)), inventory(renamed))
    stacked = {k: v for k, v in renamed.items() if ".experts." not in k}
    for n in range(2):
        layer = f"model.layers.{n}.mlp.experts."
        pairs = [torch.cat([renamed[f"{layer}{e}.{w}.weight"] for w in ("w1", "w3")]) for e in range(4)]
        stacked[f"{layer}gate_up_proj"] = torch.stack(pairs)
        stacked[f"{layer}down_proj"] = torch.stack([renamed[f"{layer}{e}.w2.weight"] for e in range(4)])
    check_exact_cover(placements(config, inventory(stacked)), inventory(stacked))


@pytest.mark.parametrize(
    ("case", "moe"),
    [
        ("qwen3 moe, every other", {"trunk.1"}),
        ("qwen3 moe, first dense, biased", {"trunk.1"}),
        ("qwen2 moe", {"trunk.0", "trunk.1"}),
        ("glm lite, rotary halves, sparse", {"trunk.0", "trunk.1"}),
        ("glm lite", {"trunk.1", "mtp.0"}),
    ],
)
def test_layers_with_experts(case: str, moe: set[str]) -> None:
    assert places(*saved(case), "router") == moe


def test_mtp_beside_the_trunk_is_found_and_its_block_is_that_of_the_first_layer() -> None:
    config, tensors = saved("qwen3 moe, MTP")
    undeclared = {k: v for k, v in config.items() if k != "num_nextn_predict_layers"}
    assert places(undeclared, tensors, "attn.q") == places(config, tensors, "attn.q") == {"trunk.0", "trunk.1", "mtp.0"}
    scrap = {k: v for k, v in tensors.items() if not k.startswith("mtp.") or k == "mtp.fc.weight"}
    assert places(undeclared, scrap, "mtp.final_norm") == {"mtp.0"}
    second = {k.replace("layers.0", "layers.1"): v for k, v in tensors.items() if k.startswith("mtp.layers.0.")}
    assert places(config, tensors | second, "attn.q") == {"trunk.0", "trunk.1", "mtp.0", "mtp.1"}
    assert places(config, tensors | second, "mtp.final_norm") == {"mtp.0"}
    check_exact_cover(placements(config, inventory(tensors | second)), inventory(tensors | second))


def test_kimi_and_moonlight_declare_no_mtp() -> None:
    """The published config keys that matter (knowledge/families.md, section 6)."""
    kimi = {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 0, "num_hidden_layers": 4}
    assert not any(p.role.is_mtp for p in placements(kimi, {}))
    moonlight = kimi | {"q_lora_rank": None, "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 4}
    names = Counter(p.role.name for p in placements(moonlight, {}))
    assert names["mla.q.nope"] == 2 and names["router.correction"] == 1 and "mla.q_down" not in names


def test_mimo_v2_with_the_keys_and_the_mtp_layers_of_published_files() -> None:
    """``swa_`` keys and layer patterns as vLLM mimo_v2_flash.py reads them, names as SGLang mimo_v2_flash_nextn.py.

    Three dense sliding layers that no key counts, ``pre_mlp_layernorm`` in each (knowledge/families.md, class D).
    """
    config, tensors = saved("mimo v2")
    other = {"layer_types": None, "mlp_layer_types": None, "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1]}
    published = config | other | {"swa_num_key_value_heads": 6, "swa_head_dim": 8, "swa_v_head_dim": 5}
    tensors = {k.replace("sinks", "attention_sink_bias"): v for k, v in tensors.items()}
    check_exact_cover(placements(published, inventory(tensors)), inventory(tensors))
    hidden = config["hidden_size"]
    mtp = {}
    for i in range(3):
        layer = f"model.mtp.layers.{i}."
        mtp |= {layer + k.removeprefix("model.layers.1."): v for k, v in tensors.items() if ".1.self_attn." in k}
        mtp |= {layer + k.removeprefix("model.layers.0."): v for k, v in tensors.items() if ".0.mlp." in k}
        norms = ("enorm", "hnorm", "final_layernorm", "input_layernorm", "pre_mlp_layernorm")
        mtp |= {f"{layer}{name}.weight": torch.zeros(hidden) for name in norms}
        mtp[f"{layer}eh_proj.weight"] = torch.zeros(hidden, 2 * hidden)
    assert len(mtp) == 3 * 14
    found = placements(published, inventory(tensors | mtp))
    check_exact_cover(found, inventory(tensors | mtp))
    assert {p.role.place for p in found if p.role.name == "attn.sink"} == {"trunk.1", "mtp.0", "mtp.1", "mtp.2"}
    assert not any(p.role.is_mtp for p in placements(published, inventory(tensors)))


def test_minimax_declares_modules_that_nobody_published() -> None:
    config, tensors = saved("minimax")
    found = placements(config | {"num_mtp_modules": 3, "use_mtp": True}, inventory(tensors))
    assert not any(p.role.is_mtp for p in found)
    check_exact_cover(found, inventory(tensors))


# architecture, config keys of a release, tensors of its first MTP layer without the copies of embedding and head:
# knowledge/families.md, section 6; 791, 785 and 19 were reported for the files, the others follow from their name lists
RELEASES: list[tuple[str, dict[str, Any], int]] = [
    ("DeepseekV3", {}, 788 - 2),
    ("DeepseekV32", {"num_nextn_predict_layers": 1}, 788 - 2 + 5),
    ("Glm4Moe", {"n_routed_experts": 160, "attention_bias": True, "use_qk_norm": True}, 502 - 2),
    ("Glm4Moe", {"attention_bias": True}, 404 - 2),
    ("Glm4MoeLite", {"num_nextn_predict_layers": 1}, 212 - 2),
    ("GlmMoeDsa", {"num_nextn_predict_layers": 1}, 791),
    ("Qwen3Next", {"num_nextn_predict_layers": 1}, 1553),
    ("Qwen3_5", {"mtp_num_hidden_layers": 1}, 15),
    ("Qwen3_5Moe", {"mtp_num_hidden_layers": 1}, 785),
    ("ExaoneMoe", {"num_nextn_predict_layers": 1, "head_dim": 128}, 15),
    ("MiMo", {"num_nextn_predict_layers": 1}, 16),
]


@pytest.mark.parametrize(("family", "keys", "tensors"), RELEASES)
def test_mtp_layers_have_as_many_tensors_as_published_ones(family: str, keys: dict[str, Any], tensors: int) -> None:
    config = {"architectures": [f"{family}ForCausalLM"], "num_hidden_layers": 1, "first_k_dense_replace": 1} | keys
    assert len({p.block.tensor for p in placements(config, {}) if p.role.is_mtp}) == tensors


def test_qwen3_6_has_19_mtp_tensors() -> None:
    config = {"architectures": ["Qwen3_5MoeForCausalLM"], "num_hidden_layers": 1, "mtp_num_hidden_layers": 1}
    stacked = {"mtp.layers.0.mlp.experts.gate_up_proj": torch.zeros(1)}
    assert len({p.block.tensor for p in placements(config, inventory(stacked)) if p.role.is_mtp}) == 19


def test_the_text_part_of_gemma_3_in_both_spellings() -> None:
    text = {k: v for k, v in saved("gemma 3")[0].items() if k not in ("architectures", "tie_word_embeddings")}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    with torch.device("meta"):
        model = transformers.Gemma3ForConditionalGeneration(config)
    written = json.loads(config.to_json_string()) | {"architectures": ["Gemma3ForConditionalGeneration"]}
    names = dict(model.state_dict())
    older = {k.replace("model.language_model.", "language_model.model."): v for k, v in names.items()}
    older = {k.removeprefix("model.") if "language" not in k else k: v for k, v in older.items()}
    older["language_model.lm_head.weight"] = older.pop("lm_head.weight")
    for spelling in (names, older):
        mine = {k: v for k, v in spelling.items() if not k.startswith(other_prefixes(written))}
        assert 0 < len(mine) < len(spelling)
        for tied in (True, False):
            found = placements(written | {"tie_word_embeddings": tied}, inventory(mine))
            check_exact_cover(found, inventory(mine))
