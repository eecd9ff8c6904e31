"""The HF half of the roles covers what the real transformers writes, element for element; how it reads a config."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mtpconvert.audit.roles import huggingface
from mtpconvert.audit.roles.huggingface import FAMILIES, expected_dtype, placements
from mtpconvert.errors import ConfigError, NotRepresentableError
from mtpconvert.tensors import TensorSpec, inventory_of
from tests.support.hf_roles import CASES, MLA, inventory, mtp_model, mtp_tensors, saved
from tests.support.roles_cover import check_exact_cover


@pytest.mark.parametrize("case", CASES)
def test_what_transformers_saves_is_covered_exactly(case: str) -> None:
    config, tensors = saved(case)
    check_exact_cover(placements(config, inventory(tensors)), inventory(tensors))


@pytest.mark.parametrize("case", ["deepseek", "glm"])
def test_the_real_mtp_model_takes_every_tensor_placed_in_an_mtp_layer_but_the_copies(case: str) -> None:
    config, tensors = saved(case)
    copies = [p.block.tensor for p in placements(config, inventory(tensors)) if p.copy]
    _, unused = mtp_model(case, tensors)
    in_memory = {
        f"layers.{i}.mtp_block.{t}" for i in (0, 1) for t in ("embed_tokens.weight", "shared_head.head.weight")
    }
    assert unused == in_memory
    assert sorted(copies) == sorted(
        f"model.layers.{n}.{t}" for n in (2, 3) for t in ("embed_tokens.weight", "shared_head.head.weight")
    )


def test_a_trained_glm_with_mtp_layers_is_covered_exactly_and_in_its_dtypes() -> None:
    folder = Path(__file__).parents[2] / "fixtures" / "tiny-glm4-moe-mtp"
    config = json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", "np") as file:
        stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        specs = [TensorSpec(name, tuple(s.get_shape()), s.get_dtype()) for name, s in stored.items()]
    placed = placements(config, inventory_of(specs))
    check_exact_cover(placed, inventory_of(specs))
    assert {p.role.place for p in placed if p.role.is_mtp} == {"mtp.0", "mtp.1"}
    float32 = {spec.name for spec in specs if spec.dtype == "F32"}
    assert float32 == {spec.name for spec in specs if expected_dtype(spec.name, config) == "F32"} != set()


@pytest.mark.parametrize("case", ["llama", "qwen3", "qwen2", "mistral"])
def test_mtp_layers_of_a_dense_family_are_appended_as_transformers_would_load_them(case: str) -> None:
    config, tensors = saved(case)
    tensors = tensors | mtp_tensors(tensors, config, 1)
    check_exact_cover(placements(config | {"num_nextn_predict_layers": 1}, inventory(tensors)), inventory(tensors))


def test_stacked_experts_are_covered_too(tmp_path: Any) -> None:
    config, tensors = saved("deepseek, plain queries, no MTP")
    layer = "model.layers.1.mlp.experts."
    stacked = {k: v for k, v in tensors.items() if not k.startswith(layer)}
    pairs = [torch.cat([tensors[f"{layer}{e}.{t}_proj.weight"] for t in ("gate", "up")]) for e in range(4)]
    stacked[layer + "gate_up_proj"] = torch.stack(pairs)
    stacked[layer + "down_proj"] = torch.stack([tensors[f"{layer}{e}.down_proj.weight"] for e in range(4)])
    save_file(stacked, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))

    transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert layer + "gate_up_proj" in again
    check_exact_cover(placements(config, inventory(again)), inventory(again))


def test_published_deepseek_v3_has_the_published_size() -> None:
    """46,181 tensors besides the two copies (architecture.md); the trunk as large as the real class makes it."""
    placed = placements({"architectures": ["DeepseekV3ForCausalLM"]}, {})
    volumes = Counter[bool]()
    for p in placed:
        volumes[p.role.is_mtp] += p.block.volume
    assert len({p.block.tensor for p in placed}) == 46_181
    assert sum(volumes.values()) == 682_636_487_424
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config())
    assert volumes[False] == sum(v.numel() for v in model.state_dict().values())


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if hasattr(transformers, name)])
def test_defaults_are_those_of_the_config_class(architecture: str) -> None:
    text = "Text" if architecture.startswith(("Qwen3_5", "Gemma3")) else ""
    family = architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    real = getattr(transformers, f"{family}{text}Config")
    fields = {f: real.__dataclass_fields__[f].default for f in FAMILIES[architecture].defaults if hasattr(real, f)}
    fields |= {"num_nextn_predict_layers": real.num_mtp_layers} if hasattr(real, "num_mtp_layers") else {}
    assert {f: FAMILIES[architecture].defaults[f] for f in fields} == fields
    foreign = set(FAMILIES[architecture].defaults) - set(fields)
    assert foreign <= {
        "mtp_hidden_states_first", "num_nextn_predict_layers", "moe_layer_freq", "head_dim", "first_k_dense_replace",
        "full_attention_interval", "mtp_num_hidden_layers", "index_topk_freq", "index_skip_topk_offset",
        "index_topk_pattern", "hybrid_layer_pattern", "swa_num_attention_heads", "swa_num_key_value_heads",
        "swa_head_dim", "swa_v_head_dim",
    }  # fmt: skip


def test_older_configs_without_head_dim_or_kv_heads() -> None:
    """LLaMA-7B's first config.json had neither: 32 heads of 4096 / 32, each with keys and values of its own."""
    older = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    shapes = {p.role.name: p.role.shape for p in placements(older, {})}
    assert shapes["attn.q"] == shapes["attn.k"] == (32, 128, 4096)
    assert shapes["attn.out"] == (4096, 32, 128)


