"""MTP counts that config.json leaves to its class, and MTP layers that Megatron has no place for together.

transformers DeepseekV3Config and Glm4MoeConfig: ``num_mtp_layers: int = 1``, also read as num_nextn_predict_layers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mtpconvert.mapping import catalogue
from tests.support.command_line import Run
from tests.support.family_tables import CASES, Config, Shapes, transformers_shapes, write_case
from tests.support.sabotage import edit_json
from tests.support.sparse import write_headers
from tests.support.tiny import read_safetensors, write_safetensors

KEY = "num_nextn_predict_layers"
CLASSES = {"DeepseekV3ForCausalLM": "DeepseekV3Config", "Glm4MoeForCausalLM": "Glm4MoeConfig"}


@pytest.fixture(scope="module", params=CLASSES)
def trunk(request: pytest.FixtureRequest) -> tuple[Config, Shapes]:
    """A config without the count, and a model without MTP."""
    config = dict(catalogue.sample_configs(request.param)["tiny"])
    del config[KEY]
    return config, transformers_shapes(config | {KEY: 0})


def headers(folder: Path, config: Config, shapes: Shapes) -> Path:
    return write_headers(folder, config, shapes, {name: "F32" for name in shapes if name.endswith("correction_bias")})


def test_a_missing_count_that_readers_take_for_one(trunk: tuple[Config, Shapes], run: Run, tmp_path: Path) -> None:
    config, shapes = trunk
    hf = headers(tmp_path / "hf", config, shapes)
    named = f"has no {KEY}, which readers take for 1 (transformers {CLASSES[config['architectures'][0]]}.num_mtp_layers"
    for command in (("plan", hf), ("hf2mcore", hf, tmp_path / "mc")):
        result = run(*command)
        assert (result.code, result.out) == (9, "")
        assert named in result.err
        assert "no MTP tensor is present" in result.err
        assert f'write "{KEY}": 0 in config.json' in result.err
    assert not (tmp_path / "mc").exists()
    args = run("args", hf)
    assert "--mtp-num-layers 1" in args.out
    assert args.last_line == "# MTP layers: declared nothing, to be launched with: 1"
    assert f"readers take it for 1 (transformers {CLASSES[config['architectures'][0]]}" in args.err
    inspected = run("inspect", hf)
    assert (inspected.code, inspected.last_line) == (
        0,
        f"MTP layers: declared nothing ({KEY}), present 0; 0 tensors, 0 bytes",
    )
    assert "and no MTP tensor is present: hf2mcore refuses that" in inspected.err
    assert run("plan", hf, "--mtp", "drop").code == 0


@pytest.mark.parametrize("said", [{KEY: None}, {KEY: 0}, {"num_mtp_layers": 0}])
def test_what_is_said_counts(said: Config, trunk: tuple[Config, Shapes], run: Run, tmp_path: Path) -> None:
    config, shapes = trunk
    hf = headers(tmp_path / "hf", config | said, shapes)
    plan = run("plan", hf)
    assert plan.code == 0, plan.err
    assert "present 0, written 0" in plan.last_line
    args = run("args", hf)
    assert args.last_line.endswith("to be launched with: 0")
    assert "readers take it" not in args.err


def test_on_the_way_back_too(run: Run, tmp_path: Path) -> None:
    """A Megatron model without MTP, whose config.json has lost the 0 that said so."""
    hf = write_case("Kimi-K2", tmp_path / "hf")
    assert run("hf2mcore", hf, tmp_path / "mc").code == 0
    edit_json(tmp_path / "mc" / "hf_assets" / "config.json", lambda config: config.pop(KEY))
    result = run("mcore2hf", tmp_path / "mc", tmp_path / "back")
    assert (result.code, result.out) == (9, "")
    assert f"has no {KEY}, which readers take for 1" in result.err
    edit_json(hf / "config.json", lambda config: config.pop(KEY))
    assert run("hf2mcore", hf, tmp_path / "dropped", "--mtp", "drop", "--audit", "headers").code == 0


SHARED = ("Qwen3-Next", "Qwen3.5", "Qwen3.5 with vision", "K-EXAONE")


@pytest.mark.parametrize("name", SHARED)
def test_two_layers_with_one_projection(name: str, run: Run, tmp_path: Path) -> None:
    """vLLM's qwen3_next_mtp.py: one ``fc`` and one set of norms, whatever the depth."""
    hf = write_case(name, tmp_path / "hf")
    tensors = read_safetensors(hf)
    second = {re.sub(r"^mtp\.layers\.0\.", "mtp.layers.1.", n): t for n, t in tensors.items() if "mtp.layers.0." in n}
    write_safetensors(hf / "model.safetensors", tensors | second)

    def counted(config: dict[str, Any]) -> None:
        table = config.get("text_config", config)
        table[next(key for key in table if key in (KEY, "mtp_num_hidden_layers"))] = 2

    edit_json(hf / "config.json", counted)
    for command in (("plan", hf), ("hf2mcore", hf, tmp_path / "mc"), ("args", hf)):
        result = run(*command)
        assert (result.code, result.out) == (10, "")
        assert "2 MTP layers share one projection and its norms in this layout" in result.err
        assert "mtp.fc.weight" in result.err
    assert run("plan", hf, "--mtp", "drop").code == 0
    write_safetensors(hf / "model.safetensors", tensors)
    lost = run("plan", hf)
    assert (lost.code, lost.out) == (9, "")
    assert "tensors of 1 are present" in lost.err


TE_ONLY = sorted(name for name, case in CASES.items() if case.specs == ("te",))


@pytest.mark.parametrize("name", TE_ONLY)
def test_arguments_for_layers_that_the_local_spec_has_not(name: str, run: Run, tmp_path: Path) -> None:
    """``args`` says what ``hf2mcore`` says, word for word; the others have local layers."""
    hf = write_case(name, tmp_path / "hf")
    options = ("--spec", "local", "--mcore-version", "0.19" if "0.16" in CASES[name].unsupported else "0.16")
    arguments, converted = run("args", hf, *options), run("hf2mcore", hf, tmp_path / "mc", *options)
    assert (arguments.code, arguments.out) == (10, "") == (converted.code, converted.out)
    assert "megatron-core has no local layer spec for" in arguments.err
    assert arguments.err == converted.err
