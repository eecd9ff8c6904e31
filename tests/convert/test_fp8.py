"""Block-scaled FP8 in, bf16 in Megatron, the same FP8 out; everything that is wrong with a scale is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.command_line import Run, run
from tests.support.dist_read import read_torch_dist
from tests.support.mcore_edit import resaved
from tests.support.sabotage import edit_json, home_of, reindex
from tests.support.tiny import sha256_tree, write_tiny
from tests.support.tiny_fp8 import dequantised, is_packed, pack_fp8, read, read_all

__all__ = ["run"]

UP = "model.layers.0.mlp.up_proj.weight"  # [44, 36]
EXPERT = "model.layers.3.mlp.experts.2.down_proj.weight"  # of the MTP layer
GATE_UP = "decoder.layers.0.mlp.linear_fc1.weight"


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], name: str = UP) -> None:
    file = home_of(folder, name)
    tensors = read(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    reindex(folder)


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint16).numpy()


@pytest.mark.parametrize(
    ("block", "scale_dtype"),
    [
        ((16, 16), torch.float32),
        ((16, 16), torch.bfloat16),
        ((16, 16), torch.float8_e8m0fnu),
        ((128, 128), torch.float32),
        ((5, 7), torch.float32),
    ],
)
def test_it_comes_back_byte_for_byte(run: Run, memory: Path, block: tuple[int, int], scale_dtype: torch.dtype) -> None:
    source = pack_fp8(write_tiny("deepseek_v3", memory / "hf"), block=block, scale_dtype=scale_dtype)
    packed = [name for name in read_all(source) if is_packed(name)]
    assert {UP, EXPERT, "model.layers.1.self_attn.kv_b_proj.weight"} <= set(packed)
    there = run("hf2mcore", source, memory / "mcore")
    assert there.code == 0, there.err
    assert f"{len(packed)} tensors are FP8 in blocks of {block[0]} x {block[1]}" in there.err
    back = run("mcore2hf", memory / "mcore", memory / "back")
    assert back.code == 0, back.err
    assert sha256_tree(memory / "back") == sha256_tree(source)
    assert "FP8 blocks came back with the scales that were kept" in back.err
    assert "got new ones" not in back.err


def test_megatron_holds_value_times_scale_rounded_to_bf16(run: Run, memory: Path) -> None:
    source = pack_fp8(write_tiny("deepseek_v3", memory / "hf"))
    assert run("hf2mcore", source, memory / "mcore", "--iteration", "release").code == 0
    stored, hf = read_torch_dist(memory / "mcore" / "release"), dequantised(read_all(source), (16, 16))
    gate, up = (bits(hf[f"model.layers.0.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
    np.testing.assert_array_equal(stored[GATE_UP], np.concatenate([gate, up]))  # 44 rows each: no multiple of 16
    for hf_layer, layer in (
        ("model.layers.1", "decoder.layers.1"),
        ("model.layers.3", "mtp.layers.0.transformer_layer"),
    ):
        experts = np.stack([bits(hf[f"{hf_layer}.mlp.experts.{e}.down_proj.weight"]) for e in range(4)])
        np.testing.assert_array_equal(stored[f"{layer}.mlp.experts.experts.linear_fc2.weight"], experts)
    kv = stored["mtp.layers.0.transformer_layer.self_attention.linear_kv_down_proj.weight"]
    np.testing.assert_array_equal(kv, bits(hf["model.layers.3.self_attn.kv_a_proj_with_mqa.weight"]))
    np.testing.assert_array_equal(stored["mtp.layers.0.eh_proj.weight"], bits(hf["model.layers.3.eh_proj.weight"]))


def test_bfloat16_instead(run: Run, memory: Path) -> None:
    source = pack_fp8(write_tiny("deepseek_v3", memory / "hf"))
    assert run("hf2mcore", source, memory / "mcore").code == 0
    back = run("mcore2hf", memory / "mcore", memory / "back", "--dtype", "bfloat16", "--json")
    assert back.code == 0, back.err
    assert back.json["config_changes"] == {"quantization_config": None}
    assert any(
        "68 tensors that the reference packs are written as bf16, without scales" in n for n in back.json["notes"]
    )
    expected, found = dequantised(read_all(source), (16, 16)), read_all(memory / "back")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype
        assert tensor.contiguous().view(torch.uint8).equal(found[name].view(torch.uint8)), name
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, memory / "back"))
    assert before.pop("quantization_config")["weight_block_size"] == [16, 16]
    assert after == before


def test_what_training_changed_gets_new_scales_and_the_rest_its_old_bytes(run: Run, memory: Path) -> None:
    source = pack_fp8(write_tiny("deepseek_v3", memory / "hf"), extreme=False)
    assert run("hf2mcore", source, memory / "mcore").code == 0

    def train(tensors: dict[str, torch.Tensor]) -> None:
        tensors[GATE_UP][44 + 20, 3] = 96.0  # row 20 of up: block (1, 0) of its 16 x 16 blocks

    resaved(memory / "mcore" / "release", memory / "trained" / "release", train)
    (memory / "trained" / "latest_checkpointed_iteration.txt").write_text("release")
    back = run("mcore2hf", memory / "trained", memory / "back", "--reference", source)
    assert back.code == 0, back.err
    assert "1 in 1 tensors changed in Megatron and got new ones" in back.err
    before, after = read_all(source), read_all(memory / "back")
    differing = [name for name in before if not before[name].view(torch.uint8).equal(after[name].view(torch.uint8))]
    assert differing == [UP, UP + "_scale_inv"]
    changed = (after[UP + "_scale_inv"] != before[UP + "_scale_inv"]).nonzero().tolist()
    assert changed == [[1, 0]]
    assert after[UP + "_scale_inv"][1, 0] == torch.tensor(96.0) / 448
    codes = (after[UP].view(torch.uint8) != before[UP].view(torch.uint8)).nonzero()
    assert after[UP].view(torch.uint8)[20, 3] == 0x7E
    assert ((codes[:, 0] // 16 == 1) & (codes[:, 1] // 16 == 0)).all()


def test_the_round_trip_command_and_a_plan(run: Run, memory: Path) -> None:
    source = pack_fp8(write_tiny("deepseek_v3", memory / "hf"))
    done = run("roundtrip", source)
    assert done.code == 0, done.err
    assert "165 tensors" in done.out  # 97 in all but the two copies, 68 scales with them
    assert run("plan", source).code == 0


def test_mtp_dropped_on_purpose_takes_its_scales_along(run: Run, memory: Path) -> None:
    source = pack_fp8(write_tiny("deepseek_v3", memory / "hf"))
    assert run("hf2mcore", source, memory / "mcore", "--mtp", "drop").code == 0
    assert run("mcore2hf", memory / "mcore", memory / "back").code == 0
    before, after = read_all(source), read_all(memory / "back")
    assert set(after) == {name for name in before if not name.startswith("model.layers.3.")}
    assert all(after[name].view(torch.uint8).equal(before[name].view(torch.uint8)) for name in after)


def scale(value: float) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        edit(folder, lambda tensors: tensors[UP + "_scale_inv"].__setitem__((1, 0), value))

    return harm


def nan(folder: Path) -> None:
    edit(folder, lambda tensors: tensors[EXPERT].view(torch.uint8).__setitem__((3, 3), 0xFF), EXPERT)


def pop(name: str) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda tensors: tensors.pop(name), name.removesuffix("_scale_inv"))


def put(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    """A tensor put beside ``UP``, or in its place."""
    return lambda folder: edit(folder, lambda tensors: tensors.update({name: tensor}))


def quantisation(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda table: table["quantization_config"].update(changes))


CASES: dict[str, tuple[Callable[[Path], object], int, list[str]]] = {
    "a zero scale": (scale(0.0), 6, [UP + "_scale_inv: 1 of 9 scales", "[1, 0]"]),
    "a negative scale": (scale(-1.0), 6, [UP + "_scale_inv: 1 of 9 scales", "-1.0"]),
    "a scale that is NaN": (scale(float("nan")), 6, ["nan at block [1, 0]"]),
    "an infinite scale": (scale(float("inf")), 6, ["inf at block [1, 0]"]),
    "a scale too small": (scale(2.0**-125), 6, [UP + "_scale_inv: 1 of 9 scales"]),
    "a scale too large": (scale(2.0**119), 6, [UP + "_scale_inv: 1 of 9 scales"]),
    "a NaN code in MTP": (nan, 6, [EXPERT + " holds NaN codes"]),
    "a scale missing": (pop(EXPERT + "_scale_inv"), 6, ["1 FP8 weights have no _scale_inv", EXPERT]),
    "a surplus scale": (
        put("model.layers.0.mlp.extra.weight_scale_inv", torch.ones(1, 1)),
        6,
        ["1 scales have no FP8 weight", "model.layers.0.mlp.extra.weight_scale_inv"],
    ),
    "a weight cast, its scale left": (
        put(UP, torch.zeros(44, 36, dtype=torch.bfloat16)),
        6,
        ["1 scales have no FP8 weight", UP + "_scale_inv"],
    ),
    "a scale of another shape": (put(UP + "_scale_inv", torch.ones(3, 2)), 6, ["is [3, 2]", "need [3, 3]"]),
    "a scale of another dtype": (
        put(UP + "_scale_inv", torch.ones(3, 3, dtype=torch.float16)),
        10,
        [UP + "_scale_inv is F16"],
    ),
    "no block size": (quantisation(weight_block_size=None), 5, ["weight_block_size is None"]),
    "no sense in the block size": (quantisation(weight_block_size=[128]), 5, ["weight_block_size is [128]"]),
    "another block size": (quantisation(weight_block_size=[128, 128]), 6, ["blocks of 128 x 128"]),
    "a scale format of its own": (quantisation(scale_fmt="ue4m3"), 10, ["scale_fmt is 'ue4m3'"]),
    "compressed-tensors FP8": (
        put(UP.removesuffix("weight") + "weight_scale", torch.ones(44, 1)),
        10,
        ["packed in a way that is not converted", "model.layers.0.mlp.up_proj.weight_scale"],
    ),
    "one scale for a whole weight": (
        put(UP + "_scale_inv", torch.tensor(0.5)),
        10,
        ["1 FP8 weights have one scale each", UP + "_scale_inv"],
    ),
    "FP8 with a scale of another name": (
        lambda folder: edit(folder, lambda tensors: tensors.update({UP + "_scale": tensors.pop(UP + "_scale_inv")})),
        10,
        ["packed in a way that is not converted", UP + "_scale"],
    ),
    "one axis": (
        lambda folder: edit(folder, lambda tensors: tensors.update({UP: tensors[UP].reshape(-1)})),
        6,
        ["FP8 blocks need rows and columns", UP],
    ),
    "GPTQ": (
        put(UP.removesuffix("weight") + "qweight", torch.ones(4, 4, dtype=torch.int32)),
        10,
        ["quant_method fp8", "model.layers.0.mlp.up_proj.qweight"],
    ),
    "e5m2": (put(UP, torch.ones(44, 36).to(torch.float8_e5m2)), 10, [UP, "not converted"]),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(run: Run, memory: Path, case: str) -> None:
    source = pack_fp8(write_tiny("deepseek_v3", memory / "hf"))
    harm, code, words = CASES[case]
    harm(source)
    result = run("hf2mcore", source, memory / "mcore")
    assert result.code == code, (result.code, result.err)
    for word in words:
        assert word in result.err, result.err
    assert not (memory / "mcore").exists()


def test_a_reference_without_its_scales_is_refused(run: Run, memory: Path) -> None:
    source = pack_fp8(write_tiny("deepseek_v3", memory / "hf"))
    assert run("hf2mcore", source, memory / "mcore").code == 0
    for file in (memory / "mcore" / "hf_assets" / "mtpconvert" / "scales").iterdir():
        file.unlink()
    (memory / "mcore" / "hf_assets" / "mtpconvert" / "scales").rmdir()
    result = run("mcore2hf", memory / "mcore", memory / "back")
    assert (result.code, "68 scales and no longer holds them" in result.err) == (6, True), result.err
    assert "--dtype bfloat16" in result.err
    assert run("mcore2hf", memory / "mcore", memory / "back", "--dtype", "bfloat16").code == 0


def test_a_config_alone_does_not_say_what_is_fp8(run: Run, memory: Path) -> None:
    source = pack_fp8(write_tiny("deepseek_v3", memory / "hf"))
    assert run("hf2mcore", source, memory / "mcore").code == 0
    (memory / "config_only").mkdir()
    (memory / "config_only" / "config.json").write_bytes((source / "config.json").read_bytes())
    shutil.rmtree(memory / "mcore" / "hf_assets")
    result = run("mcore2hf", memory / "mcore", memory / "back", "--reference", memory / "config_only")
    assert (result.code, "has a quantization_config" in result.err) == (6, True), result.err


def test_inspect_says_how_it_is_packed_and_what_is_not_decoded(run: Run, memory: Path) -> None:
    source = pack_fp8(write_tiny("deepseek_v3", memory / "hf"))
    assert (
        "packing: 68 tensors as fp8_block in blocks of 16 x 16; hf2mcore decodes them to bf16"
        in run("inspect", source).out
    )
    CASES["GPTQ"][0](source)
    shown = run("inspect", source)
    assert shown.code == 0
    assert "packing: hf2mcore refuses it: 1 tensors are packed in a way that is not converted" in shown.out
    assert "present 1" in shown.last_line


def test_shards_of_another_size_and_the_conversion_itself_as_reference(run: Run, memory: Path) -> None:
    source = pack_fp8(write_tiny("deepseek_v3", memory / "hf"))
    assert run("hf2mcore", source, memory / "mcore").code == 0
    back = run(
        "mcore2hf", memory / "mcore", memory / "back", "--max-shard-size", "9KB", "--reference", memory / "mcore"
    )
    assert back.code == 0, back.err
    assert len(list((memory / "back").glob("*.safetensors"))) > 3
    before, after = read_all(source), read_all(memory / "back")
    assert before.keys() == after.keys()
    assert all(after[name].view(torch.uint8).equal(tensor.view(torch.uint8)) for name, tensor in before.items())


def test_dropping_mtp_helps_where_only_its_packing_is_broken(run: Run, memory: Path) -> None:
    source = pack_fp8(write_tiny("deepseek_v3", memory / "hf"))
    nan(source)
    pop(EXPERT.replace("experts.2", "experts.1") + "_scale_inv")(source)
    assert run("hf2mcore", source, memory / "mcore").code == 6
    assert run("hf2mcore", source, memory / "mcore", "--mtp", "drop").code == 0


def test_all_rows_of_megatrons_vocabulary_do_not_fit_the_scales_of_fewer(run: Run, memory: Path) -> None:
    source = write_tiny("deepseek_v3", memory / "hf", copies=False)
    head = torch.ones(98, 36).to(torch.float8_e4m3fn)
    edit(source, lambda tensors: tensors.update({"lm_head.weight": head}), "lm_head.weight")
    edit(source, lambda tensors: tensors.update({"lm_head.weight_scale_inv": torch.ones(7, 3)}), "lm_head.weight")
    edit_json(source / "config.json", lambda table: table.update(quantization_config={"weight_block_size": [16, 16]}))
    assert run("hf2mcore", source, memory / "mcore").code == 0
    result = run("mcore2hf", memory / "mcore", memory / "back", "--vocab-size", "from-megatron")
    assert (result.code, "lm_head.weight is [128, 36] in Megatron and [98, 36]" in result.err) == (10, True), result.err
    assert run("mcore2hf", memory / "mcore", memory / "back").code == 0
    assert sha256_tree(memory / "back") == sha256_tree(source)


def test_values_that_fp8_cannot_write_and_a_megatron_of_float32(run: Run, memory: Path) -> None:
    source = pack_fp8(write_tiny("deepseek_v3", memory / "hf"), extreme=False)
    assert run("hf2mcore", source, memory / "mcore").code == 0

    def trained(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
        resaved(memory / "mcore" / "release", memory / name / "release", lambda tensors: change(tensors))
        (memory / name / "latest_checkpointed_iteration.txt").write_text("release")
        return memory / name

    infinite = trained("infinite", lambda tensors: tensors[GATE_UP].__setitem__((50, 3), float("inf")))
    result = run("mcore2hf", infinite, memory / "back", "--reference", source)
    assert (result.code, UP + " cannot be written as FP8: it holds NaN or infinity" in result.err) == (10, True)
    wide = trained("wide", lambda tensors: tensors.update({GATE_UP: tensors[GATE_UP].float()}))
    result = run("mcore2hf", wide, memory / "back", "--reference", source)
    assert (result.code, "which Megatron has as F32; only bf16 is packed" in result.err) == (10, True), result.err
    assert not (memory / "back").exists()


def test_a_config_that_excludes_what_is_fp8_is_told(run: Run, memory: Path) -> None:
    source = pack_fp8(write_tiny("deepseek_v3", memory / "hf"))
    quantisation(modules_to_not_convert=["model.layers.0.mlp.up_proj"], ignore=5)(source)
    result = run("plan", source)
    assert result.code == 0
    assert (
        "1 modules are FP8 in the files and excluded by quantization_config: model.layers.0.mlp.up_proj" in result.err
    )