def test_a_tied_head_is_a_copy_of_the_embedding_and_only_placed_when_there() -> None:
    config, tensors = saved("llama, tied")
    assert "lm_head.weight" not in tensors
    assert all(p.role.name != "head" for p in placements(config, inventory(tensors)))
    tensors = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    (head,) = [p for p in placements(config, inventory(tensors)) if p.block.tensor == "lm_head.weight"]
    assert (head.role.name, head.copy) == ("embedding", True)
    check_exact_cover(placements(config, inventory(tensors)), inventory(tensors))


def test_copies_in_an_mtp_layer_are_placed_only_when_there_and_as_what_they_copy() -> None:
    config, tensors = saved("deepseek")

    def copies(config: dict[str, Any], present: dict[str, torch.Tensor]) -> dict[str, tuple[str, str]]:
        placed = placements(config, inventory(present))
        return {p.block.tensor: (p.role.place, p.role.name) for p in placed if p.copy}

    embedding, head = "model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"
    assert copies(config, tensors)[embedding] == ("", "embedding")
    assert copies(config, tensors)[head] == ("", "head")
    assert copies(config | {"tie_word_embeddings": True}, tensors)[head] == ("", "embedding")
    bare = {k: v for k, v in tensors.items() if not k.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    assert copies(config, bare) == {}
    whole = bare | {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"]}
    check_exact_cover(placements(config, inventory(whole)), inventory(whole))


def test_declared_mtp_layers_are_placed_though_absent_and_present_ones_though_undeclared() -> None:
    config, tensors = saved("deepseek")

    def layers(count: int | None, present: dict[str, torch.Tensor]) -> set[str]:
        changed = {k: v for k, v in config.items() if k != "num_nextn_predict_layers"}
        if count is not None:
            changed["num_nextn_predict_layers"] = count
        return {p.role.place for p in placements(changed, inventory(present)) if p.role.is_mtp}

    trunk = {k: v for k, v in tensors.items() if not k.startswith(("model.layers.2.", "model.layers.3."))}
    third = {k.replace("layers.2.", "layers.4."): v for k, v in tensors.items() if k.startswith("model.layers.2.")}
    assert layers(2, trunk) == {"mtp.0", "mtp.1"}
    assert layers(0, trunk) == set()
    assert layers(None, trunk) == {"mtp.0"}  # the class's default is 1
    assert layers(0, tensors) == {"mtp.0", "mtp.1"}
    assert layers(1, trunk | third) == {"mtp.0", "mtp.2"}


def test_a_surplus_trunk_layer_is_not_taken_for_mtp() -> None:
    config, tensors = saved("llama")
    placed = placements(config | {"num_hidden_layers": 1}, inventory(tensors))
    assert not any(p.role.is_mtp or p.block.tensor.startswith("model.layers.1.") for p in placed)


@pytest.mark.parametrize(("frequency", "moe"), [(1, {1, 2, 3, 4}), (2, {2, 4}), ([1, 0, 1, 1, 0], {2, 3}), (7, set())])
def test_moe_layer_freq(frequency: Any, moe: set[int]) -> None:
    config = MLA | {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 5, "moe_layer_freq": frequency}
    routers = {p.role.place for p in placements(config, {}) if p.role.name == "router"}
    assert routers == {f"trunk.{n}" for n in moe} | {"mtp.0"}


def test_glm_has_experts_after_its_dense_layers_whatever_moe_layer_freq_says() -> None:
    config = {"num_hidden_layers": 5, "first_k_dense_replace": 3, "moe_layer_freq": 2}
    with torch.device("meta"):
        layers = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**config)).model.layers
    moe = {f"trunk.{n}" for n, layer in enumerate(layers) if hasattr(layer.mlp, "gate")}
    placed = placements(config | {"architectures": ["Glm4MoeForCausalLM"]}, {})
    assert {p.role.place for p in placed if p.role.name == "router"} == moe | {"mtp.0"}
    assert moe == {"trunk.3", "trunk.4"}


