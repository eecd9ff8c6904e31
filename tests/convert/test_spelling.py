"""What came in one spelling of prefixes goes back in that one; two spellings in one checkpoint stop the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.bridge_tables import BRIDGE_CASES
from tests.support.command_line import Run, run
from tests.support.family_tables import CASES, Case, Config, Shapes, beside_vision, write_shapes
from tests.support.sparse import write_headers
from tests.support.tiny import read_safetensors, sha256_tree

__all__ = ["run"]
EMBED = "model.embed_tokens.weight"


def _taken_out_of_one_with_vision(name: str) -> str:
    """As the tensors of a text model are called where it was loaded from a file with vision, and saved again."""
    return "model.language_model." + name.removeprefix("model.") if name.startswith("model.") else name


def _text(config: Config) -> Shapes:
    return {_taken_out_of_one_with_vision(name): shape for name, shape in CASES["Qwen3.5"].trunk(config).items()}


QWEN = replace(CASES["Qwen3.5"], trunk=_text, mtp=lambda config, _, depth: _mtp(config, depth))
GEMMA = replace(BRIDGE_CASES["Gemma 3 with vision"], trunk=beside_vision, changes={"tie_word_embeddings": False})


def _mtp(config: Config, depth: int) -> Shapes:
    own = CASES["Qwen3.5"]
    assert own.mtp is not None
    return own.mtp(config, own.trunk(config), depth)


@pytest.mark.parametrize("case", [QWEN, GEMMA], ids=["Qwen3.5", "Gemma 3"])
def test_there_and_back(case: Case, run: Run, memory: Path) -> None:
    write_shapes(case, memory / "hf")
    there = run("hf2mcore", memory / "hf", memory / "mcore", "--dialect", case.dialect)
    assert there.code == 0, there.err
    assert run("mcore2hf", memory / "mcore", memory / "back").code == 0
    assert sha256_tree(memory / "back") == sha256_tree(memory / "hf")


def test_the_reference_decides_which_spelling_is_written(run: Run, memory: Path) -> None:
    write_shapes(BRIDGE_CASES["Gemma 3 with vision, as the modules are named"], memory / "hf")
    there = run("hf2mcore", memory / "hf", memory / "mcore", "--dialect", "bridge", "--audit", "none")
    assert there.code == 0, there.err
    reference = write_shapes(BRIDGE_CASES["Gemma 3 with vision"], memory / "other", fill="random")
    back = run("mcore2hf", memory / "mcore", memory / "back", "--reference", reference, "--audit", "none")
    assert back.code == 0, back.err
    wanted = read_safetensors(memory / "other")
    for name, tensor in read_safetensors(memory / "hf").items():
        if name.startswith("model.language_model."):
            wanted["language_model.model." + name.removeprefix("model.language_model.")] = tensor
    assert read_safetensors(memory / "back") == wanted


@pytest.mark.parametrize("name", ["Gemma 3 with vision", "Gemma 3 with vision, as the modules are named"])
def test_a_layer_behind_the_trunk_is_taken_for_mtp_in_either(name: str, run: Run, tmp_path: Path) -> None:
    shapes = BRIDGE_CASES[name].shapes()
    layer = next(name for name in shapes if name.endswith("layers.2.mlp.down_proj.weight"))
    extra = layer.replace("layers.2.mlp.down_proj", "layers.3.eh_proj")
    source = write_headers(tmp_path / "hf", BRIDGE_CASES[name].config(), shapes | {extra: (36, 72)})
    result = run("plan", source, "--dialect", "bridge")
    assert (result.code, f"1 MTP tensors are present: {extra}" in result.err) == (9, True), result.err
    dropped = run("plan", source, "--dialect", "bridge", "--mtp", "drop", "--json")
    assert dropped.json["dropped"] == [extra]


def test_two_spellings_stop_the_run(run: Run, tmp_path: Path) -> None:
    case = CASES["Qwen3.5"]
    shapes = case.shapes()
    shapes[_taken_out_of_one_with_vision(EMBED)] = shapes.pop(EMBED)
    source = write_headers(tmp_path / "hf", case.config(), shapes)
    for command in (["plan", source], ["slice", source, tmp_path / "slice", "--layers", "1"]):
        result = run(*command)
        assert (result.code, result.out) == (6, "")
        assert "spelled in two ways: " in result.err
        assert "model.language_model.embed_tokens.weight" in result.err
