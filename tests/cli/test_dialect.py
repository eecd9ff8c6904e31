"""``--dialect bridge``: what stock megatron-core has no modules for is written when it is asked for, never else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtpconvert.mapping.catalogue import architectures, file_of, load
from tests.support.bridge_tables import BRIDGE_CASES, write_bridge_case
from tests.support.command_line import Run
from tests.support.sparse import write_headers
from tests.support.tiny import write_tiny

# architecture -> (endings of the tensors that show it, a piece of the reason)
WHY = {
    "Gemma2ForCausalLM": ("post_attention_layernorm.weight", "norms no sublayer's output"),
    "Gemma3ForCausalLM": ("post_feedforward_layernorm.weight", "norms no sublayer's output"),
    "Gemma3ForConditionalGeneration": ("post_attention_layernorm.weight", "norms no sublayer's output"),
    "Glm4ForCausalLM": ("post_mlp_layernorm.weight", "norms no sublayer's output"),
    "Olmo2ForCausalLM": ("post_attention_layernorm.weight", "norms no sublayer's output"),
    "Olmo3ForCausalLM": ("self_attn.q_norm.weight", "all heads at once"),
    "MellumForCausalLM": ("", "rotary_base"),
    "MiniMaxM2ForCausalLM": ("self_attn.q_norm.weight", "all heads at once"),
    "MiMoV2FlashForCausalLM": ("self_attn.v_proj.weight", "value heads of another size"),
    "PanguUltraMoEForCausalLM": ("post_mlp_layernorm.weight", "norms no sublayer's output"),
}


def headers(name: str, folder: Path) -> Path:
    case = BRIDGE_CASES[name]
    shapes = case.shapes()
    return write_headers(folder, case.config(), shapes, dict.fromkeys(shapes, "F32"))


def test_these_are_all_families_of_the_dialect() -> None:
    assert {name for name in architectures() if load(file_of(name)).dialect} == set(WHY)
    assert {case.architecture for case in BRIDGE_CASES.values()} == set(WHY)


@pytest.mark.parametrize("name", BRIDGE_CASES)
def test_without_it_the_family_is_refused_with_its_tensors_and_the_reason(name: str, run: Run, tmp_path: Path) -> None:
    source = headers(name, tmp_path / "hf")
    ending, reason = WHY[BRIDGE_CASES[name].architecture]
    for command in (["plan", source], ["hf2mcore", source, tmp_path / "out"], ["roundtrip", source]):
        result = run(*command)
        assert (result.code, result.out) == (10, "")
        assert reason in result.err
        assert "--dialect bridge" in result.err
        assert ending in result.err
    assert run("args", source).code == 10
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("name", BRIDGE_CASES)
def test_with_it_the_plan_says_that_stock_megatron_does_not_load_it(name: str, run: Run, tmp_path: Path) -> None:
    source = headers(name, tmp_path / "hf")
    result = run("plan", source, "--dialect", "bridge")
    assert result.code == 0, result.err
    assert "NOT FOR STOCK MEGATRON" in result.err
    local = run("hf2mcore", source, tmp_path / "out", "--dialect", "bridge", "--spec", "local")
    assert local.code == 10
    assert "Transformer Engine only" in local.err


def test_a_family_of_stock_megatron_has_no_use_for_it(run: Run, tmp_path: Path) -> None:
    source = write_tiny("llama", tmp_path / "hf")
    result = run("hf2mcore", source, tmp_path / "out", "--dialect", "bridge")
    assert result.code == 2
    assert "LlamaForCausalLM" in result.err
    assert not (tmp_path / "out").exists()


def test_the_conversion_says_who_loads_it_and_the_way_back_needs_no_option(run: Run, tmp_path: Path) -> None:
    source = write_bridge_case("Gemma 2", tmp_path / "hf")
    result = run("hf2mcore", source, tmp_path / "there", "--dialect", "bridge")
    assert result.code == 0, result.err
    assert "Megatron-Bridge" in result.out
    assert "Launch Megatron" not in result.out
    again = run("hf2mcore", source, tmp_path / "again", "--dialect", "bridge", "--json")
    document = json.loads(again.out)
    assert (document["dialect"], document["launch_flags"]) == ("bridge", [])
    assert run("mcore2hf", tmp_path / "there", tmp_path / "back").code == 0
    for file in source.iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()