@pytest.mark.parametrize("family", ["DeepseekV3", "Glm4Moe"])
def test_correction_bias_is_float32_whatever_the_model_is(family: str) -> None:
    config = {"architectures": [f"{family}ForCausalLM"], "dtype": "bfloat16"}
    bias = "model.layers.5.mlp.gate.e_score_correction_bias"
    assert "e_score_correction_bias" in getattr(transformers, f"{family}PreTrainedModel")._keep_in_fp32_modules_strict
    assert expected_dtype(bias, config) == "F32"
    assert expected_dtype("model.layers.5.mlp.gate.weight", config) is None
    assert expected_dtype("model.norm.weight", {"architectures": ["LlamaForCausalLM"]}) is None


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, NotRepresentableError, "GPT2LMHeadModel"),
        ({}, NotRepresentableError, "none named"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": True}, NotRepresentableError, "biases"),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "num_mtp_layers": 1, "num_nextn_predict_layers": 0},
            ConfigError,
            "num_nextn_predict_layers is 0 and num_mtp_layers is 1",
        ),
        ({"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 5}, ConfigError, "5 key/value heads"),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": "4096"}, ConfigError, "hidden_size"),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": None}, ConfigError, "num_hidden_layers is None"),
        ({"architectures": ["LlamaForCausalLM"], "mlp_bias": "no"}, ConfigError, "mlp_bias"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "moe_layer_freq": [1, 1]}, ConfigError, "moe_layer_freq"),
    ],
)
def test_refusals_name_what_is_wrong(config: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        placements(config, {})


@pytest.mark.parametrize("counts", [{"num_hidden_layers": 10**9}, {"n_routed_experts": 10**12}])
def test_counts_out_of_all_proportion_are_refused(counts: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "_MOST_PLACES", 20_000)  # for a quick test
    with pytest.raises(ConfigError, match="more than 20,000 tensors"):
        placements({"architectures": ["DeepseekV3ForCausalLM"]} | counts, {})
