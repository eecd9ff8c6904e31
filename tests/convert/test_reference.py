"""A reference without weights, or without what Megatron has no place for: the checkpoint's own hf_assets stand in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Run, run
from tests.support.family_tables import write_case
from tests.support.frameworks_convert import to_mcore
from tests.support.sabotage import drop, edit_json
from tests.support.scratch import scratch
from tests.support.tiny import read_safetensors, write_tiny
from tests.support.tiny_fp8 import pack_fp8

__all__ = ["run"]
VISION = "model.visual."
KEPT = Path("hf_assets/passthrough")
OLD = Path("hf_assets/mtpconvert/aside")


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """``made / CASE / "hf"`` and ``... / "mcore"``."""
    with scratch() as root:
        for case in ("Qwen3.5 with vision", "Qwen3.5-MoE as published"):
            to_mcore(write_case(case, root / case / "hf"), root / case / "mcore")
        yield root


@pytest.fixture
def vision(made: Path, memory: Path) -> tuple[Path, Path, Path]:
    """The Hugging Face side, a copy of the Megatron side, and a reference with nothing but config.json."""
    hf, mcore = (made / "Qwen3.5 with vision" / kind for kind in ("hf", "mcore"))
    return hf, shutil.copytree(mcore, memory / "mcore"), config_alone(hf, memory / "config")


def config_alone(hf: Path, folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(hf / "config.json", folder)
    return folder


def test_vision_and_originals_come_from_hf_assets(vision: tuple[Path, Path, Path], run: Run, memory: Path) -> None:
    hf, mcore, reference = vision
    plan = run("plan", mcore, "--reference", reference)
    assert "21 tensors set aside" in plan.out, plan.err
    done = run("mcore2hf", mcore, memory / "back", "--reference", reference, "--audit", "bits")
    assert done.code == 0, done.err
    assert "names are as" in done.err
    assert "21 tensors that Megatron has no place for come from there" in done.err
    assert "0 elements of norms got the one added back; 24 are originals" in done.err
    assert read_safetensors(memory / "back") == read_safetensors(hf)


def test_they_are_found_where_earlier_conversions_put_them(
    vision: tuple[Path, Path, Path], run: Run, memory: Path
) -> None:
    hf, mcore, reference = vision
    (mcore / KEPT).rename(mcore / OLD)
    for number, more in enumerate(([], ["--reference", reference])):
        done = run("mcore2hf", mcore, memory / f"back{number}", *more, "--audit", "bits")
        assert done.code == 0, done.err
        assert read_safetensors(memory / f"back{number}") == read_safetensors(hf)


def test_what_another_reference_lacks(vision: tuple[Path, Path, Path], run: Run, memory: Path) -> None:
    """The hf_assets of another checkpoint of this model, from which somebody removed the tensors."""
    hf, mcore, _ = vision
    assets = shutil.copytree(mcore / "hf_assets", memory / "assets")
    shutil.rmtree(assets / "passthrough")
    shutil.rmtree(assets / "mtpconvert" / "originals")
    done = run("mcore2hf", mcore, memory / "back", "--reference", assets, "--audit", "bits")
    assert done.code == 0, done.err
    assert read_safetensors(memory / "back") == read_safetensors(hf)
    drop(lambda name: name == VISION + "merger.norm.bias")(mcore / KEPT)
    lost = run("mcore2hf", mcore, memory / "lost", "--reference", assets)
    assert (lost.code, "no longer holds the bytes" in lost.err) == (6, True), lost.err


def _none(mcore: Path, reference: Path) -> str:
    shutil.rmtree(mcore / "hf_assets")
    return "the reference has no weights to take them from\n"


def _other_sizes(mcore: Path, reference: Path) -> str:
    edit_json(reference / "config.json", lambda config: config["vision_config"].update(depth=9))
    return "its config.json says another vision_config.depth"


def _no_such_part(mcore: Path, reference: Path) -> str:
    edit_json(mcore / "hf_assets" / "config.json", lambda config: config.pop("vision_config"))
    return "its config.json has no vision_config"


def _other_architecture(mcore: Path, reference: Path) -> str:
    edit_json(mcore / "hf_assets" / "config.json", lambda config: config.update(architectures=["Qwen3_5ForCausalLM"]))
    return "its architectures are ['Qwen3_5ForCausalLM']"


def _other_shapes(mcore: Path, reference: Path) -> str:
    header = mcore / "hf_assets" / "mtpconvert" / "shard_headers" / "model.safetensors.header"
    name = "model.language_model.layers.0.input_layernorm.weight"
    raw = header.read_bytes()
    table: dict[str, Any] = json.loads(raw[8:])
    (size,) = table[name]["shape"]
    table[name]["shape"] = [size // 2, 2]
    text = json.dumps(table, separators=(",", ":")).encode()
    header.write_bytes(len(text).to_bytes(8, "little") + text)
    return f"it has tensors of other shapes: {name}"


@pytest.mark.parametrize("change", [_none, _other_sizes, _no_such_part, _other_architecture, _other_shapes])
def test_vision_that_cannot_be_had_is_refused(
    change: Callable[[Path, Path], str], vision: tuple[Path, Path, Path], run: Run, memory: Path
) -> None:
    _, mcore, reference = vision
    said = change(mcore, reference)
    refused = run("mcore2hf", mcore, memory / "back", "--reference", reference)
    assert refused.code == 8, refused.err
    assert "config.json has a vision_config, whose tensors (model.visual.*) Megatron has no place for" in refused.err
    assert said in refused.err
    assert "pass --reference: the HF directory" in refused.err
    assert not (memory / "back").exists()


def test_a_reference_that_shows_there_was_none(vision: tuple[Path, Path, Path], run: Run, memory: Path) -> None:
    """A checkpoint of the text alone under the name and config of the whole model; and a config without vision."""
    hf, mcore, reference = vision
    text = shutil.copytree(hf, memory / "text")
    drop(lambda name: name.startswith(VISION))(text)
    shutil.rmtree(mcore / "hf_assets")
    assert run("mcore2hf", mcore, memory / "a", "--reference", text, "--audit", "bits").code == 0
    assert not [name for name in read_safetensors(memory / "a") if name.startswith(VISION)]
    edit_json(reference / "config.json", lambda config: config.pop("vision_config"))
    done = run("mcore2hf", mcore, memory / "b", "--reference", reference, "--audit", "bits")
    assert done.code == 0, done.err


def test_a_reference_that_lost_vision_fails_its_audit(vision: tuple[Path, Path, Path], run: Run, memory: Path) -> None:
    """It has weights and none of vision, which its config wants and the checkpoint keeps."""
    hf, mcore, _ = vision
    text = shutil.copytree(hf, memory / "text")
    drop(lambda name: name.startswith(VISION))(text)
    refused = run("mcore2hf", mcore, memory / "a", "--reference", text, "--audit", "headers")
    assert (refused.code, "other-part-missing" in refused.err) == (1, True), refused.err


def test_the_language_model_alone(vision: tuple[Path, Path, Path], run: Run, memory: Path) -> None:
    """By the config of Qwen3_5ForCausalLM: other names, no vision, and hf_assets that are of another model."""
    _, mcore, reference = vision
    write_case("Qwen3.5", memory / "text")
    shutil.copy(memory / "text" / "config.json", reference)
    done = run("mcore2hf", mcore, memory / "back", "--reference", reference, "--audit", "headers")
    assert done.code == 0, done.err
    assert "nothing is taken from" in done.err
    assert "its architectures are ['Qwen3_5ForConditionalGeneration']" in done.err
    assert read_safetensors(memory / "back").keys() == read_safetensors(memory / "text").keys()


def test_layout_of_experts(made: Path, run: Run, memory: Path) -> None:
    """As hf_assets name them; where nothing does, as the mapping lists first, and that is said."""
    hf, mcore = (made / "Qwen3.5-MoE as published" / kind for kind in ("hf", "mcore"))
    reference = config_alone(hf, memory / "config")
    assert run("mcore2hf", mcore, memory / "a", "--reference", reference).code == 0
    assert read_safetensors(memory / "a") == read_safetensors(hf)
    bare = shutil.copytree(mcore, memory / "bare")
    shutil.rmtree(bare / "hf_assets")
    edit_json(reference / "config.json", lambda config: config.pop("vision_config"))
    done = run("mcore2hf", bare, memory / "b", "--reference", reference)
    assert done.code == 0, done.err
    assert (
        "no weights whose names say how they were kept: experts as experts_fused, which the mapping lists" in done.err
    )
    fused = [name for name in read_safetensors(memory / "b") if name.startswith("mtp.") and "experts" in name]
    assert [name.rpartition(".")[2] for name in fused if ".shared_expert" not in name] == ["down_proj", "gate_up_proj"]


def test_scales(run: Run, memory: Path) -> None:
    """FP8 by config.json alone; bf16 where that config says nothing of FP8."""
    hf = pack_fp8(write_tiny("deepseek_v3", memory / "hf"))
    to_mcore(hf, memory / "mcore")
    reference = config_alone(hf, memory / "config")
    done = run("mcore2hf", memory / "mcore", memory / "back", "--reference", reference, "--audit", "bits")
    assert done.code == 0, done.err
    assert read_safetensors(memory / "back") == read_safetensors(hf)
    edit_json(reference / "config.json", lambda config: config.pop("quantization_config"))
    assert run("mcore2hf", memory / "mcore", memory / "plain", "--reference", reference).code == 0
    assert {tensor[0] for tensor in read_safetensors(memory / "plain").values()} <= {"BF16", "F32"}
    shutil.rmtree(memory / "mcore" / "hf_assets" / "mtpconvert" / "scales")
    shutil.copy(hf / "config.json", reference)
    lost = run("mcore2hf", memory / "mcore", memory / "lost", "--reference", reference)
    assert (lost.code, "no longer holds them" in lost.err) == (6, True), lost.err


def test_a_dense_model_says_nothing_new(run: Run, memory: Path) -> None:
    to_mcore(write_tiny("qwen3", memory / "hf"), memory / "mcore")
    done = run("mcore2hf", memory / "mcore", memory / "back", "--reference", config_alone(memory / "hf", memory / "c"))
    assert (done.code, "come from there" in done.err) == (0, False)


def test_a_config_that_packs_what_was_plain(run: Run, memory: Path) -> None:
    to_mcore(write_tiny("qwen3", memory / "hf"), memory / "mcore")
    reference = config_alone(memory / "hf", memory / "c")
    table = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    edit_json(reference / "config.json", lambda config: config.update(quantization_config=table))
    refused = run("mcore2hf", memory / "mcore", memory / "back", "--reference", reference)
    assert (refused.code, "no weights that say which tensors it covers" in refused.err) == (6, True), refused.err
