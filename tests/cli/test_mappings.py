"""``mappings list | show | check``: the published numbers, and what is said of files that are wrong."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path

import pytest

from mtpconvert.mapping.catalogue import architectures, file_of
from tests.support.command_line import Run
from tests.support.mapping_files import BASE, CONFIG, written
from tests.support.tiny import write_tiny
from tests.support.tiny_families import CONFIGS, units

# DeepSeek-V3: see test_the_full_size_numbers_by_hand. The elements of the others are the parameter counts that the
# hub shows for Llama-3.1-8B, Mistral-Nemo-Base-2407, Qwen2.5-7B and Qwen3-8B.
FULL = {
    "DeepseekV3ForCausalLM": (46_181, 2, 46_183, 925, 682_636_487_424),
    "Glm4MoeForCausalLM": (44_689, 2, 44_691, 1_204, 356_785_898_816),
    "LlamaForCausalLM": (291, 0, 291, 195, 8_030_261_248),
    "MistralForCausalLM": (363, 0, 363, 243, 12_247_782_400),
    "Qwen2ForCausalLM": (339, 0, 339, 199, 7_615_616_512),
    "Qwen3ForCausalLM": (399, 0, 399, 291, 8_190_735_360),
}


@pytest.mark.parametrize("architecture", FULL)
def test_check_says_the_numbers_of_a_full_size_model(architecture: str, run: Run) -> None:
    """``mappings check`` of all architectures runs in tests/test_readme.py."""
    result = run("mappings", "check", file_of(architecture))
    assert (result.code, result.err) == (0, "")
    tiles, copies, hf, mcore, elements = FULL[architecture]
    line = (
        f"{architecture} full: {tiles:,} tiles and {copies} copies; {hf:,} HF and {mcore:,} Megatron tensors;"
        f" {elements:,} elements a side without the copies; a bijection"
    )
    assert line in result.out.splitlines()


def test_the_numbers_of_glm_by_hand() -> None:
    """GLM-4.5 from its config alone: biases on q, k, v; q and k norms; 160 experts and a shared one; one MTP layer."""
    hidden, vocab, experts, head, heads, groups = 5120, 151_552, 160, 128, 96, 8
    rows = (heads + 2 * groups) * head
    attention = rows * hidden + rows + hidden * heads * head + 2 * head + 2 * hidden
    moe = experts * hidden + experts + (experts + 1) * 3 * 1536 * hidden
    trunk = 92 * attention + 3 * 3 * 12_288 * hidden + 89 * moe + 2 * vocab * hidden + hidden
    mtp = attention + moe + 2 * hidden * hidden + 3 * hidden
    assert trunk + mtp == FULL["Glm4MoeForCausalLM"][4]
    hf_attention, hf_moe = 4 + 3 + 2 + 2, 2 + 3 * (experts + 1)
    assert 92 * hf_attention + 3 * 3 + 89 * hf_moe + 3 + hf_attention + hf_moe + 4 + 2 == 44_691
    assert 92 * (5 + 2) + 3 * 2 + 89 * 6 + 3 + (5 + 2) + 6 + 4 == 1_204


def test_the_full_size_numbers_by_hand() -> None:
    """DeepSeek-V3 from its config alone, without the mapping file."""
    hidden, vocab, experts, heads = 7168, 129_280, 256, 128
    mla = (
        1536 * hidden + 1536 + heads * 192 * 1536  # q_a, its norm, q_b
        + (512 + 64) * hidden + 512 + heads * 256 * 512  # kv_a, its norm, kv_b
        + hidden * heads * 128  # o
        + 2 * hidden  # the layer's two norms
    )  # fmt: skip
    moe = experts * hidden + experts + (experts + 1) * 3 * 2048 * hidden
    trunk = 61 * mla + 3 * 3 * 18_432 * hidden + 58 * moe + 2 * vocab * hidden + hidden
    mtp = mla + moe + 2 * hidden * hidden + 3 * hidden
    assert trunk // 10**9 == 671  # "671B total parameters" of the model card
    assert trunk + mtp == FULL["DeepseekV3ForCausalLM"][4] == 682_636_487_424
    tensors_mla, tensors_moe = 9, 2 + 3 * (experts + 1)
    assert 61 * tensors_mla + 3 * 3 + 58 * tensors_moe + 3 + tensors_mla + tensors_moe + 4 + 2 == 46_183
    assert 61 * 8 + 3 * 3 + 58 * 7 + 3 + 8 + 7 + 4 == 925


@pytest.mark.parametrize("family", CONFIGS)
def test_check_on_a_config_of_ones_own(family: str, run: Run, memory: Path) -> None:
    """Tensors and elements against those that the checkpoint really has."""
    config = CONFIGS[family]
    mtp = config.get("num_nextn_predict_layers", 0)
    source = write_tiny(family, memory / "hf")
    shapes = {name: shape for unit in units(config, mtp, copies=False) for name, shape in unit.items()}
    result = run("mappings", "check", "--config", source / "config.json")
    assert result.code == 0
    found = re.search(r": ([\d,]+) tiles and (\d+) copies; ([\d,]+) HF .* tensors; ([\d,]+) elements", result.out)
    assert found
    copies = 2 * mtp + config["tie_word_embeddings"]
    assert int(found[2]) == copies
    assert int(found[3]) == len(shapes) + copies
    assert int(found[4].replace(",", "")) == sum(map(prod, shapes.values()))
    assert str(source / "config.json") in result.out


def tiny_config(folder: Path, **changes: object) -> Path:
    file = folder / "config.json"
    file.write_text(
        json.dumps(CONFIG | {"architectures": ["TinyForCausalLM"], "num_nextn_predict_layers": 1} | changes)
    )
    return file


def test_a_new_architecture_needs_a_config_and_is_checked_on_each_that_is_given(run: Run, tmp_path: Path) -> None:
    file = written(tmp_path, BASE)
    result = run("mappings", "check", file)
    assert result.code == 2
    assert "no sample config of TinyForCausalLM comes with this tool" in result.err
    assert "--config" in result.err
    config = tiny_config(tmp_path)
    (tmp_path / "b").mkdir()
    other = tiny_config(tmp_path / "b", num_nextn_predict_layers=None, num_hidden_layers=1)
    result = run("mappings", "check", file, "--config", config, "--config", other)
    assert result.code == 0
    # two layers of norm, gate, up and 3 experts, embed, eh and one copy; one layer and no MTP
    assert "TinyForCausalLM" in result.out.splitlines()[0]
    assert "14 tiles and 1 copies; 15 HF and 8 Megatron tensors" in result.out.splitlines()[0]
    assert "7 tiles and 0 copies; 7 HF and 4 Megatron tensors" in result.out.splitlines()[1]


@pytest.mark.parametrize(
    ("old", "new", "code", "what"),
    [
        ("schema = 1", "schema = 9", 3, "schema is 9"),
        ('dims = ["H", "2*H"]', 'dims = ["H", "2**H"]', 3, "is no expression"),
        ('source = "embed"', 'source = "emb"', 3, "no row relates"),
        ('mcore = "fc1"', 'mcore = "norm"', 4, "Tiny.toml: group layer, row 1; Tiny.toml: group layer, row 2"),
        ('rows = ["layer"]', 'rows = ["layer", "layer"]', 4, "Tiny.toml: group layer, row 1"),
        ('dims = ["Q"]', 'dims = ["ghost"]', 5, "'ghost' is neither a symbol"),
        ("[rows]", '[arguments]\nnum_layers = "2+"\n[rows]', 3, "is no expression"),
        ("[rows]", '[arguments]\nfunctions = ["ghost"]\n[rows]', 3, "no such function: ghost"),
    ],
)
def test_a_wrong_file(old: str, new: str, code: int, what: str, run: Run, tmp_path: Path) -> None:
    assert BASE.count(old) == 1
    file = written(tmp_path, BASE.replace(old, new))
    result = run("mappings", "check", file, "--config", tiny_config(tmp_path))
    assert (result.code, result.out) == (code, "")
    assert what in result.err
    assert file.name in result.err or str(tmp_path / "config.json") in result.err
    assert "Traceback" not in result.err


def test_a_shipped_file_made_wrong_is_a_mapping_error_on_the_shipped_configs(run: Run, tmp_path: Path) -> None:
    """Sample configs are right, so a key that is missing there is the mapping's fault: 3, not 5."""
    text = file_of("Qwen3ForCausalLM").read_text().replace('H = "hidden_size"', 'H = "hiden_size"')
    result = run("mappings", "check", written(tmp_path, text))
    assert result.code == 3
    assert "hiden_size" in result.err


