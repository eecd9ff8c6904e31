"""Plans of ``--dialect bridge`` against what Megatron-Bridge's own model classes asked for (fixtures/inventories)."""

import ast
from pathlib import Path

import pytest

from mtpconvert.mapping.catalogue import file_of, load, sample_configs
from mtpconvert.mapping.expand import expand, proven
from mtpconvert.tensors import Shape

INVENTORIES = Path(__file__).parents[2] / "fixtures" / "inventories"
STACK = "decoder.layers."
SAME_MODEL = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
}


def recorded(family: str) -> dict[str, Shape]:
    """Key -> global shape, the layers of a stacked key written out."""
    asked: dict[str, Shape] = {}
    for line in (INVENTORIES / f"bridge-{family}.0.7.0.txt").read_text().splitlines():
        _, key, shape = line.split(" ", 2)
        stacked = key.startswith(STACK) and not key.removeprefix(STACK)[0].isdigit()
        layers, *each = ast.literal_eval(shape) if stacked else [1, *ast.literal_eval(shape)]
        for layer in range(layers):
            asked[key.replace(STACK, f"{STACK}{layer}.") if stacked else key] = tuple(each)
    return asked


def planned(architecture: str) -> dict[str, Shape]:
    """The tiny config's Megatron tensors, vocabulary not padded, with the MTP depths of the recorded model."""
    mapping = load(file_of(architecture))
    config = sample_configs(architecture)["tiny"]
    scope = mapping.scope(config, {"mtp_layers": 2 if architecture.startswith("MiMo") else 0})
    expansion = expand(mapping, scope, scope.integer("vocab_size"), None)
    proven(mapping, expansion)
    return {name: spec.shape for name, spec in expansion.mcore.items()}


def layer_keys(tensors: dict[str, Shape], layer: int = 0) -> set[str]:
    prefix = f"{STACK}{layer}."
    return {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}


@pytest.mark.parametrize("family", SAME_MODEL)
def test_the_plan_is_what_the_model_asks_for(family: str) -> None:
    assert planned(SAME_MODEL[family]) == recorded(family)


def test_a_layer_that_norms_outputs_alone_is_exaone_4s() -> None:
    """Bridge has no OLMo 2; EXAONE 4 is of the same modules, its q and k norms apart."""
    assert layer_keys(planned("Olmo2ForCausalLM")) == layer_keys(planned("Olmo3ForCausalLM"))
    assert layer_keys(planned("Olmo2ForCausalLM")) == layer_keys(recorded("exaone4"))


def test_norms_of_all_heads_are_olmoes() -> None:
    """OLMoE's are as wide as all heads of queries, and of keys, of which it has as many."""
    olmoe, olmo2 = recorded("olmoe"), planned("Olmo2ForCausalLM")
    for norm in ("q_layernorm", "k_layernorm"):
        name = f"{STACK}0.self_attention.{norm}.weight"
        assert olmoe[name] == (4 * 12,)  # SIZES of bridge_models.py
        assert olmo2[name] == ((6 if norm[0] == "q" else 2) * 10,)


def test_a_layer_between_norms_is_gemma_2s() -> None:
    """Bridge has no GLM-4, whose q, k and v have biases besides."""
    assert layer_keys(planned("Glm4ForCausalLM")) - layer_keys(recorded("gemma2")) == {"self_attention.linear_qkv.bias"}
    assert layer_keys(recorded("gemma2")) <= layer_keys(planned("Glm4ForCausalLM"))