def test_a_copy_of_a_shipped_file_finds_the_shipped_row_groups(run: Run, tmp_path: Path) -> None:
    result = run("mappings", "check", written(tmp_path, file_of("Qwen3ForCausalLM").read_text()))
    assert result.code == 0
    assert result.out.count("a bijection") == 2


@pytest.mark.parametrize("name", ["absent.toml", "."])
def test_a_file_that_cannot_be_read(name: str, run: Run, tmp_path: Path) -> None:
    result = run("mappings", "check", tmp_path / name)
    assert result.code == 3
    assert "cannot be read" in result.err


def test_configs_that_cannot_be_used(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    for name, code, what in (("absent.json", 5, "there is no absent.json"), ("bad.json", 5, "cannot be read")):
        result = run("mappings", "check", "--config", tmp_path / name)
        assert result.code == code
        assert what in result.err
    result = run("mappings", "check", "--config", tiny_config(tmp_path))
    assert result.code == 10
    assert "no mapping file for the architecture 'TinyForCausalLM'" in result.err


def test_list_and_show(run: Run) -> None:
    result = run("mappings", "list")
    assert result.code == 0
    assert [line.split()[0] for line in result.out.splitlines()] == architectures()
    with_mtp = {line.split()[0] for line in result.out.splitlines() if "no MTP" not in line}
    assert {"DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"} <= with_mtp
    assert with_mtp.isdisjoint({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
    for architecture in architectures():
        assert run("mappings", "show", architecture).out == file_of(architecture).read_text()
    result = run("mappings", "show", "Qwen3ForCausalML")
    assert result.code == 10
    assert "the closest known one is Qwen3ForCausalLM" in result.err
